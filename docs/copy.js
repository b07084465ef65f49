// A button in each block of code that copies it; comments at the ends of shell lines stay behind.
for (const code of document.querySelectorAll("pre > code")) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "copy";
  button.textContent = "Copy";
  button.addEventListener("click", async () => {
    const shell = code.classList.contains("language-bash");
    const text = shell ? code.textContent.replace(/ {2,}#.*$/gm, "") : code.textContent;
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  code.parentElement.classList.add("with-copy");
  code.parentElement.append(button);
}

// Heat map of a text: how strongly a token is shaded for the share of layers and heads that hold it.
const make = (tag, text, attributes = {}) => {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
};
const percent = (share) => `${Math.round(100 * share)}%`;
const shade = (share) => `rgba(0, 114, 178, ${(0.75 * share).toFixed(2)})`;
const style = (share) => `background:${shade(share)};color:${share === 0 ? "#999" : "#000"}`;
const scale = (says, steps) => {
  const node = make("p", says, { class: "soft scale" });
  for (let step = 0; step <= steps; step += 1) node.append(make("span", percent(step / steps), { style: style(step / steps) }));
  return node;
};

"use strict";
// Everything that comes from the server or from a file becomes text (textContent), never markup. An answer's Markdown is read
// into tokens (page.marked.js), of which elements are made here.
const $ = (id) => document.getElementById(id);
const make = (tag, text, more = {}) => Object.assign(document.createElement(tag), text === undefined ? {} : { textContent: text }, more);
const number = (value) => value.toLocaleString("en");
const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)}%`;
const size = (bytes) => {
  const units = ["bytes", "KiB", "MiB", "GiB"];
  let step = 0;
  for (; bytes >= 1024 && step < units.length - 1; step += 1) bytes /= 1024;
  return `${step ? bytes.toFixed(1) : bytes} ${units[step]}`;
};
const sleep = (seconds) => new Promise((done) => setTimeout(done, 1000 * seconds));
const KEY = "locret-api-key", TALKS = "locret-conversations", POLL = 0.3, PAGE = 1000;

// ---- the server ------------------------------------------------------------------------------------------------------

// An error in words. ``status``: of HTTP, 0 where there was no answer.
class Refused extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

const WORDS = {
  401: "The server asks for an API key",
  404: "It is not there any more",
  413: "That is too large",
  429: "The server is full",
};

// One request. Raises Refused with the server's own words; a 401 asks for the key.
const call = async (path, options = {}) => {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...options.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
  let answer;
  try {
    answer = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused("The server cannot be reached, or it broke the connection off.", 0);
  }
  if (answer.ok) return answer;
  const { error } = await answer.json().catch(() => ({}));
  const wait = Number(answer.headers.get("retry-after"));
  const words = [WORDS[answer.status], error?.message].filter(Boolean).join(": ") || `Status ${answer.status}`;
  if (answer.status === 401) askKey(words);
  throw new Refused(wait ? `${words}. Try again in ${wait} s.` : words, answer.status);
};

const notice = (text) => {
  $("notice").textContent = text ?? "";
  $("notice").hidden = !text;
};

const askKey = (says) => {
  $("key-says").textContent = `${says ? `${says}. ` : ""}The key stays in this tab and is forgotten with it.`;
  $("key").value = sessionStorage.getItem(KEY) ?? "";
  if (!$("key-dialog").open) $("key-dialog").showModal();
};
$("change-key").addEventListener("click", () => askKey());
$("key-cancel").addEventListener("click", () => $("key-dialog").close());
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const key = $("key").value.trim();
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
  $("key-dialog").close();
  start();
});

// ---- documents -------------------------------------------------------------------------------------------------------

const documents = new Map(); // by id, as the server has them; "" is none
const conversations = new Map(); // turns by document
let chosen = "";

// The conversations and the document that was chosen stay in this tab, after a reload too.
let recalled = false;
const remember = () => {
  if (!recalled) return;
  try {
    sessionStorage.setItem(TALKS, JSON.stringify({ chosen, talks: [...conversations] }));
  } catch {
    sessionStorage.removeItem(TALKS); // too large for the browser
  }
};
const recall = () => {
  recalled = true;
  try {
    const { chosen: before, talks } = JSON.parse(sessionStorage.getItem(TALKS) ?? "{}");
    for (const [id, talk] of talks ?? []) if (documents.has(id) && !conversations.get(id)?.length) conversations.set(id, talk);
    if (documents.get(before)?.status === "ready") return before;
  } catch {
    sessionStorage.removeItem(TALKS);
  }
  return "";
};

const turns = () => {
  if (!conversations.has(chosen)) conversations.set(chosen, []);
  return conversations.get(chosen);
};

const looks = new Map(); // by id: when a document's reading was looked at lately, and how far it was then

// How long the rest of a document will take, at the rate of the last ten seconds; nothing in the first three.
const left = (one) => {
  const now = Date.now() / 1000, marks = looks.get(one.id) ?? [];
  if (!marks.length || now - marks.at(-1).at > 5) looks.set(one.id, [...marks.slice(-2), { at: now, tokens: one.read_tokens }]);
  const [{ at, tokens }] = looks.get(one.id);
  if (now - at < 3 || one.read_tokens <= tokens) return "";
  const seconds = (one.total_tokens - one.read_tokens) * (now - at) / (one.read_tokens - tokens);
  return seconds < 90 ? `, ${Math.ceil(seconds)} s left` : `, ${Math.round(seconds / 60)} min left`;
};

const facts = (one) => {
  if (one.status === "failed") return one.error;
  if (one.status === "ready") return `${number(one.total_tokens)} tokens, ${one.bytes ? `${size(one.bytes)} of memory` : "read with each question"}`;
  return one.total_tokens ? `reading: ${number(one.read_tokens)} of ${number(one.total_tokens)} tokens${left(one)}` : "being converted to text";
};

// The line of a document, made once and refreshed in place, so that the focus stays.
const line = (id, one) => {
  let item = [...$("documents").children].find((other) => other.dataset.id === id);
  if (!item) {
    item = make("li");
    item.dataset.id = id;
    const label = make("label"), says = make("span"), pick = make("input", undefined, { type: "radio", name: "document", value: id });
    pick.addEventListener("change", () => choose(id));
    says.append(make("span", one.title, { className: "name" }), make("small"));
    label.append(pick, says);
    item.append(label);
    if (id) {
      const row = make("div", undefined, { className: "row" });
      const bar = make("progress");
      const show = make("button", "What was kept", { type: "button", className: "show" }), drop = make("button", "Delete", { type: "button", className: "delete" });
      bar.setAttribute("aria-label", `Reading ${one.title}`);
      show.setAttribute("aria-label", `What was kept of ${one.title}`);
      drop.setAttribute("aria-label", `Delete ${one.title}`);
      show.addEventListener("click", () => attempt(() => showKept(id, 0)));
      drop.addEventListener("click", () => attempt(() => remove(id)));
      row.append(show, drop);
      item.append(bar, row);
    }
    $("documents").append(item);
  }
  const small = item.querySelector("small");
  small.textContent = id ? facts(one) : "a plain conversation";
  small.classList.toggle("bad", one.status === "failed");
  item.querySelector("input").checked = id === chosen;
  if (!id) return;
  item.querySelector("input").disabled = one.status !== "ready";
  item.querySelector(".show").hidden = one.status !== "ready";
  const bar = item.querySelector("progress");
  bar.hidden = one.status !== "reading";
  if (one.total_tokens) Object.assign(bar, { max: one.total_tokens, value: one.read_tokens });
};

const keep = (one) => {
  documents.set(one.id, one);
  line(one.id, one);
};
const forget = (id) => {
  documents.delete(id);
  looks.delete(id);
  conversations.delete(id);
  remember();
  [...$("documents").children].find((item) => item.dataset.id === id)?.remove();
  if (id === chosen) choose("");
};

const choose = (id) => {
  if (running) running.abort();
  chosen = id;
  for (const [other, one] of documents) line(other, one);
  $("title").textContent = id ? documents.get(id).title : "No document";
  remember();
  draw();
};

// Follow a document until it is read.
const followed = new Set();
const follow = async (id) => {
  if (followed.has(id)) return;
  followed.add(id);
  try {
    await untilRead(id);
  } finally {
    followed.delete(id);
  }
};
const untilRead = async (id) => {
  while (documents.get(id)?.status === "reading") {
    await sleep(POLL);
    try {
      keep(await (await call(`/v1/documents/${id}`)).json());
    } catch (error) {
      if (error.status === 404) return forget(id);
      if (error.status === 401) return;
      notice(error.message);
      await sleep(2);
    }
  }
  const one = documents.get(id);
  if (!one) return;
  $("status").textContent = one.status === "ready" ? `${one.title} is read: ${facts(one)}.${one.lost ? ` ${one.lost.join(". ")}.` : ""}` : `${one.title} cannot be read: ${one.error}`;
  if (one.status === "ready" && !chosen && !turns().length && documents.get(dropped)?.status !== "reading") choose(id);
};

let dropped = ""; // the first of the files that were dropped together: it is chosen, though others are read sooner
const upload = async (file) => {
  const body = new FormData();
  body.append("file", file);
  if ($("budget").value) body.append("budget", $("budget").value);
  $("status").textContent = `Sending ${file.name}.`;
  const one = await (await call("/v1/documents", { method: "POST", body })).json();
  $("status").textContent = `Reading ${one.title}.`;
  keep(one);
  if (documents.get(dropped)?.status !== "reading") dropped = one.id;
  void follow(one.id);
};
let sending = 0; // drops whose files are being sent
const uploadAll = async (files) => {
  if (!sending) notice();
  sending += 1;
  for (const file of files) {
    await upload(file).catch((error) => {
      $("status").textContent = "";
      notice(`${$("notice").textContent}\n${file.name}: ${error.message}`.trim());
    });
  }
  sending -= 1;
};

const remove = async (id) => {
  try {
    await call(`/v1/documents/${id}`, { method: "DELETE" });
  } catch (error) {
    if (error.status !== 404) throw error;
  }
  $("status").textContent = `${documents.get(id).title} is deleted.`;
  forget(id);
  $("file").focus();
};

$("file").addEventListener("change", () => {
  const files = [...$("file").files];
  $("file").value = "";
  void uploadAll(files);
});
for (const kind of ["dragover", "dragleave", "drop"]) {
  document.addEventListener(kind, (event) => {
    event.preventDefault(); // a file that misses the frame is not opened in place of the page
    document.body.classList.toggle("over", kind === "dragover");
    if (kind === "drop" && event.dataTransfer.files.length) void uploadAll([...event.dataTransfer.files]);
  });
}

// Run a piece of work; its error is shown in words.
const attempt = async (work) => {
  notice();
  try {
    await work();
  } catch (error) {
    notice(error.message);
  }
};

// ---- the conversation ------------------------------------------------------------------------------------------------

// ---- an answer's Markdown ----

const inline = (tokens) => tokens.map((token) => {
  const inside = () => (token.tokens ? inline(token.tokens) : [token.text]);
  const around = (tag) => {
    const element = make(tag);
    element.append(...inside());
    return element;
  };
  switch (token.type) {
    case "strong": case "em": case "del": return around(token.type);
    case "codespan": return make("code", token.text);
    case "br": return make("br");
    case "text": return token.tokens ? around("span") : token.text;
    case "escape": return token.text;
    case "link":
      return /^https?:/.test(token.href) ? Object.assign(around("a"), { href: token.href, target: "_blank", rel: "noopener noreferrer" }) : token.raw;
    default: return token.raw; // images and HTML are shown as they were written
  }
});
const cells = (tag, row) => {
  const line = make("tr");
  for (const cell of row) {
    const box = make(tag);
    box.append(...inline(cell.tokens));
    line.append(box);
  }
  return line;
};
const blocks = (tokens) => tokens.flatMap((token) => {
  const holding = (tag, nodes, more) => {
    const element = make(tag, undefined, more);
    element.append(...nodes);
    return [element];
  };
  switch (token.type) {
    case "space": return [];
    case "heading": return holding(`h${Math.min(6, token.depth + 2)}`, inline(token.tokens));
    case "paragraph": return holding("p", inline(token.tokens));
    case "text": return inline(token.tokens ?? [token]);
    case "code": return holding("pre", [make("code", token.text)]);
    case "blockquote": return holding("blockquote", blocks(token.tokens));
    case "hr": return [make("hr")];
    case "list": return holding(
      token.ordered ? "ol" : "ul", token.items.flatMap((item) => holding("li", blocks(item.tokens))), token.ordered ? { start: token.start } : {},
    );
    case "table": return holding("table", [cells("th", token.header), ...token.rows.map((row) => cells("td", row))]);
    default: return [make("p", token.raw)];
  }
});
const markdown = (text) => blocks(marked.lexer(text, { breaks: true }));

let running = null; // the AbortController of the answer that is written

// A turn: {role, content, thought, evidence, figures, error}. The last four are for people alone.
const fold = (box, turn) => {
  if (!turn.thought) return;
  const folded = box.querySelector("details") ?? make("details", undefined, { className: "thought" });
  if (!folded.parentNode) {
    folded.append(make("summary"), make("div"));
    box.querySelector(".who").after(folded);
  }
  folded.firstChild.textContent = `Thought \u00b7 ${number(turn.thought.trim().split(/\s+/).length)} words`;
  folded.lastChild.textContent = turn.thought;
};
const sources = ({ evidence }) => {
  const box = make("details", undefined, { className: "evidence" }), list = make("ol");
  list.append(...evidence.map(({ text, file, line, page }) => {
    const item = make("li", text.trim());
    item.prepend(make("div", `${file ? `${file}, ` : ""}${page ? `page ${number(page)}` : `line ${number(line)}`}`, { className: "who" }));
    return item;
  }));
  box.append(make("summary", "Where the model looked"), list);
  return box;
};
const node = (turn) => {
  const box = make("article", undefined, { className: `turn ${turn.role}` });
  const content = turn.role === "user" ? make("p", turn.content) : make("div", undefined, { className: "content" });
  if (turn.role !== "user") content.append(...markdown(turn.content));
  box.append(make("div", turn.role === "user" ? "You" : "Answer", { className: "who" }), content);
  fold(box, turn);
  if (turn.evidence?.length) box.append(sources(turn));
  if (turn.error) box.append(make("div", turn.error, { className: "bad" }));
  if (turn.figures) box.append(make("div", turn.figures, { className: "figures" }));
  return box;
};
const draw = () => {
  $("log").replaceChildren(...turns().map(node));
  $("log").scrollTop = $("log").scrollHeight;
  $("new").disabled = !turns().length;
};

// Values of the events of a stream, as they come.
const events = async function* (answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { done, value } = await reader.read();
    if (done) throw new Refused("The connection ended before the answer did.", 0);
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (!part.startsWith("data: ")) continue; // a comment, so that no proxy closes the connection
      const data = part.slice(6);
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
};

const figures = (usage, seconds, first) => {
  const { locret = {}, prompt_tokens_details: details = {} } = usage, one = documents.get(chosen);
  return [
    `${number(usage.prompt_tokens)} tokens in (${number(details.cached_tokens ?? 0)} cached)`, `${number(usage.completion_tokens)} out`,
    `${number(locret.evictions ?? 0)} evictions`, `${number(locret.kept_rows ?? 0)} rows kept`, one?.bytes ? `document ${size(one.bytes)}` : null,
    `first token ${first.toFixed(1)}\u00a0s, all ${seconds.toFixed(1)}\u00a0s`,
  ].filter(Boolean).join(" \u00b7 ");
};

const ask = async (question) => {
  const history = turns(), turn = { role: "assistant", content: "" };
  const messages = [...history.filter((one) => !one.error), { role: "user", content: question }].map(({ role, content }) => ({ role, content }));
  const body = { messages, stream: true, stream_options: { include_usage: true }, temperature: Number($("temperature").value) };
  if ($("max").value) body.max_tokens = Number($("max").value);
  if (chosen) Object.assign(body, { document_id: chosen, evidence: true });
  const mine = { role: "user", content: question };
  history.push(mine, turn);
  draw();
  const box = $("log").lastElementChild, text = box.querySelector(".content"), control = new AbortController(), began = performance.now();
  const since = () => (performance.now() - began) / 1000;
  let usage, first, reason;
  working(control);
  box.classList.add("busy");
  try {
    const answer = await call("/v1/chat/completions", {
      method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body), signal: control.signal,
    });
    for await (const event of events(answer)) {
      if (event.error) throw new Refused(event.error.message, 500);
      if (event.usage) usage = event.usage;
      const [part] = event.choices;
      reason = part?.finish_reason ?? reason;
      turn.evidence = part?.evidence ?? turn.evidence;
      const { content = "", reasoning_content: thought = "" } = part?.delta ?? {};
      if (!content && !thought) continue;
      first ??= since();
      turn.content += content ?? "";
      turn.thought = (turn.thought ?? "") + (thought ?? "");
      fold(box, turn);
      const low = $("log").scrollHeight - $("log").scrollTop - $("log").clientHeight < 40;
      text.replaceChildren(...markdown(turn.content));
      if (low) $("log").scrollTop = $("log").scrollHeight;
    }
    const cut = turn.thought && !turn.content ? "its limit ended the thought: raise it" : "cut off by its limit";
    turn.figures = figures(usage, since(), first ?? since()) + (reason === "length" ? ` \u00b7 ${cut}` : "");
  } catch (error) {
    if (error.name === "AbortError") turn.figures = "stopped";
    else turn.error = error.message;
    if (turn.error || !turn.content) mine.error = turn.error ?? "No answer was written."; // neither is sent again
    if (mine.error) {
      history.splice(history.indexOf(turn), 1);
      if (turn.content) mine.error += ` Before that: ${turn.content}`;
      if (!$("question").value) $("question").value = question;
    }
    if (error.status === 404 && chosen) await refresh();
  } finally {
    working(null);
  }
  remember();
  draw();
  $("status").textContent = mine.error ?? "The answer is there.";
};

const working = (control) => {
  const focused = [$("stop"), $("send")].includes(document.activeElement); // one hides, the focus moves on
  running = control;
  $("stop").hidden = !control;
  $("send").hidden = Boolean(control);
  $("log").setAttribute("aria-busy", String(Boolean(control)));
  if (focused) $(control ? "stop" : "question").focus();
  if (control) $("status").textContent = "Waiting for the answer.";
};

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const question = $("question").value;
  if (running || !question.trim()) return;
  $("question").value = "";
  notice();
  void ask(question);
});
$("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("form").requestSubmit();
  }
});
$("stop").addEventListener("click", () => {
  running?.abort();
  $("question").focus();
});
$("new").addEventListener("click", () => {
  running?.abort();
  conversations.delete(chosen);
  remember();
  draw();
  $("question").focus();
});

// ---- what was kept ---------------------------------------------------------------------------------------------------

let shown = null; // the page that is shown

const shade = (element, share) => {
  element.style.setProperty("--share", share ?? 0);
  element.classList.toggle("none", share === 0);
  element.classList.toggle("later", share === null);
  element.title = share === null ? "read with each question" : `held by ${percent(share)}`;
  return element;
};

const showKept = async (id, from) => {
  const page = await (await call(`/v1/documents/${id}/kept?start=${from}&limit=${PAGE}`)).json();
  shown = page;
  const { texts, shares, start, seen, total_tokens: total, heads, held, overview } = page, end = start + texts.length;
  $("kept-title").textContent = `What was kept of ${documents.get(id).title}`;
  $("kept-says").textContent = heads
    ? `${number(held)} of ${number(seen)} tokens are held by at least one of ${number(heads)} heads` + (total > seen ? `; the last ${number(total - seen)} are read with each question.` : ".")
    : "The text is short: all of it is read with each question.";
  $("place").textContent = `tokens ${number(start + 1)} to ${number(end)} of ${number(total)}`;
  $("previous").disabled = start === 0;
  $("next").disabled = end >= total;
  const spans = [];
  for (let at = 0; at < texts.length;) {
    let to = at + 1;
    while (to < texts.length && shares[to] === shares[at]) to += 1;
    spans.push(shade(make("span", texts.slice(at, to).join("")), shares[at]));
    at = to;
  }
  $("text").replaceChildren(...spans);
  $("text").scrollTop = 0;
  const most = Math.max(...overview, 1e-9), part = seen / Math.max(1, overview.length);
  $("map").replaceChildren(...overview.map((share, at) => {
    const bar = shade(make("i"), share / most);
    bar.title = `held by ${percent(share)} on average`;
    bar.classList.toggle("here", at * part < end && (at + 1) * part > start);
    return bar;
  }));
  $("map").hidden = !overview.length;
  if (!$("kept").open) $("kept").showModal();
};
const turnTo = (from) => attempt(() => showKept(shown.id, Math.max(0, from)));
$("previous").addEventListener("click", () => turnTo(shown.start - PAGE));
$("next").addEventListener("click", () => turnTo(shown.start + PAGE));
$("kept-close").addEventListener("click", () => $("kept").close());
$("map").addEventListener("click", (event) => {
  const area = $("map").getBoundingClientRect(), part = (event.clientX - area.left) / area.width;
  turnTo(PAGE * Math.floor(part * shown.seen / PAGE));
});
for (const share of [0, 0.25, 0.5, 0.75, 1]) $("scale").append(shade(make("span", percent(share)), share));

// ---- the beginning ---------------------------------------------------------------------------------------------------

const refresh = async () => {
  const { data } = await (await call("/v1/documents")).json();
  for (const id of [...documents.keys()]) if (id && !data.some((one) => one.id === id)) forget(id);
  for (const one of data) {
    keep(one);
    void follow(one.id);
  }
};

const HEALTH = { loading: "The model is being loaded.", failed: "The server has ended with an error, which its log names." };

const start = () => attempt(async () => {
  for (;;) {
    const health = await fetch("/health").catch(() => null);
    if (health?.ok) break;
    const { status } = (await health?.json().catch(() => null)) ?? {}; // a proxy has other words
    notice(HEALTH[status] ?? "The server cannot be reached; trying again.");
    await sleep(1);
  }
  notice();
  const { data } = await (await call("/v1/models")).json();
  await refresh();
  const before = recall();
  if (!running) choose(before); // a question may have been asked meanwhile
  $("model").textContent = data[0]?.id ?? "";
});

documents.set("", { id: "", title: "No document" });
choose("");
void start();

// The page: one conversation, its buttons, and the state of the server.

import { ApiError, chat, get } from "./api.js";
import { code } from "./code.js";
import { build, read } from "./fields.js";
import { show as showLive } from "./live.js";
import { Shown, following } from "./talk.js";

const $ = (id) => document.getElementById(id);
const [messages, input, figures] = [$("messages"), $("input"), $("figures")];
const POLL = 5000; // ms between two looks at the server

let history = []; // {role, content} of what was asked and answered
let running = null; // AbortController of the answer that is being made

build($("parameters"));
$("key").value = sessionStorage.getItem("lmdeploy-key") ?? "";
const key = () => $("key").value.trim();

function buttons() {
  $("send").disabled = Boolean(running) || !$("model").value;
  $("stop").disabled = !running;
  $("again").disabled = Boolean(running) || !history.length;
  $("clear").disabled = Boolean(running) || !messages.childElementCount;
}

function body(turns, fields) {
  const system = $("system").value.trim();
  const stream = $("stream").checked;
  return {
    model: $("model").value,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...turns],
    ...fields,
    stream,
    ...(stream ? { stream_options: { include_usage: true } } : {}),
  };
}

// Reads the inputs; says what is wrong with them and returns null.
function fields() {
  const { fields, problem, control } = read();
  figures.textContent = problem ?? "";
  control?.focus();
  return fields ?? null;
}

async function answer() {
  const given = fields();
  if (given === null) return;
  const shown = new Shown(messages, "assistant");
  const pieces = { content: "", reasoning: "" };
  const calls = [];
  const clock = new Clock();
  let frame = 0;
  const draw = () => {
    frame = 0;
    following(messages, () => {
      if (pieces.reasoning) shown.reasoning(pieces.reasoning);
      shown.text(pieces.content);
      if (calls.length) shown.tools(calls);
      figures.textContent = clock.words();
    });
  };
  running = new AbortController();
  buttons();
  try {
    await chat(body(history, given), key(), running.signal, (part) => {
      pieces.content += part.content;
      pieces.reasoning += part.reasoning;
      part.tools.forEach((call, i) => join(calls, call, i));
      clock.tell(part);
      frame ||= requestAnimationFrame(draw);
    });
  } catch (error) {
    if (error.name === "AbortError") clock.finish = "stopped";
    else shown.error(explained(error));
  } finally {
    running = null;
    cancelAnimationFrame(frame);
    draw();
    // What was cut off stays in the conversation: the next turn may go on from it.
    if (pieces.content || calls.length) history.push(turn(pieces.content, calls));
    buttons();
    look();
  }
}

function join(calls, call, position) {
  const index = call.index ?? position;
  calls[index] ??= { id: call.id, name: "", arguments: "" };
  calls[index].name += call.function?.name ?? "";
  calls[index].arguments += call.function?.arguments ?? "";
}

function turn(content, calls) {
  if (!calls.length) return { role: "assistant", content };
  const tool_calls = calls.map(({ id, ...rest }) => ({ id, type: "function", function: rest }));
  return { role: "assistant", content: content || null, tool_calls };
}

function explained(error) {
  if (!(error instanceof ApiError)) return `The server cannot be reached: ${error.message}`;
  if (error.status === 401) {
    $("key-label").hidden = false;
    $("key").focus();
  }
  return error.message;
}

// What an answer took.
class Clock {
  constructor() {
    this.began = performance.now();
    this.finish = "";
  }

  tell(part) {
    const now = performance.now();
    if (part.content || part.reasoning || part.tools.length) this.first ??= now;
    this.last = now;
    this.usage = part.usage ?? this.usage;
    this.finish = part.finish ?? this.finish;
  }

  words() {
    const said = [];
    if (this.first) said.push(`first token ${((this.first - this.began) / 1000).toFixed(2)} s`);
    const tokens = this.usage?.completion_tokens;
    if (tokens) {
      const cached = this.usage.prompt_tokens_details?.cached_tokens ?? 0;
      said.push(`${this.usage.prompt_tokens} + ${tokens} tokens${cached ? `, ${cached} cached` : ""}`);
      const seconds = (this.last - this.first) / 1000;
      if (tokens > 1 && seconds > 0) said.push(`${((tokens - 1) / seconds).toFixed(1)} tokens/s`);
    }
    if (this.finish && this.finish !== "stop") said.push(this.finish);
    return said.join(" · ");
  }
}

function send() {
  const text = input.value.trim();
  if (!text || running || !$("model").value || fields() === null) return;
  input.value = "";
  history.push({ role: "user", content: text });
  following(messages, () => new Shown(messages, "user").text(text));
  messages.scrollTop = messages.scrollHeight;
  answer();
}

function again() {
  if (fields() === null) return;
  while (history.at(-1)?.role === "assistant") history.pop();
  while (messages.lastElementChild?.classList.contains("assistant")) messages.lastElementChild.remove();
  if (history.length) answer();
}

function clear() {
  history = [];
  messages.replaceChildren();
  figures.textContent = "";
  buttons();
  input.focus();
}

// The state of the server, and the models once it has some.
async function look() {
  try {
    const health = await get("/health", key(), true);
    $("state").textContent = health.status;
    const models = (await get("/v1/models", key())).data;
    $("key-label").hidden = !key();
    offer(models.map((card) => card.id));
    if (!$("live").hidden) showLive($("facts"), health, models, key());
  } catch (error) {
    const locked = error instanceof ApiError && error.status === 401;
    $("key-label").hidden = !locked && !key();
    $("state").textContent = locked ? error.message : "the server cannot be reached";
    if (locked) offer([]);
  }
  buttons();
}

function offer(names) {
  const select = $("model");
  if (names.join("\n") === [...select.options].map((option) => option.value).join("\n")) return;
  const chosen = select.value;
  select.replaceChildren(...names.map((name) => new Option(name, name)));
  if (names.includes(chosen)) select.value = chosen;
}

function go() {
  const live = location.hash === "#live";
  $("chat").hidden = live;
  $("live").hidden = !live;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === (live ? "#live" : "#chat")) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  look();
}

async function copy(kind) {
  const given = fields();
  if (given === null) return;
  const draft = input.value.trim();
  const turns = draft ? [...history, { role: "user", content: draft }] : history;
  $("code").textContent = code(kind, document.baseURI, body(turns, given), Boolean(key()));
  await navigator.clipboard?.writeText($("code").textContent).catch(() => {});
}

$("compose").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
input.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
$("stop").addEventListener("click", () => running?.abort());
$("again").addEventListener("click", again);
$("clear").addEventListener("click", clear);
$("key").addEventListener("change", () => {
  sessionStorage.setItem("lmdeploy-key", key());
  look();
});
for (const button of document.querySelectorAll("[data-copy]")) {
  button.addEventListener("click", () => copy(button.dataset.copy));
}
addEventListener("hashchange", go);
document.addEventListener("visibilitychange", () => document.hidden || look());
setInterval(() => document.hidden || look(), POLL);
go();
input.focus();

// The chat page: one conversation over /v1/chat/completions, and the engine's figures from /live beside it.
// Everything a model or a tool says goes in as text nodes, never as markup.
const $ = (id) => document.getElementById(id);
const el = (tag, kind, text) => Object.assign(document.createElement(tag), { className: kind ?? "", textContent: text ?? "" });
const settings = document.querySelector("#settings form");
const saved = JSON.parse(localStorage.getItem("perilune") ?? "{}");
let messages = [], session = "", running = null;

// ---------------------------------------------------------------- one answer

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let held = ""; ; ) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (held + value).split("\n\n");
    held = parts.pop();
    for (const part of parts) if (part.startsWith("data: {")) yield JSON.parse(part.slice(6));
  }
}

function body() {
  const effort = $("effort").value, system = settings.system.value.trim(), tools = settings.tools.value.trim();
  return {
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    stream: true, stream_options: { include_usage: true }, prompt_cache_key: session,
    thinking: effort === "off" ? { type: "disabled" } : { type: "enabled", effort },
    ...(tools && { tools: JSON.parse(tools) }),
    ...(settings.temperature.value && { temperature: +settings.temperature.value }),
    ...(settings.max_tokens.value && { max_tokens: +settings.max_tokens.value }),
  };
}

async function post(asked, signal) {
  const headers = { "content-type": "application/json", ...(settings.key.value && { authorization: `Bearer ${settings.key.value}` }) };
  const response = await fetch("v1/chat/completions", { method: "POST", headers, signal, body: JSON.stringify(asked) });
  if (response.ok) return response;
  const retry = response.headers.get("retry-after");
  throw new Error((await response.json()).error.message + (retry ? ` Try again in ${retry} s.` : ""));
}

async function answer() {
  const turn = $("turns").appendChild(el("li", "assistant")), view = new View(turn), begun = performance.now();
  const message = { role: "assistant", content: "" };
  let usage, first;
  running = new AbortController();
  $("send").textContent = "Stop";
  try {
    for await (const event of events(await post(body(), running.signal))) {
      if (event.error) throw new Error(event.error.message);
      usage = event.usage ?? usage;
      for (const { delta, finish_reason } of event.choices) {
        if (!first && !delta.role) first = performance.now();
        take(message, delta);
        view.show(message, finish_reason);
      }
    }
  } catch (error) {
    turn.append(error.name === "AbortError" ? el("div", "foot", "Stopped.") : el("div", "error", error.message));
  }
  view.end(message);
  if (usage) turn.append(el("div", "foot", bill(usage, first - begun, performance.now() - first)));
  if (message.content || message.reasoning_content || message.tool_calls) messages.push(message);
  running = null;
  $("send").textContent = "Send";
  if (message.tool_calls) turn.append(results(message.tool_calls));
  scroll();
}

function take(message, delta) {
  if (delta.content) message.content += delta.content;
  if (delta.reasoning_content) message.reasoning_content = (message.reasoning_content ?? "") + delta.reasoning_content;
  for (const call of delta.tool_calls ?? []) {
    message.tool_calls ??= [];
    if (call.id) message.tool_calls[call.index] = { id: call.id, type: "function", function: { name: call.function.name, arguments: "" } };
    message.tool_calls[call.index].function.arguments += call.function.arguments ?? "";
  }
}

function bill(usage, wait, spent) {
  const cached = usage.cached_tokens ? ` (${usage.cached_tokens} cached)` : "", speed = (usage.completion_tokens - 1) / (spent / 1000);
  return `${usage.prompt_tokens} tokens in${cached}, ${usage.completion_tokens} out · first after ${(wait / 1000).toFixed(2)} s` +
    (speed > 0 && isFinite(speed) ? ` · ${speed.toFixed(1)} tokens/s` : "");
}

// ---------------------------------------------------------------- what a turn looks like

class View {
  constructor(turn) {
    this.thought = turn.appendChild(el("details", "thought"));
    this.summary = this.thought.appendChild(el("summary", "", "Thinking…"));
    this.thinking = this.thought.appendChild(el("div"));
    this.text = turn.appendChild(el("div", "text waits"));
    this.calls = turn.appendChild(el("div"));
    this.thought.hidden = true;
    this.begun = performance.now();
  }
  show(message, finish) {
    const spoke = message.content || message.tool_calls;
    if (message.reasoning_content) {
      if (this.thought.hidden) this.thought.hidden = !(this.thought.open = true);
      this.thinking.textContent = message.reasoning_content;
      this.thinking.scrollTop = this.thinking.scrollHeight;
    }
    if ((spoke || finish) && !this.thought.hidden && !this.folded) this.fold();
    this.text.replaceChildren(...rich(message.content));
    this.calls.replaceChildren(...(message.tool_calls ?? []).map((call) => {
      const card = el("div", "call");
      card.append(el("b", "", call.function.name), el("pre", "", pretty(call.function.arguments)));
      return card;
    }));
    scroll();
  }
  fold() {
    this.folded = true;
    this.thought.open = false;
    this.summary.textContent = `Thought for ${((performance.now() - this.begun) / 1000).toFixed(1)} s`;
  }
  end(message) {
    this.text.classList.remove("waits");
    if (message.reasoning_content && !this.folded) this.fold();
  }
}

/** Text with its ``` blocks set apart. */
function rich(text) {
  return text.split(/\n*^```.*\n?/m).map((part, n) => (n % 2 ? el("pre", "", part) : document.createTextNode(part)));
}

function pretty(json) {
  try { return JSON.stringify(JSON.parse(json), null, 2); } catch { return json; }
}

/** A form that answers to the calls of the last turn, so that a tool can be played by hand. */
function results(calls) {
  const form = el("form");
  const boxes = calls.map((call) => {
    const box = form.appendChild(el("textarea", "call"));
    return Object.assign(box, { rows: 1, placeholder: `Result of ${call.function.name}`, required: true });
  });
  form.appendChild(el("button", "", "Send results"));
  form.onsubmit = (event) => {
    event.preventDefault();
    if (running) return;
    calls.forEach((call, n) => messages.push({ role: "tool", tool_call_id: call.id, content: boxes[n].value }));
    form.querySelector("button").remove();
    boxes.forEach((box) => (box.readOnly = true));
    answer();
  };
  return form;
}

function scroll() {
  const turns = $("turns");
  if (turns.scrollHeight - turns.scrollTop - turns.clientHeight < 200) turns.scrollTop = turns.scrollHeight;
}

// ---------------------------------------------------------------- controls

function begin() {
  running?.abort();
  messages = [];
  session = `page-${Date.now().toString(36)}-${Math.random().toString(36).slice(2)}`;
  $("turns").replaceChildren(el("li", "empty", "Say something. Thinking is folded away once the answer begins."));
  $("text").focus();
}

function say(event) {
  event?.preventDefault();
  if (running) return running.abort();
  const text = $("text").value.trim();
  if (!text) return;
  document.querySelector(".empty")?.remove();
  messages.push({ role: "user", content: text });
  $("turns").append(el("li", "user", text));
  $("text").value = "";
  grow();
  answer();
}

function grow() {
  $("text").style.height = "auto";
  $("text").style.height = `${$("text").scrollHeight + 2}px`;
}

const system = matchMedia("(prefers-color-scheme: dark)");
const themes = ["auto", "dark", "light"];
function paint() {
  const chosen = saved.theme ?? "auto";
  document.documentElement.dataset.theme = chosen === "auto" ? (system.matches ? "dark" : "light") : chosen;
  $("theme").textContent = chosen;
}

function save() {
  for (const { name, value } of settings.elements) saved[name] = value;
  saved.effort = $("effort").value;
  localStorage.setItem("perilune", JSON.stringify(saved));
}

for (const field of settings.elements) field.value = saved[field.name] ?? "";
$("effort").value = saved.effort ?? "max";
settings.onchange = $("effort").onchange = save;
settings.onsubmit = (event) => event.preventDefault();
$("ask").onsubmit = say;
$("text").oninput = grow;
$("text").onkeydown = (event) => { if (event.key === "Enter" && !event.shiftKey && !event.isComposing) say(event); };
$("new").onclick = begin;
$("theme").onclick = () => {
  saved.theme = themes[(themes.indexOf(saved.theme ?? "auto") + 1) % 3];
  save();
  paint();
};
$("panel").onclick = () => {
  $("live").hidden = !$("live").hidden;
  $("panel").setAttribute("aria-expanded", !$("live").hidden);
};
if (innerWidth < 768) $("panel").click();
document.addEventListener("click", (event) => { if (!event.target.closest("#settings")) $("settings").open = false; });
system.onchange = paint;
paint();
begin();

// ---------------------------------------------------------------- the engine, live

const past = [];
function draw(id, values) {
  const top = Math.max(1, ...values), step = 120 / (values.length - 1 || 1);
  const line = values.map((value, n) => `${n ? "L" : "M"}${(n * step).toFixed(1)} ${(31 - (29 * value) / top).toFixed(1)}`).join("");
  $(id).firstElementChild.setAttribute("d", `${line}L120 33L0 33Z`);
}

function look(now) {
  past.push({ at: performance.now(), ...now });
  if (past.length > 121) past.shift();
  const speeds = past.slice(1).map((b, n) => ((b.completion_tokens - past[n].completion_tokens) * 1000) / (b.at - past[n].at));
  const pages = now.pages || 1, share = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(1)} %` : "–");
  const words = {
    model: now.model, running: now.running, waiting: now.waiting, pages: now.pages, steps: now.steps, preempted: now.preemptions,
    speed: Math.round(speeds.slice(-4).reduce((a, b) => a + b, 0) / Math.max(1, speeds.slice(-4).length)),
    hits: share(now.hit_tokens + now.offload_tokens, now.prompt_tokens), unit: `${now.match_tokens} tokens`,
    step: `${(1000 * now.step_seconds).toFixed(1)} ms`, drafts: share(now.accepted, now.drafted), state: now.running ? "working" : "idle",
  };
  for (const [id, value] of Object.entries(words)) $(id).textContent = value;
  draw("batch", past.map((one) => one.running));
  draw("output", speeds.length ? speeds : [0]);
  const [held, cached] = $("pool").children;
  held.style.width = `${(100 * now.pages_running) / pages}%`;
  cached.style.width = `${(100 * now.pages_cached) / pages}%`;
  $("pool").setAttribute("aria-label", `${now.pages_running} pages running, ${now.pages_cached} cached, ${now.pages_free} free`);
}

async function follow() {
  if (!document.hidden) {
    try { look(await (await fetch("live")).json()); } catch { $("state").textContent = "out of reach"; }
  }
  setTimeout(follow, 500);
}
follow();

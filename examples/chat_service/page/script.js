"use strict";

const MODEL = "SmolLM2-135M-Instruct";
const MAX_TOKENS = 250;
// A browser opens six connections to a server at most: four answers, and the state of the batch.
const QUESTIONS = [
  "What is the capital of France?",
  "Write a short story about a lighthouse.",
  "How does rain form?",
  "Name ten animals that live in the sea.",
];
const byId = (id) => document.getElementById(id);

async function post(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  const response = await fetch(path, { method: "POST", headers, body: JSON.stringify(body), signal });
  if (response.ok) return response;
  const { error } = await response.json().catch(() => ({}));
  throw new Error(`${response.status}: ${error?.message || response.statusText}`);
}

// The data of server-sent events, up to "[DONE]".
async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (let read = await reader.read(); !read.done; read = await reader.read()) {
    const events = (rest + read.value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.slice("data: ".length);
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
  throw new Error("The answer was cut off");
}

class Chat {
  constructor(question, number) {
    this.element = byId("chat").content.cloneNode(true).firstElementChild;
    const find = (selector) => this.element.querySelector(selector);
    this.log = find("ol");
    this.note = find("p");
    this.field = find("textarea");
    this.button = find("button");
    find("h2").textContent = `Conversation ${number}`;
    this.log.setAttribute("aria-label", `Conversation ${number}`);
    this.field.setAttribute("aria-label", `Question ${number}`);
    this.field.value = question;
    this.messages = [];
    this.answering = null; // the AbortController of the answer that is written
    find("form").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.answering) this.answering.abort();
      else this.ask();
    });
    find(".quiet").addEventListener("click", () => this.clear());
    this.field.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey) return;
      event.preventDefault();
      if (!this.answering) find("form").requestSubmit();
    });
    byId("chats").append(this.element);
  }

  clear() {
    this.answering?.abort();
    this.messages = [];
    this.log.replaceChildren();
    this.note.textContent = "";
  }

  // Text, never HTML: the content comes from users and from a model.
  add(role, text = "") {
    const item = document.createElement("li");
    item.className = role;
    item.append(text);
    this.log.append(item);
    this.log.scrollTop = this.log.scrollHeight;
    return item;
  }

  async ask() {
    const question = this.field.value.trim();
    if (!question || this.answering) return;
    const { signal } = (this.answering = new AbortController());
    this.field.value = "";
    this.button.textContent = "Stop";
    this.note.textContent = "";
    this.log.setAttribute("aria-busy", "true");
    const messages = this.messages; // `clear` begins a new list
    messages.push({ role: "user", content: question });
    this.add("user", question);
    const item = this.add("assistant");
    try {
      await this.write(messages, item, signal);
    } catch (error) {
      if (!signal.aborted) this.add("error", error.message);
    }
    if (item.textContent) messages.push({ role: "assistant", content: item.textContent });
    else item.remove();
    this.log.setAttribute("aria-busy", "false");
    this.button.textContent = "Ask";
    this.answering = null;
  }

  async write(messages, item, signal) {
    const body = { model: MODEL, messages, max_tokens: MAX_TOKENS, temperature: 0.6, top_p: 0.9, stream: true };
    const asked = performance.now();
    const response = await post("v1/chat/completions", body, signal);
    let first = null;
    let tokens = 0;
    for await (const { choices, error } of eventsOf(response)) {
      if (error) throw new Error(error.message);
      const atEnd = this.log.scrollTop + this.log.clientHeight > this.log.scrollHeight - 20;
      item.append(choices[0].delta.content);
      if (atEnd) this.log.scrollTop = this.log.scrollHeight;
      tokens += 1;
      first ??= performance.now();
      const rate = tokens > 1 ? `, ${(((tokens - 1) * 1000) / (performance.now() - first)).toFixed(1)} per second` : "";
      this.note.textContent = `First token after ${(first - asked).toFixed(0)} ms. ${tokens} tokens${rate}`;
    }
  }
}

// The batch, as the server counts it.
const PERIOD = 500; // milliseconds
const HEIGHT = 88; // pixels of the chart
const COLUMN = 8;
const LEFT = 20; // of the columns
let last = null; // the latest counts, and when they came
let means = []; // steps' mean sizes, one for each period

function draw(tag, attributes, text = "") {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.textContent = text;
  return element;
}

function drawSizes(most) {
  const chart = byId("sizes");
  const block = HEIGHT / most;
  const levels = [1, most / 2, most].flatMap((size) => {
    const y = 8 + HEIGHT - size * block;
    return [
      draw("line", { x1: LEFT, x2: "100%", y1: y, y2: y, class: "level" }),
      draw("text", { x: LEFT - 4, y: y + 3, "text-anchor": "end" }, size),
    ];
  });
  const columns = Math.floor((chart.clientWidth - LEFT) / COLUMN);
  means = means.slice(-columns);
  // A dash is a conversation.
  const steps = means.map((mean, index) => {
    const x = LEFT + (index + 0.5) * COLUMN;
    const bottom = 8 + HEIGHT;
    return draw("line", {
      x1: x, x2: x, y1: bottom, y2: bottom - mean * block, class: "step", "stroke-dasharray": `${block - 1} 1`,
    });
  });
  chart.replaceChildren(...levels, ...steps);
  const latest = means.findLast(Boolean);
  chart.setAttribute("aria-label", latest ? `The latest steps had ${latest.toFixed(1)} conversations` : "No steps yet");
}

// What the batch has done since the counts `before`.
function showBatch(now, before) {
  const stepsOf = (size) => now.batch_sizes[size] - (before.batch_sizes[size] ?? 0);
  const rows = Object.keys(now.batch_sizes).reduce((sum, size) => sum + size * stepsOf(size), 0);
  const steps = now.steps - before.steps;
  const seconds = (now.at - before.at) / 1000;
  byId("running").textContent = now.in_flight;
  byId("waiting").textContent = now.queued;
  byId("rate").textContent = seconds ? ((now.parts - before.parts) / seconds).toFixed(0) : "0";
  byId("step").textContent = (now.compute.p50 * 1000).toFixed(0);
  means = [...means, steps ? rows / steps : 0];
  drawSizes(now.max_batch_size);
}

async function watch() {
  for (;;) {
    if (!document.hidden) {
      try {
        const response = await fetch("batch");
        if (!response.ok) throw new Error(response.statusText);
        const now = { ...await response.json(), at: performance.now() };
        showBatch(now, last ?? now);
        last = now;
        byId("trouble").textContent = "";
      } catch {
        byId("trouble").textContent = "The service does not answer";
      }
    }
    await new Promise((resolve) => setTimeout(resolve, PERIOD));
  }
}

const chats = QUESTIONS.map((question, index) => new Chat(question, index + 1));
byId("all").addEventListener("submit", (event) => {
  event.preventDefault();
  for (const [index, chat] of chats.entries()) {
    chat.field.value ||= QUESTIONS[index];
    chat.ask();
  }
});
watch();

const base = new URL("v1", location.href).href;
byId("program").textContent = `from openai import OpenAI

client = OpenAI(base_url="${base}", api_key="none")
messages = [{"role": "user", "content": "How does rain form?"}]
for chunk in client.chat.completions.create(model="${MODEL}", messages=messages, stream=True):
    print(chunk.choices[0].delta.content, end="", flush=True)`;
byId("command").textContent = `curl ${base}/completions -H 'content-type: application/json' \\
  -d '{"model": "${MODEL}", "prompt": "Once upon a time", "max_tokens": 50}'`;

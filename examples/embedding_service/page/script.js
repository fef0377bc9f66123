"use strict";

const MODEL = "all-MiniLM-L6-v2";
const byId = (id) => document.getElementById(id);
const linesOf = (id) => byId(id).value.split("\n").map((line) => line.trim()).filter(Boolean);

// Text, never HTML: the content comes from users and from a model.
function make(tag, text = "", className = "") {
  const element = document.createElement(tag);
  element.textContent = text;
  if (className) element.className = className;
  return element;
}

function show(list, ...parts) {
  const item = make("li");
  item.append(...parts);
  list.append(item);
  return item;
}

function showScore(list, score, ...parts) {
  const item = show(list, make("b", score.toFixed(2)), ...parts);
  item.style.setProperty("--score", Math.max(score, 0)); // the length of the bar
}

async function post(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  const response = await fetch(path, { method: "POST", headers, body: JSON.stringify(body), signal });
  if (response.ok) return response;
  const { detail, error } = await response.json().catch(() => ({}));
  const [first] = Array.isArray(detail) ? detail : [{ msg: detail || error?.message || response.statusText }];
  throw new Error(`${response.status}: ${first.msg}`);
}

// The header Server-Timing names the batches that the texts of a request were in.
function batchesOf(response) {
  const timing = response.headers.get("server-timing") ?? "";
  const found = timing.matchAll(/batch;dur=([\d.]+);desc="no\. (\d+), size (\d+)"/g);
  return [...found].map(([, ms, number, size]) => ({ ms: +ms, number: +number, size: +size }));
}

function describe(milliseconds, batches) {
  const sizes = batches.map(({ size }) => size).sort((a, b) => b - a);
  const answered = `Answered in ${milliseconds.toFixed(0)} ms`;
  if (sizes.length === 0) return answered;
  if (sizes.length > 1) return `${answered}, in ${sizes.length} batches of ${sizes.join(", ")} texts`;
  const which = sizes[0] === 1 ? "alone in its batch" : `in a batch of ${sizes[0]} texts`;
  return `${answered}, ${which}, which took ${batches[0].ms.toFixed(0)} ms`;
}

// `post` that shows how long the answer took, and in which batches the texts were.
async function postAndShowCost(id, path, body, signal) {
  byId(id).textContent = "";
  const began = performance.now();
  const response = await post(path, body, signal);
  const answer = await response.json();
  byId(id).textContent = describe(performance.now() - began, batchesOf(response));
  return answer;
}

// Shows a form's answer in its list. A new submit aborts the previous request, so the server stops it.
function onSubmit(formId, listId, run) {
  const list = byId(listId);
  let last = new AbortController();
  byId(formId).addEventListener("submit", async (event) => {
    event.preventDefault();
    last.abort();
    const { signal } = (last = new AbortController());
    list.replaceChildren();
    list.setAttribute("aria-busy", "true");
    try {
      await run(list, signal);
    } catch (error) {
      if (!signal.aborted) show(list, make("span", error.message)).className = "error";
    }
    if (!signal.aborted) list.setAttribute("aria-busy", "false");
  });
}

onSubmit("search", "hits", async (list, signal) => {
  const body = { query: byId("query").value, limit: 5 };
  const { hits, searched } = await postAndShowCost("search-cost", "search", body, signal);
  byId("search-cost").textContent += `. The nearest of ${searched.toLocaleString("en")} paragraphs:`;
  for (const { score, text, module } of hits)
    showScore(list, score, make("span", text), make("small", module));
});

onSubmit("compare", "scores", async (list, signal) => {
  const texts = linesOf("texts");
  const body = { source: byId("source").value, texts };
  const { scores } = await postAndShowCost("compare-cost", "similarity", body, signal);
  const found = scores.map((score, index) => ({ score, text: texts[index] }));
  for (const { score, text } of found.sort((a, b) => b.score - a.score))
    showScore(list, score, make("span", text));
});

onSubmit("stream", "vectors", async (list, signal) => {
  const texts = linesOf("texts");
  const response = await post("embed/stream", { texts }, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (let read = await reader.read(); !read.done; read = await reader.read()) {
    const lines = (rest + read.value).split("\n");
    rest = lines.pop();
    for (const { index, embedding, detail } of lines.map((line) => JSON.parse(line))) {
      if (detail) throw new Error(detail);
      const start = embedding.slice(0, 4).map((number) => number.toFixed(3)).join(", ");
      show(list, make("span", texts[index]), make("small", `[${start}, ...] (${embedding.length})`));
    }
  }
});

// The load. A browser opens six connections to a server at most: 64 texts are 4 requests of 16.
const STAGES = [
  { requests: 1, texts: 1 },
  { requests: 4, texts: 1 },
  { requests: 4, texts: 4 },
  { requests: 4, texts: 16 },
];
const SECONDS = 3; // each stage
const COLUMNS = 24;
const ROWS = 32; // the largest batch of the service
const BLOCK = 5;
const SENTENCES = [
  "The train to the coast leaves at noon",
  "A file is closed when its block ends",
  "She reads the news with her coffee",
  "Rain is expected in the evening",
  "The loop waits for the next event",
  "Two players are still in the game",
];

function draw(tag, attributes) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

class Stage {
  constructor({ requests, texts }) {
    this.requests = requests;
    this.texts = texts;
    this.chart = draw("svg", { viewBox: `-16 -8 ${COLUMNS * 8 + 16} ${ROWS * BLOCK + 9}`, role: "img" });
    this.facts = make("dl");
    this.atATime = requests * texts;
    this.figure = make("figure");
    this.figure.append(make("figcaption", `${this.atATime} ${this.atATime === 1 ? "text" : "texts"} at a time`), this.chart, this.facts);
    byId("stages").append(this.figure);
    this.clear();
  }

  get perSecond() {
    return (this.answered / (this.ended - this.began)) * 1000;
  }

  clear() {
    this.batches = new Map(); // number to size
    this.latencies = [];
    this.answered = 0;
    this.began = this.ended = 0;
    this.render();
  }

  async run(signal) {
    this.figure.classList.add("running");
    this.began = performance.now();
    const client = async () => {
      while (performance.now() - this.began < SECONDS * 1000) await this.send(signal);
    };
    try {
      await Promise.all(Array.from({ length: this.requests }, client));
    } finally {
      this.figure.classList.remove("running");
    }
  }

  async send(signal) {
    const input = Array.from({ length: this.texts }, (_, index) => {
      const number = this.answered + index;
      return `${SENTENCES[number % SENTENCES.length]}, number ${number}.`;
    });
    const sent = performance.now();
    const response = await post("v1/embeddings", { model: MODEL, input, encoding_format: "base64" }, signal);
    await response.arrayBuffer();
    this.ended = performance.now();
    this.latencies.push(this.ended - sent);
    this.answered += this.texts;
    for (const { number, size } of batchesOf(response)) this.batches.set(number, size);
    this.render();
  }

  render() {
    const sizes = [...this.batches].sort(([a], [b]) => a - b).map(([, size]) => size);
    const texts = sizes.reduce((sum, size) => sum + size, 0);
    const median = this.latencies.toSorted((a, b) => a - b)[this.latencies.length >> 1];
    this.showFacts([
      ["texts per batch", texts / sizes.length, 1],
      ["texts per second", this.perSecond, 0],
      ["ms per answer", median, 0],
    ]);
    this.showBatches(sizes.slice(-COLUMNS));
  }

  showFacts(facts) {
    this.facts.replaceChildren(...facts.map(([name, value, digits]) => {
      const fact = make("div");
      fact.append(make("dt", name), make("dd", Number.isFinite(value) ? value.toFixed(digits) : "–"));
      return fact;
    }));
  }

  showBatches(sizes) {
    const bottom = ROWS * BLOCK;
    const levels = [1, 8, 16, 32].flatMap((size) => {
      const y = bottom - size * BLOCK;
      const label = draw("text", { x: -4, y: y + 3, "text-anchor": "end" });
      label.textContent = size;
      return [draw("line", { x1: 0, x2: COLUMNS * 8, y1: y, y2: y, class: "level" }), label];
    });
    // A dash is a text.
    const columns = sizes.map((size, index) => draw("line", {
      x1: index * 8 + 4, x2: index * 8 + 4, y1: bottom, y2: bottom - size * BLOCK, class: "batch",
    }));
    this.chart.replaceChildren(...levels, ...columns);
    this.chart.setAttribute("aria-label", sizes.length
      ? `The latest batches have ${sizes.join(", ")} texts`
      : "No batches yet");
  }
}

const stages = STAGES.map((stage) => new Stage(stage));
const loadButton = byId("load").querySelector("button");
let load = null; // the AbortController of a load that runs

byId("load").addEventListener("submit", async (event) => {
  event.preventDefault();
  if (load) {
    load.abort();
    return;
  }
  const { signal } = (load = new AbortController());
  loadButton.textContent = "Stop the load";
  const result = byId("load-result");
  result.className = "cost";
  result.textContent = "";
  for (const stage of stages) stage.clear();
  try {
    for (const stage of stages) await stage.run(signal);
    const [first, last] = [stages[0], stages.at(-1)];
    const times = (last.perSecond / first.perSecond).toFixed(1);
    result.textContent = `With ${last.atATime} texts at a time the service answers ${times} times as many `
      + `texts per second as with ${first.atATime}.`;
  } catch (error) {
    if (!signal.aborted) {
      result.className = "error";
      result.textContent = error.message;
    }
    load.abort(); // the other clients of the stage
  }
  load = null;
  loadButton.textContent = "Start the load";
});

const base = new URL("v1", location.href).href;
byId("program").textContent = `from openai import OpenAI

client = OpenAI(base_url="${base}", api_key="none")
found = client.embeddings.create(model="${MODEL}", input=["A file", "A loop"])
print(found.data[0].embedding[:4], found.usage)`;
byId("command").textContent = `curl -i ${base}/embeddings -H 'content-type: application/json' \\
  -d '{"model": "${MODEL}", "input": "A file is closed."}'`;

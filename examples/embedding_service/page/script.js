"use strict";

const byId = (id) => document.getElementById(id);
const linesOf = (id) => byId(id).value.split("\n").map((line) => line.trim()).filter(Boolean);

// Text, never HTML: the content comes from users and from a model.
function show(list, ...parts) {
  const item = document.createElement("li");
  for (const [tag, text] of parts) {
    const element = document.createElement(tag);
    element.textContent = text;
    item.append(element);
  }
  list.append(item);
  return item;
}

async function post(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  const response = await fetch(path, { method: "POST", headers, body: JSON.stringify(body), signal });
  if (response.ok) return response;
  const { detail } = await response.json().catch(() => ({}));
  const [first] = Array.isArray(detail) ? detail : [{ msg: detail || response.statusText }];
  throw new Error(`${response.status}: ${first.msg}`);
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
      if (!signal.aborted) show(list, ["span", error.message]).className = "error";
    }
    if (!signal.aborted) list.setAttribute("aria-busy", "false");
  });
}

onSubmit("search", "hits", async (list, signal) => {
  const response = await post("search", { query: byId("query").value, limit: 5 }, signal);
  for (const { score, text, topic } of (await response.json()).hits)
    show(list, ["b", score.toFixed(2)], ["span", `${text} `], ["small", topic]);
});

onSubmit("compare", "scores", async (list, signal) => {
  const texts = linesOf("texts");
  const response = await post("similarity", { source: byId("source").value, texts }, signal);
  (await response.json()).scores.forEach((score, index) =>
    show(list, ["b", score.toFixed(2)], ["span", texts[index]]));
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
      show(list, ["b", texts[index]], ["small", `[${start}, ...] (${embedding.length})`]);
    }
  }
});

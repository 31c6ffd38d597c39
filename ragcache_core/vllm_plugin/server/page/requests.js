// The latest requests, each a line in time: queued, loaded from lower tiers, prefilled, answered.

import { mainSource, SOURCES, tokensBySource } from "./cards.js";
import { bar, byId, bytes, count, el, percent, seconds } from "./dom.js";

const PHASES = [
  ["queue", "queued"],
  ["load", "loaded"],
  ["prefill", "prefilled"],
  ["answer", "answered"],
];

export class RequestList {
  constructor() {
    this.rows = new Map();
    this.requests = [];
    this.limit = 30;
  }

  show(requests) {
    const now = Date.now() / 1000;
    this.requests = requests.slice(0, this.limit).map((request) => ({ ...request, came: now - request.age_s }));
    this.draw();
  }

  // Draw again, with ages as they are by now.
  draw() {
    const now = Date.now() / 1000;
    const ended = this.requests.filter((request) => request.total_s !== null); // one that runs for long goes to the end
    const longest = Math.max(0.001, ...(ended.length ? ended : this.requests).map((r) => r.total_s ?? now - r.came));
    const rows = new Map();
    for (const request of this.requests) {
      const name = `${request.engine} ${request.id}`;
      const row = this.rows.get(name) ?? el("details", {}, el("summary"), el("dl"));
      const [summary, facts] = row.children;
      summary.replaceChildren(...line(request, now, longest));
      facts.replaceChildren(...factsOf(request));
      rows.set(name, row);
    }
    this.rows = rows;
    const box = byId("requests");
    if (!rows.size) return box.replaceChildren(el("p", { className: "faint" }, "no request yet"));
    const keys = el("p", { className: "keys" }, ...PHASES.map(([kind, name]) => el("span", { className: `key ${kind}` }, name)));
    keys.append(el("span", { className: "faint" }, `a whole line is ${seconds(longest)}; open one for its statistics`));
    const head = box.querySelector(".keys");
    if (head) head.replaceWith(keys);
    else box.replaceChildren(keys);
    for (const row of [...box.querySelectorAll("details")]) {
      if (![...rows.values()].includes(row)) row.remove();
    }
    let before = keys;
    for (const row of rows.values()) {
      if (before.nextElementSibling !== row) before.after(row); // one that stays keeps its focus
      before = row;
    }
    return undefined;
  }
}

function phases(request, now) {
  const ended = request.total_s ?? now - request.came;
  const queued = request.queue_s ?? ended;
  const loaded = Math.max(request.load_s ?? queued, queued);
  const first = request.ttft_s ?? (request.total_s === null && request.queue_s !== null ? ended : loaded);
  const ends = [queued, loaded, Math.max(first, loaded), ended];
  return ends.map((end, i) => Math.max(0, end - (i ? ends[i - 1] : 0)));
}

function line(request, now, longest) {
  const parts = phases(request, now).map((took, i) => [took / longest, PHASES[i][0], `${PHASES[i][1]} ${seconds(took)}`]);
  const isRunning = request.total_s === null;
  const more = request.num_documents - request.doc_ids.length;
  const documents = request.doc_ids.join(", ") + (more > 0 ? `${request.doc_ids.length ? " and " : ""}${count(more)} more` : "");
  const shown = isRunning ? parts.filter(([share]) => share > 0) : parts;
  const kind = request.is_speculative && !request.is_confirmed ? "asked ahead: " : "";
  return [
    el("span", { className: "faint" }, isRunning ? "now" : `${ago(now - request.came)} ago`),
    bar(shown, isRunning ? "bar runs" : "bar"),
    el("span", { className: "number" }, seconds(request.total_s ?? now - request.came)),
    el("span", { className: `documents key ${mainSource(request)}` }, kind + (documents || "no document")),
  ];
}

function factsOf(request) {
  const tokens = tokensBySource(request);
  const facts = [
    ["tokens of the prompt", count(request.num_prompt_tokens)],
    ...SOURCES.map((source, i) => [source, `${count(tokens[i])} (${percent(tokens[i] / request.num_prompt_tokens)})`]),
    ["loaded", bytes(request.num_loaded_bytes)],
    ["admitted after", seconds(request.queue_s)],
    ["loaded after", seconds(request.load_s)],
    ["first token after", seconds(request.ttft_s)],
    ["ended after", seconds(request.total_s)],
  ].map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)));
  const documents = request.doc_ids.length ? request.doc_ids.join(", ") : "–";
  facts.push(el("div", { className: "all" }, el("dt", {}, "documents"), el("dd", {}, documents)));
  facts.push(el("div", { className: "all" }, el("dt", {}, "request"), el("dd", {}, request.id)));
  return facts;
}

function ago(took) {
  if (took < 90) return `${Math.round(took)} s`;
  return took < 5400 ? `${Math.round(took / 60)} min` : `${Math.round(took / 3600)} h`;
}

// The cards: tiers, where tokens came from, time to first token, queue and speculation, hottest documents.

import { bar, byId, bytes, count, el, percent, seconds, spark, tierBadges } from "./dom.js";

export const SOURCES = ["gpu", "host", "disk", "shared", "computed"];
const MOMENTS = 120;
const LABELS = { gpu: "GPU", host: "host", disk: "disk", shared: "shared", computed: "computed" };

// The latest shares of each figure that is drawn as a line; a new server starts a new history.
export class History {
  constructor() {
    this.lines = new Map();
  }

  add(name, share) {
    const line = this.lines.get(name) ?? [];
    line.push(Math.max(0, Math.min(share, 1)));
    this.lines.set(name, line.slice(-MOMENTS));
    return this.lines.get(name);
  }
}

export function tokensBySource(request) {
  const tokens = SOURCES.slice(0, -1).map((tier) => request[`num_${tier}_tokens`] ?? 0);
  const computed = request.num_prompt_tokens - tokens.reduce((sum, number) => sum + number, 0);
  return [...tokens, Math.max(computed, 0)];
}

export function mainSource(request) {
  const tokens = tokensBySource(request);
  return SOURCES[tokens.indexOf(Math.max(...tokens))];
}

const isReal = (request) => !request.is_speculative || request.is_confirmed;

export function showTiers(stats, history) {
  byId("tiers").replaceChildren(
    ...stats.tiers.map((tier) => {
      const used = tier.capacity_bytes ? tier.used_bytes / tier.capacity_bytes : 0;
      return el(
        "div",
        { className: "tier" },
        el(
          "div",
          { className: "row" },
          el("strong", { className: `key ${tier.name}` }, LABELS[tier.name] ?? tier.name),
          tier.is_enabled
            ? el("span", {}, `${bytes(tier.used_bytes)} ${tier.capacity_bytes ? `of ${bytes(tier.capacity_bytes)}` : "known"}`)
            : el("span", { className: "off" }, "out of service"),
        ),
        bar([[used, tier.name, percent(used)]]),
        spark(history.add(tier.name, used), tier.name, `${tier.name}: ${percent(used)} used`, MOMENTS),
        el(
          "div",
          { className: "faint" },
          `${count(tier.num_blocks)} blocks, ${count(tier.num_evicted_blocks)} evicted, ${count(tier.num_hit_tokens)} tokens hit`,
        ),
      );
    }),
  );
  if (!stats.tiers.length) byId("tiers").append(el("p", { className: "faint" }, "no statistics yet"));
}

export function showSources(requests, history) {
  const real = requests.filter((request) => isReal(request) && request.queue_s !== null);
  const sums = SOURCES.map(() => 0);
  for (const request of real) tokensBySource(request).forEach((number, i) => (sums[i] += number));
  const all = sums.reduce((sum, number) => sum + number, 0);
  if (!all) return byId("sources").replaceChildren(el("p", { className: "faint" }, "no request yet"));
  const cached = 1 - sums.at(-1) / all;
  const line = history.add("cached", cached);
  return byId("sources").replaceChildren(
    el("div", { className: "row" }, el("span", { className: "big" }, percent(cached)), el("span", {}, "from the cache")),
    bar(sums.map((number, i) => [number / all, SOURCES[i], `${LABELS[SOURCES[i]]} ${percent(number / all)}`])),
    el(
      "div",
      { className: "keys" },
      ...sums.map((number, i) =>
        el("span", { className: `key ${SOURCES[i]}` }, `${LABELS[SOURCES[i]]} ${percent(number / all)}`),
      ),
    ),
    spark(line, "gpu", `${percent(cached)} of prompt tokens cached`, MOMENTS),
    el("p", { className: "faint" }, `${count(all)} prompt tokens of the latest ${count(real.length)} requests`),
  );
}

export function showTtft(requests) {
  const times = Object.fromEntries(SOURCES.map((source) => [source, []]));
  for (const request of requests) {
    if (request.ttft_s !== null && isReal(request)) times[mainSource(request)].push(request.ttft_s);
  }
  const longest = Math.max(0, ...SOURCES.map((source) => quantile(times[source], 0.5) ?? 0));
  const rows = SOURCES.map((source) => {
    const median = quantile(times[source], 0.5);
    return el(
      "tr",
      {},
      el("td", {}, el("span", { className: `key ${source}` }, LABELS[source])),
      el("td", { className: "long" }, bar(median === null ? [] : [[longest ? median / longest : 0, source, seconds(median)]])),
      el("td", { className: "number" }, seconds(median)),
      el("td", { className: "number" }, seconds(quantile(times[source], 0.95))),
      el("td", { className: "number" }, count(times[source].length)),
    );
  });
  const heads = ["source", "", "median", "95 %", "requests"];
  byId("ttft").replaceChildren(
    el(
      "table",
      {},
      el("thead", {}, el("tr", {}, ...heads.map((head, i) => el("th", { className: i > 1 ? "number" : "" }, head)))),
      el("tbody", {}, ...rows),
    ),
  );
}

function quantile(times, share) {
  if (!times.length) return null;
  const sorted = [...times].sort((one, other) => one - other);
  return sorted[Math.min(Math.floor(sorted.length * share), sorted.length - 1)];
}

export function showQueue(stats, load, recent) {
  const wasted = stats.num_speculative_tokens ? stats.num_wasted_tokens / stats.num_speculative_tokens : 0;
  const counts = recent && [["waiting", count(recent.num_queued)], ["running", count(recent.num_running)]]; // a tenant is not told
  const rows = [
    ...(counts ?? []),
    ["pending prefills", `${count(load.num_pending_prefills)}, ${seconds(load.pending_prefill_s)}`],
    ["served before an earlier one", count(stats.num_reordered_requests)],
    ["speculation", !load.is_speculative ? "off" : load.has_room ? "spare capacity" : "no spare capacity"],
    ["speculative requests", count(stats.num_speculative_requests)],
    ["speculation hits", count(stats.num_confirmed_speculations)],
    ["speculative tokens", count(stats.num_speculative_tokens)],
    ["wasted tokens", `${count(stats.num_wasted_tokens)} (${percent(wasted)})`],
  ];
  if (stats.chunks) {
    rows.push(["documents stored for chunk reuse", count(stats.chunks.num_chunks)]);
    rows.push(["reused", count(stats.chunks.num_reused_chunks)]);
  }
  if (stats.recognition) {
    const { num_documents, num_prompts, num_recognised, num_ambiguous, num_unregistered } = stats.recognition;
    rows.push(["registered documents", count(num_documents)]);
    rows.push(["prompts of plain clients", count(num_prompts)]);
    rows.push(["documents recognised in them", `${count(num_recognised)}, ${count(num_ambiguous)} ambiguous`]);
    rows.push(["prompts without a registered document", count(num_unregistered)]);
  }
  byId("queue").replaceChildren(
    el(
      "table",
      {},
      el(
        "tbody",
        {},
        ...rows.map(([name, value]) =>
          el("tr", {}, el("th", { scope: "row" }, name), el("td", { className: "number" }, value)),
        ),
      ),
    ),
  );
}

export function showHottest(stats) {
  const rows = stats.hottest_documents.map((use) =>
    el(
      "tr",
      {},
      el("td", { className: "name", title: use.doc_id }, use.label ?? use.doc_id),
      el("td", { className: "number" }, count(use.frequency)),
      el("td", { className: "number" }, count(use.num_tokens)),
      el("td", {}, ...(use.tiers.length ? tierBadges(use.tiers) : [el("span", { className: "faint" }, "gone")])),
    ),
  );
  const heads = ["document", "requests", "tokens", "lies in"];
  byId("hottest").replaceChildren(
    rows.length
      ? el(
          "table",
          {},
          el(
            "thead",
            {},
            el("tr", {}, ...heads.map((head, i) => el("th", { className: i % 3 ? "number" : "" }, head))),
          ),
          el("tbody", {}, ...rows),
        )
      : el("p", { className: "faint" }, "no request has named a document yet"),
  );
}

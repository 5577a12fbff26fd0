// The engine, live: texts that run and wait, pages in use and cached, and tokens per second.

import { send } from "./api.js";
import { columnWidth, lineChart } from "./chart.js";
import { amount, h } from "./dom.js";

const MAX_POINTS = 180;
const PAGES = 240; // squares that stand for all pages
const history = []; // stays while other views are shown

/** The numbers of a Prometheus text by name; those with labels are added up. */
export function parseMetrics(text) {
  const found = {};
  for (const line of text.split("\n")) {
    const match = line.match(/^clearhead[:_]([a-z0-9_]+)(?:\{[^}]*\})? ([0-9.eE+-]+)/);
    if (match) found[match[1]] = (found[match[1]] ?? 0) + Number(match[2]);
  }
  return found;
}

export async function show(main) {
  const facts = h("div", { class: "facts" });
  const pages = h("div", { class: "pages", role: "img" });
  const charts = h("div", { class: "charts" });
  const note = h("p", { class: "error", hidden: true });
  main.replaceChildren(
    h("section", { class: "panel" }, h("h2", {}, "The engine now"), note, facts),
    h("section", { class: "panel" }, h("h2", {}, "Pages of keys and values"), h("p", { class: "hint" }, "Each square is a share of the memory. Full: texts that are being generated use it. Half: kept for later texts with the same beginning. Empty: free."), pages),
    h("section", { class: "panel" }, h("h2", {}, "The last minutes"), charts),
  );
  async function refresh() {
    try {
      const metrics = parseMetrics(await (await send("/metrics")).text());
      note.hidden = true;
      record(metrics);
      drawFacts(facts, metrics);
      drawPages(pages, metrics);
      drawCharts(charts);
    } catch (error) {
      note.textContent = error.message;
      note.hidden = false;
    }
  }
  await refresh();
  const timer = setInterval(() => document.hidden || refresh(), 1000);
  return () => clearInterval(timer);
}

function record(metrics) {
  const now = performance.now() / 1000;
  const before = history.at(-1);
  const seconds = before ? now - before.time : 1;
  const rate = (name) => (before ? Math.max((metrics[name] ?? 0) - (before.metrics[name] ?? 0), 0) / seconds : 0);
  history.push({ time: now, metrics, written: rate("generation_tokens_total"), read: rate("prompt_tokens_total") });
  if (history.length > MAX_POINTS) history.shift();
}

function drawFacts(facts, metrics) {
  const now = history.at(-1);
  const mean = (name) => (metrics[`${name}_seconds_count`] ? `${((1000 * metrics[`${name}_seconds_sum`]) / metrics[`${name}_seconds_count`]).toFixed(0)} ms` : "–");
  const shared = metrics.prefix_cache_queries_total ? `${((100 * (metrics.prefix_cache_hits_total ?? 0)) / metrics.prefix_cache_queries_total).toFixed(0)}%` : "–";
  const rows = [
    ["Running", String(metrics.num_requests_running ?? 0), "texts in every step"],
    ["Waiting", String(metrics.num_requests_waiting ?? 0), "for a place"],
    ["Writing", `${now.written.toFixed(0)} tok/s`, `${amount(metrics.generation_tokens_total ?? 0)} so far`],
    ["Reading", `${now.read.toFixed(0)} tok/s`, `${amount(metrics.prompt_tokens_total ?? 0)} so far`],
    ["Prefix cache", shared, "of all prompt tokens"],
    ["First token", mean("time_to_first_token"), "mean"],
    ["Between tokens", mean("inter_token_latency"), "mean"],
  ];
  facts.replaceChildren(...rows.map(([name, value, text]) => h("div", { class: "fact" }, h("span", { class: "small muted" }, name), h("strong", {}, value), h("span", { class: "small muted" }, text))));
}

function drawPages(pages, metrics) {
  const used = Math.ceil((metrics.kv_cache_usage_ratio ?? 0) * PAGES);
  const cached = Math.ceil((metrics.kv_cache_cached_ratio ?? 0) * PAGES);
  const kind = (place) => (place < used ? "used" : place < used + cached ? "cached" : "free");
  if (pages.children.length !== PAGES) pages.replaceChildren(...Array.from({ length: PAGES }, () => h("span", {})));
  [...pages.children].forEach((square, place) => (square.className = kind(place)));
  pages.setAttribute("aria-label", `${(100 * (metrics.kv_cache_usage_ratio ?? 0)).toFixed(1)}% of the pages in use, ${(100 * (metrics.kv_cache_cached_ratio ?? 0)).toFixed(1)}% cached`);
}

function drawCharts(charts) {
  const last = history.at(-1).time;
  const shape = { low: 0, xLabel: "seconds", width: columnWidth(charts) };
  const points = (value) => history.map((one) => [one.time - last, value(one)]);
  charts.replaceChildren(
    lineChart([{ name: "written", points: points((one) => one.written) }, { name: "read", points: points((one) => one.read) }], { title: "Tokens per second", ...shape }),
    lineChart([{ name: "running", points: points((one) => one.metrics.num_requests_running ?? 0) }, { name: "waiting", points: points((one) => one.metrics.num_requests_waiting ?? 0) }], { title: "Texts", ...shape }),
  );
}

// SPDX-License-Identifier: Apache-2.0
// The console page: reads server-sent events and shows them. It changes nothing in the cluster.

import { bar, el, milliseconds, plot, strip, svg, table } from "./draw.js";

const HOPS = ["tokenize", "queue", "reserve", "prefill", "handoff", "decode"];
const HISTORY_MAX = 600;
const REQUESTS_SHOWN = 30;
const SILENCE_MS = 5000;

const $ = (id) => document.getElementById(id);
const seen = { overview: null, requests: null, prefixes: null, operations: null, events: null };
const past = { at: [], queued: [], running: [], p50: [], p99: [], prefill: [], decode: [] };
const sorting = { column: 0, down: false };
let heard = 0;

const whole = (value) => Math.round(value).toLocaleString("en");
const rate = (value) => (value >= 10 ? whole(value) : value.toFixed(1));
const percent = (share) => (share === null || share === undefined ? "-" : `${Math.round(100 * share)} %`);
const sum = (list) => list.reduce((total, value) => total + value, 0);
const clock = (seconds) => new Date(1000 * seconds).toLocaleTimeString();
const used = (counts) => (counts && counts.total_blocks
  ? (counts.total_blocks - counts.free_blocks - counts.cached_blocks) / counts.total_blocks : 0);

const STATES = { ready: "good", starting: "warn", draining: "warn", flipping: "warn", unready: "bad", unreachable: "bad",
  running: "warn", succeeded: "good", failed: "bad" };
const pill = (word) => el("span", { class: `pill ${STATES[word] || "dim"}` }, word);
const stateOf = (worker) => (!worker.reachable ? "unreachable" : worker.record.cordoned ? `${worker.record.state}, cordoned` : worker.record.state);

// --- what comes

function connect() {
  const source = new EventSource("api/stream");
  for (const name of Object.keys(seen)) {
    source.addEventListener(name, (event) => {
      seen[name] = JSON.parse(event.data);
      heard = Date.now();
      if (name === "overview") remember(seen.overview);
      show[name]();
      tell("live", `live · ${clock(seen.overview ? seen.overview.at : heard / 1000)}`);
    });
  }
  source.addEventListener("error", () => {
    // The browser tries again by itself, unless it was refused.
    tell("lost", source.readyState === EventSource.CLOSED ? "refused; trying again" : "connection lost; trying again");
    if (source.readyState === EventSource.CLOSED) setTimeout(connect, SILENCE_MS);
  });
}

setInterval(() => {
  if (heard && Date.now() - heard > SILENCE_MS && $("link").dataset.state === "live") {
    tell("lost", `nothing heard since ${clock(heard / 1000)}`);
  }
}, 1000);

function tell(state, text) {
  const link = $("link");
  // Each second's time is no news to who listens to the page.
  link.setAttribute("aria-live", state === "live" && link.dataset.state === "live" ? "off" : "polite");
  link.dataset.state = state;
  link.textContent = text;
  $("main").dataset.stale = String(state !== "live");
}

function remember(overview) {
  const alive = overview.routers.filter((router) => router.reachable).map((router) => router.telemetry);
  const utilization = (name) => {
    const found = overview.pools.flatMap((pool) => pool.roles).filter((role) => role.role === name && role.registered);
    return found.length ? sum(found.map((role) => role.utilization * role.registered)) / sum(found.map((role) => role.registered)) : null;
  };
  const now = { at: overview.at, queued: sum(alive.map((one) => one.queued_requests)),
    running: sum(alive.map((one) => one.running_requests)), p50: overview.time_to_first_token?.p50 ?? null,
    p99: overview.time_to_first_token?.p99 ?? null, prefill: utilization("prefill"), decode: utilization("decode") };
  for (const [name, values] of Object.entries(past)) {
    values.push(now[name]);
    if (values.length > HISTORY_MAX) values.shift();
  }
}

// --- what is shown

const show = {
  overview() {
    const overview = seen.overview;
    $("cluster").textContent = `· ${overview.cluster}`;
    document.title = `Twinpool · ${overview.cluster}`;
    figures(overview);
    $("plots").replaceChildren(
      plot("Requests", [{ name: "waiting", color: "queue", values: past.queued }, { name: "running", color: "decode", values: past.running }], past.at, whole),
      plot("Time to first token", [{ name: "p50", color: "prefill", values: past.p50 }, { name: "p99", color: "handoff", values: past.p99 }], past.at, milliseconds),
      plot("Utilization", [{ name: "prefill", color: "prefill", values: past.prefill }, { name: "decode", color: "decode", values: past.decode }], past.at, percent, 1));
    table($("pool-table"), POOLS, overview.pools.flatMap((pool) => pool.roles.map((role) => ({ ...role, pool: pool.pool }))),
      "No worker is registered, so there is no pool yet.");
    workers();
    table($("router-table"), ROUTERS, overview.routers, "No router is registered.");
  },
  requests() {
    requests();
  },
  prefixes() {
    const names = [...new Set(seen.prefixes.flatMap((prefix) => prefix.holders.map((holder) => holder.worker.name)))].sort();
    const columns = [
      { title: "prefix", value: (row) => row.block_hash.slice(0, 12), class: "mono", header: true },
      { title: "model", value: (row) => row.model },
      { title: "tokens", value: (row) => whole(row.tokens), number: true },
      { title: "blocks", value: (row) => whole(row.blocks), number: true },
      { title: "prompts", value: (row) => whole(row.uses), number: true },
      ...names.map((name) => ({ title: name, value: () => "",
        node: (row) => {
          const holder = row.holders.find((one) => one.worker.name === name);
          return holder ? bar(holder.blocks / row.blocks, false) : "";
        } })),
    ];
    table($("prefix-table"), columns, seen.prefixes, "No prompt with a full block of tokens has come yet.");
  },
  operations() {
    table($("operation-table"), OPERATIONS, seen.operations, "Nothing was asked for yet: no drain, no restart, no change of a pool.");
  },
  events() {
    $("events-part").hidden = false;
    table($("event-table"), EVENTS, seen.events, "No events.");
  },
};

function figures(overview) {
  const alive = overview.routers.filter((router) => router.reachable).map((router) => router.telemetry);
  const seconds = Math.max(1, ...alive.map((one) => one.window));
  const ended = alive.flatMap((one) => one.ended);
  const refused = alive.flatMap((one) => one.refused);
  const both = (summary) => (summary && summary.count ? [milliseconds(summary.p50), el("small", {}, ` p99 ${milliseconds(summary.p99)}`)] : ["-"]);
  const rows = [
    ["Waiting", [whole(sum(alive.map((one) => one.queued_requests)))]],
    ["Running", [whole(sum(alive.map((one) => one.running_requests)))]],
    ["Requests/s", [rate(sum(ended.map((one) => one.count)) / seconds)]],
    ["Tokens/s", [rate(sum(alive.map((one) => one.generation_tokens)) / seconds)]],
    ["Time to first token", both(overview.time_to_first_token)],
    ["… short prompts", both(overview.short_time_to_first_token)],
    ["Between tokens", both(overview.inter_token_latency)],
    ["Cached of prompts", [percent(sum(alive.map((one) => one.query_tokens))
      ? sum(alive.map((one) => one.cached_tokens)) / sum(alive.map((one) => one.query_tokens)) : null)]],
    ["Refused (1 min)", [whole(sum(refused.map((one) => one.count))),
      el("small", {}, refused.length ? ` ${[...new Set(refused.map((one) => one.reason))].join(", ")}` : "")]],
  ];
  $("figures").replaceChildren(...rows.map(([title, value]) => el("div", {}, el("dt", {}, title), el("dd", {}, value))));
}

const POOLS = [
  { title: "pool", value: (row) => row.pool, header: true },
  { title: "role", value: (row) => row.role },
  { title: "wanted", value: (row) => row.desired, number: true },
  { title: "ready", value: (row) => row.ready, number: true },
  { title: "others", value: (row) => row, node: (row) => ["starting", "draining", "flipping", "unready", "unreachable"]
    .filter((name) => row[name]).map((name) => [pill(name), ` ${row[name]} `]) },
  { title: "running", value: (row) => row.running, number: true },
  { title: "waiting", value: (row) => row.waiting, number: true },
  { title: "utilization", value: (row) => row.utilization, node: (row) => bar(row.utilization) },
  { title: "swing in 5 min", value: (row) => percent(row.utilization_swing), number: true },
  { title: "KV in use", value: (row) => row.kv_usage, node: (row) => bar(row.kv_usage) },
  { title: "hit rate", value: (row) => percent(row.hit_rate), number: true },
  { title: "prompt tokens/s", value: (row) => rate(row.prompt_tokens_per_second), number: true },
  { title: "tokens/s", value: (row) => rate(row.generation_tokens_per_second), number: true },
];

const WORKERS = [
  { title: "worker", value: (row) => row.record.worker.name, header: true, tip: (row) => row.error },
  { title: "pool", value: (row) => row.record.pool },
  { title: "role", value: (row) => row.record.role },
  { title: "state", value: stateOf, node: (row) => pill(stateOf(row)), tip: (row) => row.error },
  { title: "running", value: (row) => row.counts?.running, number: true },
  { title: "waiting", value: (row) => row.counts?.waiting, number: true },
  { title: "utilization", value: (row) => row.utilization, node: (row) => bar(row.utilization) },
  { title: "KV in use", value: (row) => used(row.counts), node: (row) => bar(used(row.counts)) },
  { title: "free", value: (row) => row.counts?.free_blocks, number: true },
  { title: "cached", value: (row) => row.counts?.cached_blocks, number: true },
  { title: "hit rate", value: (row) => row.hit_rate, text: (row) => percent(row.hit_rate), number: true },
  { title: "tokens/s", value: (row) => row.prompt_tokens_per_second + row.generation_tokens_per_second,
    text: (row) => rate(row.prompt_tokens_per_second + row.generation_tokens_per_second), number: true },
  { title: "step", value: (row) => row.counts?.step_time, text: (row) => milliseconds(row.counts?.step_time), number: true },
  { title: "reads", value: (row) => row.counts?.transfers, number: true },
  { title: "pins", value: (row) => row.counts?.pinned_blocks, number: true },
  { title: "heard", value: (row) => row.age, text: (row) => (row.age === null ? "never" : row.age < 2 ? "now" : `${row.age.toFixed(0)} s ago`), number: true },
];

const ROUTERS = [
  { title: "router", value: (row) => row.record.name, header: true },
  { title: "state", value: (row) => row, node: (row) => pill(row.reachable ? "ready" : "unreachable"), tip: (row) => row.error },
  { title: "waiting", value: (row) => row.telemetry?.queued_requests, number: true },
  { title: "running", value: (row) => row.telemetry?.running_requests, number: true },
  { title: "first token p50", value: (row) => milliseconds(row.telemetry?.time_to_first_token_summary?.p50), number: true },
  { title: "p99", value: (row) => milliseconds(row.telemetry?.time_to_first_token_summary?.p99), number: true },
  { title: "between tokens p50", value: (row) => milliseconds(row.telemetry?.inter_token_latency_summary?.p50), number: true },
  { title: "p99 ", value: (row) => milliseconds(row.telemetry?.inter_token_latency_summary?.p99), number: true },
  { title: "refused", value: (row) => (row.telemetry ? sum(row.telemetry.refused.map((one) => one.count)) : null), number: true },
  { title: "not as it should be", value: (row) => (row.reachable ? row.telemetry.conditions.join(", ") : row.error), class: "warn" },
];

const OPERATIONS = [
  { title: "operation", value: (row) => row.id, header: true, class: "mono" },
  { title: "kind", value: (row) => (row.target_role && row.target_role !== "unspecified" ? `${row.kind} to ${row.target_role}` : row.kind) },
  { title: "worker", value: (row) => row.worker?.name || row.pool },
  { title: "state", value: (row) => row.state, node: (row) => pill(row.state) },
  { title: "asked for", value: (row) => clock(row.created_at) },
  { title: "steps", value: (row) => row.steps.map((step) => (step.done_at === null ? `${step.name} …`
    : `${step.name} ${milliseconds(step.done_at - step.began_at)}`)).join(" · ") },
  { title: "why", value: (row) => row.error || row.reason || "", class: "cut", tip: (row) => row.error || row.reason },
];

const EVENTS = [
  { title: "at", value: (row) => clock(row.at) },
  { title: "pool", value: (row) => row.pool },
  { title: "about", value: (row) => row.subject, header: true },
  { title: "event", value: (row) => row.reason, node: (row) => el("span", { class: row.warning ? "warn" : "" }, row.reason) },
  { title: "what", value: (row) => row.message },
];

function workers() {
  const column = WORKERS[sorting.column];
  const order = (a, b) => {
    const [x, y] = [column.value(a) ?? -1, column.value(b) ?? -1];
    return (x < y ? -1 : x > y ? 1 : 0) * (sorting.down ? -1 : 1);
  };
  table($("worker-table"), WORKERS, [...seen.overview.workers].sort(order), "No worker is registered.", sorting, (at) => {
    sorting.down = sorting.column === at ? !sorting.down : Boolean(WORKERS[at].number);
    sorting.column = at;
    workers();
  });
}

const WELL = new Set(["Finished"]);

function requests() {
  const { requests: all, unreachable } = seen.requests;
  const wanted = { all: () => true, live: (one) => one.live, ended: (one) => !one.live, failed: (one) => !one.live && !WELL.has(one.state) };
  const found = all.filter(wanted[$("show").value]).slice(0, REQUESTS_SHOWN);
  const byClock = $("axis").value === "clock";
  const from = byClock ? Math.min(...found.map((one) => one.arrived)) : 0;
  const until = byClock ? Math.max(...found.map((one) => one.arrived + one.age)) : Math.max(...found.map((one) => one.age));
  const way = found.length ? `hops, ${milliseconds(until - from)} from left to right` : "hops";
  table($("request-table"), [
    { title: "request", value: (row) => row.client_id, header: true, class: "mono cut", tip: (row) => row.client_id },
    { title: "state", value: (row) => row.state, node: (row) => el("span", { class: row.live ? "good" : WELL.has(row.state) ? "dim" : "bad", title: row.cause }, row.state) },
    { title: "prompt", value: (row) => whole(row.prompt_tokens), number: true },
    { title: "cached", value: (row) => row.cached_tokens, number: true },
    { title: "output", value: (row) => whole(row.output_tokens), number: true },
    { title: "workers", value: (row) => [row.prefill?.name, row.decode?.name].filter(Boolean).join(" → ") || "not placed" },
    { title: "tries", value: (row) => row.attempts, number: true },
    { title: way, value: () => "", class: "way", node: (row) => strip(row.hops, byClock ? row.arrived : 0, row.age, from, until) },
    { title: "age", value: (row) => milliseconds(row.age), number: true },
  ], found, all.length ? "No request fits." : "No request has come yet.");
  const missing = unreachable.length ? ` Those of ${unreachable.join(", ")} are missing: no answer.` : "";
  $("requests-note").textContent = `${found.length} of ${seen.requests.found} requests, the newest first.${missing}`;
}

for (const id of ["show", "axis"]) $(id).addEventListener("change", () => seen.requests && requests());
$("legend").append(...HOPS.map((hop) => el("li", {},
  svg("svg", { viewBox: "0 0 10 10", "aria-hidden": "true" }, svg("rect", { class: `fill-${hop}`, width: 10, height: 10, rx: 2 })), hop)));
connect();

// What if: the cluster's own history replayed under other policies and sizes, side by side.

import { get, send } from "./api.js";
import { Chart } from "./chart.js";
import { byId, el, fill, say, table } from "./dom.js";
import { duration, gpus, NONE, number, percent, times } from "./format.js";
import { follow } from "./live.js";
import { frame, serviceStatus, showLive } from "./shell.js";
import { WORDS } from "./words.js";

const POLL_MS = 700;
const ALWAYS = ["pollux", "fifo"];
let running = null;

function showChoices(policies, current) {
  const first = policies.find((one) => one.name === current);
  const ordered = [first, ...policies.filter((one) => one !== first)].filter(Boolean);
  fill(byId("choices"), ordered.map((policy) => {
    const hint = `about-${policy.name}`;
    const chosen = policy.name === current || ALWAYS.includes(policy.name);
    return el("div", { class: "choice" },
      el("input", { type: "checkbox", name: "policy", value: policy.name, id: `policy-${policy.name}`, checked: chosen, "aria-describedby": hint }),
      el("label", { for: `policy-${policy.name}` }, policy.name, policy.name === current ? " (runs here)" : ""),
      el("p", { class: "hint", id: hint }, policy.summary.replaceAll("`", "")));
  }));
}

function problem(text) {
  say(byId("problem"), text);
  byId("problem").hidden = !text;
}

function busy(isBusy) {
  byId("replay").disabled = isBusy;
  byId("stop").hidden = !isBusy;
  byId("running").hidden = !isBusy;
}

async function ask(event) {
  event.preventDefault();
  const policies = [...document.querySelectorAll("input[name=policy]:checked")].map((input) => input.value);
  if (!policies.length) return problem("Choose at least one policy.");
  const nodes = byId("sizes").value.split(",").map((word) => word.trim()).filter(Boolean);
  problem("");
  try {
    const { id } = await send("POST", "/v1/whatif", nodes.length ? { policies, nodes } : { policies });
    await watch(id);
  } catch (error) {
    problem(error.message);
    busy(false);
  }
}

async function watch(id) {
  running = id;
  busy(true);
  byId("bar").removeAttribute("value");
  for (;;) {
    const found = await get(`/v1/whatif/${encodeURIComponent(id)}`);
    if (running !== id) return;
    if (found.state === "running" || found.state === "queued") {
      if (found.progress > 0) byId("bar").value = found.progress;
      say(byId("bar-label"), `Replaying, ${percent(found.progress)}`);
      await new Promise((resolve) => setTimeout(resolve, POLL_MS));
      continue;
    }
    running = null;
    busy(false);
    if (found.state === "done") showResult(found.result);
    else problem(found.state === "cancelled" ? "The replay was stopped." : found.detail || "The replay failed.");
    return;
  }
}

/** One row for each policy and size, from the document that `pollux whatif --json` prints. */
function rowsOf(result) {
  return (result.runs ?? []).flatMap((run) => (run.results ?? []).map((found) => ({ ...found, nodes: run.nodes, perNode: run.config?.gpus_per_node ?? null })));
}

const HOUR = 3600;
const COLUMNS = [
  ["Average completion", (row) => duration(row.avg_jct_hours * HOUR)], ["Against the first", null], ["99th percentile", (row) => duration(row.p99_jct_hours * HOUR)],
  ["Makespan", (row) => duration(row.makespan_hours * HOUR)], ["Utilisation", (row) => percent(row.utilization)], ["GPU-time", (row) => `${number(row.gpu_hours)} GPU-h`],
  ["Re-allocations", (row) => `${number(row.restarts_per_job)} per job`], ["Fairness", (row) => number(row.worst_ftf)],
];

function showResult(result) {
  const rows = rowsOf(result);
  byId("result-card").hidden = false;
  if (!rows.length) return fill(byId("table"), el("p", { class: "empty" }, "The replay holds no jobs."));
  const first = rows[0].avg_jct_hours;
  const sizes = new Set(rows.map((row) => row.nodes));
  const name = (row) => (sizes.size > 1 ? `${row.policy}, ${row.nodes} node${row.nodes === 1 ? "" : "s"}` : row.policy);
  const columns = [{ name: "Policy" }, ...COLUMNS.map(([title]) => ({ name: title === "Fairness" ? "Worst fairness" : title, class: "right", about: WORDS[title] }))];
  const cells = rows.map((row, index) => [name(row), ...COLUMNS.map(([title, show]) => {
    if (title !== "Against the first") return show(row);
    const ratio = row.avg_jct_hours / first;
    return el("span", { class: index === 0 ? "" : ratio < 0.995 ? "better" : ratio > 1.005 ? "worse" : "" }, index === 0 ? NONE : times(ratio));
  })]);
  fill(byId("table"), table("Policies side by side", columns, cells));
  const jobs = rows[0].num_jobs ?? rows[0].jobs.length;
  say(byId("result-hint"), `${jobs} job${jobs === 1 ? "" : "s"} of this cluster's history; ${[...sizes].map((size) => `${size} node${size === 1 ? "" : "s"}${rows[0].perNode ? ` of ${gpus(rows[0].perNode)}` : ""}`).join(", ")}`);
  showPlots(rows, name);
  byId("result-title").focus();
}

/** Which share of the jobs was through after how long, and how many jobs there were over time. */
function showPlots(rows, name) {
  const shown = rows.slice(0, 12);
  const series = shown.map((row, index) => ({ label: name(row), colour: `--c${index}`, step: true }));
  const done = new Chart({ title: "Jobs through after", about: "Average completion", x: "count", xLabel: "minutes since submission", series, format: percent, zero: true, height: 240, latest: () => "" });
  const present = new Chart({ title: "Jobs not ended", about: "", x: "count", xLabel: "minutes since the first submission", series, zero: true, height: 240, latest: () => "" });
  fill(byId("plots"), done.element, present.element);
  const times = shown.map((row) => row.jobs.map((job) => (job.finished - job.submitted) / 60).sort((a, b) => a - b));
  draw(done, times.map((found) => found.map((at, index) => [at, (index + 1) / found.length])), 0);
  const began = Math.min(...shown.flatMap((row) => row.jobs.map((job) => job.submitted)));
  draw(present, shown.map((row) => {
    const changes = row.jobs.flatMap((job) => [[(job.submitted - began) / 60, 1], [(job.finished - began) / 60, -1]]).sort((a, b) => a[0] - b[0]);
    // Of very many jobs the service sends a part; each of them stands for as many.
    const each = (row.num_jobs ?? row.jobs.length) / Math.max(row.jobs.length, 1);
    let count = 0;
    return changes.map(([at, change]) => [at, (count += change * each)]);
  }), 0);
}

/** Steps of several lines on one axis: each keeps its value until its next. */
function draw(chart, lines, start) {
  const xs = [...new Set([0, ...lines.flat().map(([at]) => at)])].sort((a, b) => a - b);
  chart.update(xs, lines.map((line) => {
    let next = 0;
    let value = start;
    return xs.map((x) => {
      while (next < line.length && line[next][0] <= x) value = line[next++][1];
      return value;
    });
  }));
}

async function stop() {
  const id = running;
  if (!id) return;
  byId("stop").disabled = true;
  try {
    await send("POST", `/v1/whatif/${encodeURIComponent(id)}/cancel`);
  } catch (error) {
    problem(error.message);
  } finally {
    byId("stop").disabled = false;
  }
}

async function start() {
  const role = await frame("/policies");
  const [status, found] = await Promise.all([serviceStatus(), get("/v1/policies")]);
  showChoices(found.policies, status.policy);
  byId("ask").addEventListener("submit", ask);
  byId("stop").addEventListener("click", stop);
  if (role !== "operator") {
    byId("replay").disabled = true;
    for (const input of document.querySelectorAll("#ask input")) input.disabled = true;
    problem("You are signed in for reading only: replaying takes the operator's token.");
  }
  follow({ onState: showLive, onBack: () => {}, onEvent: () => {} });
  performance.mark("pollux-ready");
  document.documentElement.dataset.ready = "true";
}

start().catch((error) => {
  if (error.status !== 401) problem(error.message);
  if (error.status === undefined) console.error(error);
});

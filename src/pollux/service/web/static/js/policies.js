// What if: the cluster's own history replayed under other policies and sizes, side by side.

import { get, send } from "./api.js";
import { Chart } from "./chart.js";
import { byId, el, fill, say } from "./dom.js";
import { duration, gpus, NONE, number, partOf, percent, times } from "./format.js";
import { follow, quietly } from "./live.js";
import { annotate, frame, serviceStatus, showLive } from "./shell.js";
import { table } from "./table.js";

const POLL_MS = 700;
const AGAIN_MS = 3000;
const ALWAYS = ["pollux", "fifo"];
const REASONS_SHOWN = 20;
const wait = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));
let running = null;
let mayStop = false;

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
  byId("replay").disabled = isBusy || !mayStop;
  byId("stop").hidden = !isBusy || !mayStop;
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
    if (error.status === 409) await findAgain();
  }
}

/** The running replay, else the newest with a result; none if there is neither. */
async function newest() {
  const { replays } = await get("/v1/whatif");
  return replays.find((one) => one.state === "running") ?? replays.find((one) => one.state === "done");
}

/** Go on where this page, or another, was left: a replay runs on without a page. */
async function findAgain() {
  const found = running ? null : await newest();
  if (!found) return;
  try {
    await watch(found.id, true);
  } catch (error) {
    busy(false);
    if (error.status !== 404) throw error;
  }
}

async function watch(id, again = false) {
  running = id;
  byId("bar").removeAttribute("value");
  say(byId("bar-label"), "Replaying");
  if (!again) busy(true);
  for (;;) {
    let found;
    try {
      found = await get(`/v1/whatif/${encodeURIComponent(id)}`);
    } catch (error) {
      if (running !== id) return;
      if (error.status === 0 || error.status >= 500) {
        say(byId("bar-label"), "The service does not answer; asking again");
        await wait(AGAIN_MS);
        continue;
      }
      running = null;
      if (error.status === 404 && !again) throw new Error("The replay is gone: the service was started anew meanwhile.");
      throw error;
    }
    if (running !== id) return;
    if (found.state === "running" || found.state === "queued") {
      busy(true);
      if (found.progress > 0) byId("bar").value = found.progress;
      say(byId("bar-label"), `Replaying, ${partOf(found.progress)}`);
      again = false;
      await wait(POLL_MS);
      continue;
    }
    running = null;
    busy(false);
    if (found.state === "done") showResult(found.result, !again);
    else if (!again) problem(found.state === "cancelled" ? "The replay was stopped." : found.detail || "The replay failed.");
    return;
  }
}

const texts = (value) => (Array.isArray(value) ? value.filter((one) => typeof one === "string") : []);

/** One row for each policy and size, from the document that `pollux whatif --json` prints. */
function rowsOf(result) {
  return (result.runs ?? []).flatMap((run) => (run.results ?? []).map((found) => ({
    ...found, nodes: run.nodes, perNode: run.config?.gpus_per_node ?? null, leftOut: texts(run.left_out), count: found.num_jobs ?? found.jobs.length,
  })));
}

/** Whether two rows replay the same jobs: only then can their times be compared. */
const sameJobs = (a, b) => a.count === b.count && JSON.stringify(a.leftOut) === JSON.stringify(b.leftOut);

const HOUR = 3600;
// A dashed line over an equal one leaves parts of it visible.
const DASHES = [[8, 6], [3, 5], [12, 4, 3, 4]];
const COLUMNS = [
  ["Replayed jobs", (row) => row.count.toLocaleString()], ["Average completion", (row) => duration(row.avg_jct_hours * HOUR)], ["Against the first", null],
  ["99th percentile", (row) => duration(row.p99_jct_hours * HOUR)], ["Makespan", (row) => duration(row.makespan_hours * HOUR)], ["Utilisation", (row) => percent(row.utilization)],
  ["GPU-time in all", (row) => `${number(row.gpu_hours)} GPU-h`], ["Re-allocations per job", (row) => number(row.restarts_per_job)], ["Worst fairness", (row) => number(row.worst_ftf)],
];

const nodesText = (count) => `${count} node${count === 1 ? "" : "s"}`;

/** The time of a row beside that of the first; in colour only if both did the same work. */
function against(row, first) {
  if (row === first) return NONE;
  const ratio = row.avg_jct_hours / first.avg_jct_hours;
  if (!sameJobs(row, first)) return el("span", { class: "muted" }, `${times(ratio)}, other jobs`);
  return el("span", { class: ratio < 0.995 ? "better" : ratio > 1.005 ? "worse" : "" }, times(ratio));
}

/** Which jobs are in no row, and which not in all of them. */
function showLeftOut(result, rows) {
  const runs = (result.runs ?? []).map((run) => [run.nodes, texts(run.left_out)]);
  const reasons = [...texts(result.left_out), ...runs.flatMap(([nodes, found]) => found.map((reason) => `With ${nodesText(nodes)}: ${reason}`))];
  const differ = rows.some((row) => !sameJobs(row, rows[0]));
  byId("left-out").hidden = !reasons.length && !differ;
  fill(byId("left-out"), differ && el("p", {}, "Not every row replays the same jobs: times of rows with other jobs do not compare."),
    reasons.length > 0 && [el("p", {}, "Left out:"), el("ul", {}, reasons.slice(0, REASONS_SHOWN).map((reason) => el("li", {}, reason)),
      reasons.length > REASONS_SHOWN && el("li", {}, `and ${(reasons.length - REASONS_SHOWN).toLocaleString()} more`))]);
}

function showResult(result, focus = true) {
  const rows = rowsOf(result);
  byId("result-card").hidden = false;
  showLeftOut(result, rows);
  if (!rows.length) return fill(byId("table"), el("p", { class: "empty" }, "The replay holds no jobs."));
  const sizes = new Set(rows.map((row) => row.nodes));
  const name = (row) => (sizes.size > 1 ? `${row.policy}, ${nodesText(row.nodes)}` : row.policy);
  const columns = [{ name: "Policy" }, ...COLUMNS.map(([title]) => ({ name: title, class: "right", about: title }))];
  const cells = rows.map((row) => [name(row), ...COLUMNS.map(([, show]) => (show ? show(row) : against(row, rows[0])))]);
  fill(byId("table"), table("Policies side by side", columns, cells));
  const counts = [...new Set(rows.map((row) => row.count))].sort((a, b) => a - b);
  const jobs = counts.length > 1 ? `${counts[0].toLocaleString()} to ${counts[counts.length - 1].toLocaleString()} jobs` : `${counts[0].toLocaleString()} job${counts[0] === 1 ? "" : "s"}`;
  say(byId("result-hint"), `${jobs} of this cluster's history; ${[...sizes].map((size) => `${nodesText(size)}${rows[0].perNode ? ` of ${gpus(rows[0].perNode)}` : ""}`).join(", ")}`);
  showPlots(rows, name);
  if (focus) byId("result-title").focus();
}

/** The share of jobs done after each completion time, and the number of jobs over time. */
function showPlots(rows, name) {
  const shown = rows.slice(0, 12);
  const series = shown.map((row, index) => ({ label: name(row), colour: `--c${index}`, step: true, dash: index > 0 ? DASHES[(index - 1) % DASHES.length] : undefined }));
  const done = new Chart({ title: "Jobs through after", x: "count", xLabel: "minutes since submission", series, format: percent, zero: true, height: 240, latest: () => "" });
  const present = new Chart({ title: "Jobs not ended", x: "count", xLabel: "minutes since the first submission", series, zero: true, height: 240, latest: () => "" });
  fill(byId("plots"), done.element, present.element);
  const times = shown.map((row) => row.jobs.map((job) => (job.finished - job.submitted) / 60).sort((a, b) => a - b));
  draw(done, times.map((found) => found.map((at, index) => [at, (index + 1) / found.length])), 0);
  const began = Math.min(...shown.flatMap((row) => row.jobs.map((job) => job.submitted)));
  draw(present, shown.map((row) => {
    const changes = row.jobs.flatMap((job) => [[(job.submitted - began) / 60, 1], [(job.finished - began) / 60, -1]]).sort((a, b) => a[0] - b[0]);
    // Of very many jobs the service sends a sample; each job of it stands for this many.
    const each = (row.num_jobs ?? row.jobs.length) / Math.max(row.jobs.length, 1);
    let count = 0;
    return changes.map(([at, change]) => [at, (count += change * each)]);
  }), 0);
}

/** Steps of several lines on one axis: each keeps its value until its next step. */
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
  mayStop = role === "operator";
  annotate("bar", "Replayed so far");
  annotate("result-hint", "Replayed history");
  byId("ask").addEventListener("submit", ask);
  byId("stop").addEventListener("click", stop);
  if (role !== "operator") {
    byId("replay").disabled = true;
    for (const input of document.querySelectorAll("#ask input")) input.disabled = true;
    problem("You are signed in for reading only: replaying takes the operator's token.");
  }
  const again = () => quietly(findAgain());
  follow({ onState: showLive, onBack: again, onEvent: () => {} });
  again();
  performance.mark("pollux-ready");
  document.documentElement.dataset.ready = "true";
}

start().catch((error) => {
  if (error.status !== 401) problem(error.message);
  if (error.status === undefined) console.error(error);
});

// The cluster page: who holds what, what that is worth, who waits for what, and what changed.

import { get, getJobs, jobPage } from "./api.js";
import { introduce } from "./colours.js";
import { byId, el, fill, onChange, say } from "./dom.js";
import { linked } from "./explain.js";
import { duration, eta, gpuTime, moment, NONE, percent, range, times } from "./format.js";
import { JobTable } from "./jobtable.js";
import { eventsAfter, follow, quietly, setPace, throttled, whenSeen } from "./live.js";
import { Nodes } from "./nodes.js";
import { annotate, frame, info, serverNow, serviceStatus, showLive } from "./shell.js";
import { showTable, table } from "./table.js";
import { Timeline } from "./timeline.js";

const QUEUE_SHOWN = 40;
const CHANGES_SHOWN = 60;
const LONGEST_WHOLE = 24;
const EVENTS_RECALLED = 200;
const changes = [];

const tiles = new Map();

/** One of the large numbers; made once, then only its texts change. */
function tile(name, figure, unit, note, share = null) {
  if (!tiles.has(name)) {
    const parts = { figure: el("span"), unit: el("small"), note: el("dd", { class: "note" }), bar: el("span") };
    tiles.set(name, parts);
    byId("tiles").append(el("div", { class: "tile" }, el("dt", {}, name, info(name)), el("dd", { class: "figure" }, parts.figure, parts.unit),
      share !== null && el("dd", { class: "bar", "aria-hidden": "true" }, parts.bar), parts.note));
  }
  const parts = tiles.get(name);
  say(parts.figure, figure);
  say(parts.unit, unit);
  say(parts.note, note);
  parts.bar.style.width = `${Math.min(100 * (share ?? 0), 100)}%`;
}

function showTiles(summary, status) {
  const { gpus, goodput, fairness, reallocations, jobs_by_state: states } = summary;
  const count = (...names) => names.reduce((sum, name) => sum + (states[name] ?? 0), 0);
  const gain = goodput?.ratio ?? null;
  const ended = [`${count("succeeded").toLocaleString()} done`, ...["failed", "cancelled"].map((state) => count(state) && `${count(state).toLocaleString()} ${state}`)].filter(Boolean).join(", ");
  tile("GPUs in use", String(gpus.used), ` of ${gpus.total}`, gpus.total ? percent(gpus.utilisation) : "no nodes", gpus.utilisation ?? 0);
  tile("Goodput vs. static", times(gain), "", gain === null ? "known once jobs have reported" : `${goodput.jobs} job${goodput.jobs === 1 ? "" : "s"} now, ${goodput.static_jobs} if static`);
  tile("Jobs", count("running", "starting", "resizing").toLocaleString(), " running", `${count("queued", "paused").toLocaleString()} waiting, ${ended}`);
  tile("Median fairness", fairness.median === null ? NONE : fairness.median.toFixed(2), "", fairness.median === null ? "known once jobs have reported" : `worst ${fairness.worst.toFixed(2)}; ${percent(fairness.unfair_share)} of jobs above 1`);
  tile("Re-allocation cost", gpuTime(reallocations.gpu_seconds), "",
    `${reallocations.count.toLocaleString()} changes${reallocations.share === null ? "" : `, ${percent(reallocations.share)} of GPU-time`}${summary.false_alarms ? `; ${summary.false_alarms} false alarms` : ""}`);
  tile("Decisions", duration(status.decision_seconds), "", status.last_decision_at === null ? "none yet" : `the last at ${moment(status.last_decision_at, true)}`);
  say(byId("cluster-line"), `policy ${status.policy}, backend ${status.backend}, up since ${moment(status.started_at)}`);
}

/** A job by its name, unbroken unless it is so long that nothing else has room. */
const jobLink = (id) => el("a", { href: jobPage(id), class: id.length <= LONGEST_WHOLE ? "nowrap" : null }, id);

function showQueue(jobs, total) {
  const now = serverNow();
  const rows = jobs.map((job) => [
    jobLink(job.id), range(job.min_gpus, job.max_gpus), el("span", { class: "nowrap" }, duration(now - job.submitted_at)), eta(job.eta, now),
    el("span", {}, linked(job.why.text, job.why.jobs, job.id)),
  ]);
  say(byId("queue-hint"), jobs.length && total > jobs.length ? `the first ${jobs.length} of ${total.toLocaleString()}` : "");
  const columns = [{ name: "Job" }, { name: "Asks for", about: "Asks for" }, { name: "Waits for", about: "Waits for" }, { name: "Expected end", about: "Expected end" }, { name: "Why it waits" }];
  if (jobs.length) showTable(byId("queue"), table("Jobs that wait", columns, rows));
  else fill(byId("queue"), el("p", { class: "empty" }, "Nobody waits."));
}

function showChanges() {
  const rows = changes.slice(0, CHANGES_SHOWN).map((one) => [
    el("span", { class: "number nowrap" }, moment(one.at, true)),
    one.job_id ? jobLink(one.job_id) : "cluster",
    el("span", {}, linked(one.text, one.jobs, one.job_id)),
  ]);
  const columns = [{ name: "When" }, { name: "Job" }, { name: "What happened, and why" }];
  if (rows.length) showTable(byId("changes"), table("Latest changes", columns, rows, { class: "plain" }));
  else fill(byId("changes"), el("p", { class: "empty" }, "Changes appear here as they happen."));
}

const tellsOfChanges = (event) => event.lines?.length > 0 && event.kind !== "reported" && event.kind !== "timer";

function remember(event) {
  if (!tellsOfChanges(event) || changes.some((one) => one.revision === event.revision)) return false;
  for (const line of event.lines) changes.unshift({ at: event.at, revision: event.revision, ...line });
  changes.length = Math.min(changes.length, CHANGES_SHOWN);
  return true;
}

/** What happened before the page was opened: in the words of the last events, and before those as numbers. */
async function recall(revision, timeline) {
  const found = (await eventsAfter(Math.max(revision - EVENTS_RECALLED, 0))).filter(tellsOfChanges);
  const told = changes.filter((one) => one.revision !== undefined);
  const known = new Set(told.map((one) => one.revision));
  const missing = found.filter((event) => !known.has(event.revision)).flatMap((event) => event.lines.map((line) => ({ at: event.at, revision: event.revision, ...line })).reverse());
  changes.length = 0;
  changes.push(...[...told, ...missing].sort((one, other) => other.revision - one.revision));
  const first = changes.length ? changes[changes.length - 1].at : Infinity;
  const before = timeline.reallocations.filter((one) => one.at < first - 1).reverse();
  changes.push(...before.map((one) => ({ at: one.at, job_id: one.job, text: `${one.from}→${one.to} GPUs${one.reason ? `: ${one.reason.replaceAll("-", " ")}` : ""}`, jobs: [] })));
  changes.length = Math.min(changes.length, CHANGES_SHOWN);
}

const showWarnings = onChange((warnings) => fill(byId("warnings"), warnings.map((warning) => el("p", { class: "alert warn" }, warning))));

/** Let the browser draw and scroll between two pieces of work. */
const breath = () => new Promise((resolve) => setTimeout(resolve, 0));

async function start() {
  await frame("/");
  annotate("nodes-hint", "GPUs of a node");
  annotate("timeline-hint", "GPU-time in view");
  annotate("queue-hint", "Waiting jobs");
  annotate("jobs-hint", "Jobs in the list");
  const nodes = new Nodes(byId("nodes"), byId("nodes-hint"));
  byId("nodes-find").addEventListener("input", (event) => nodes.filter(event.target.value));
  const load = (since, until) => get(`/v1/timeline?since=${since.toFixed(1)}&until=${until.toFixed(1)}&limit=120`);
  const timeline = new Timeline(byId("timeline"), byId("timeline-tools"), byId("timeline-hint"), { load, now: serverNow });
  const jobs = new JobTable(byId("jobs"), byId("jobs-tools"), byId("jobs-hint"));

  let revision = 0;

  async function overview() {
    const list = (state) => getJobs(`/v1/jobs?state=${state}&limit=${QUEUE_SHOWN}`);
    const [status, summary, queued, paused] = await Promise.all([serviceStatus(), get("/v1/summary"), list("queued"), list("paused")]);
    const holders = new Set(status.nodes.flatMap((node) => Object.keys(node.jobs)));
    introduce(holders);
    setPace(summary.watchers);
    showTiles(summary, status);
    showWarnings(status.warnings ?? []);
    revision = status.revision;
    await breath();
    nodes.update(status.nodes);
    await breath();
    jobs.count(summary.jobs_by_state);
    await breath();
    showQueue([...queued.jobs, ...paused.jobs], (summary.jobs_by_state.queued ?? 0) + (summary.jobs_by_state.paused ?? 0));
  }

  await Promise.all([overview(), jobs.more()]);
  await timeline.begin();
  performance.mark("pollux-ready");
  document.documentElement.dataset.ready = "true";

  const soonOverview = throttled(overview, 1500);
  const soonJobs = throttled(() => jobs.refresh(), 2500);
  const soonTimeline = throttled(() => timeline.refresh(), 4000);
  const soonChanges = throttled(async () => showChanges(), 500);
  const all = whenSeen(() => { soonOverview(); soonJobs(); soonTimeline(); });
  // Again whenever the stream begins: no message has what happened between filling the page and that.
  const soonRecall = throttled(async () => {
    await recall(revision, timeline.data);
    showChanges();
  }, 500);
  follow({
    onState: (state) => {
      showLive(state);
      if (state === "live") soonRecall();
    },
    onBack: all,
    onEvent: (event) => {
      if (remember(event)) soonChanges();
      all();
    },
  });
  // Bars and times change without events; and if many watch, an answer may be older than the last event.
  setInterval(whenSeen(all), 10000);
  soonRecall();
}

start().catch((error) => {
  if (error.status !== 401) fill(byId("tiles"), el("div", { class: "alert", role: "alert" }, `The page could not be filled: ${error.message}`));
  if (error.status === undefined) console.error(error);
});

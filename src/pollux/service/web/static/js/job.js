// The page of one job: why, now, over time, what happened, its log, its receipt, and what can be done.

import { showActions } from "./actions.js";
import { get, jobPage, jobPath } from "./api.js";
import { colourVar, introduce } from "./colours.js";
import { byId, el, fill, onChange, say } from "./dom.js";
import { linked } from "./explain.js";
import { duration, eta, gpus, gpuTime, moment, NONE, number, percent, partOf, range, times } from "./format.js";
import { stateBadge } from "./jobtable.js";
import { follow, throttled, whenSeen } from "./live.js";
import { Log } from "./log.js";
import { showReceipt } from "./receipt.js";
import { Series } from "./series.js";
import { frame, info, serverNow, serviceStatus, showLive, toast } from "./shell.js";
import { showTable, table } from "./table.js";

const LONG_FACT = 40;
const ENDED = ["succeeded", "failed", "cancelled"];
const id = decodeURIComponent(location.pathname.split("/")[2] ?? "");

const facts = new Map();

/** One number of the job; made once, then only its text changes. */
function fact(name, value) {
  if (!facts.has(name)) {
    facts.set(name, el("dd"));
    byId("facts").append(el("div", {}, el("dt", {}, name, info(name)), facts.get(name)));
  }
  say(facts.get(name), value ?? NONE);
  facts.get(name).parentNode.classList.toggle("long", (value ?? "").length > LONG_FACT);
}

const showProgress = onChange(({ share, text }) => fill(byId("progress"),
  el("progress", { max: 1, value: share ?? 0, "aria-label": "Progress" }), el("span", { class: "number" }, partOf(share)), info("Progress"),
  text && el("span", { class: "muted" }, text), text && info("Expected end")));

function showHead(job) {
  say(byId("job-name"), job.id);
  document.title = `${job.id} · ${job.state} · Pollux`;
  byId("swatch").style.setProperty("--colour", colourVar(job.id));
  if (byId("job-state").textContent !== job.state) fill(byId("job-state"), stateBadge(job.state));
  const parts = [`queue ${job.queue}`, `priority ${job.priority}`, `submitted ${moment(job.submitted_at)}`];
  if (job.started_at !== null) parts.push(`started ${moment(job.started_at)}`);
  if (job.ended_at !== null) parts.push(`ended ${moment(job.ended_at)} after ${duration(job.ended_at - job.submitted_at)}`);
  fill(byId("job-line"), parts.join(" · "), job.after.length > 0 && [" · after ", job.after.map((other, index) => [index > 0 && ", ", el("a", { href: jobPage(other) }, other)])]);
  const problem = byId("job-problem");
  problem.hidden = !(job.state === "failed" && job.detail);
  say(problem, job.detail);
}

/** The noise scale with its interval, which may be open above. */
function noiseText(scale, noise) {
  const [low, high] = [noise?.low ?? null, noise?.high ?? null];
  if (scale === null) return low === null ? NONE : `at least ${number(low)} samples`;
  if (low === null && high === null) return `${number(scale)} samples`;
  return `${number(scale)} samples (${high === null ? `at least ${number(low)}` : `${number(low ?? 0)} to ${number(high)}`})`;
}

function showNow(found, noise) {
  const { job } = found;
  const now = serverNow();
  const ends = job.eta ? `expected end ${eta(job.eta, now)}` : "expected end not known yet";
  showProgress({ share: job.progress, text: ENDED.includes(job.state) ? "" : ends });
  const where = Object.entries(job.placement).map(([node, count]) => `${count} on ${node}`).join(", ");
  // What a job reported before it got its present GPUs, or when it last held any, no longer holds.
  const idle = !ENDED.includes(job.state) && job.gpus === 0 && job.reported_at !== null;
  const stale = job.outdated || idle;
  byId("outdated").hidden = !stale;
  if (stale) {
    const ago = job.reported_at === null ? "" : ` ${duration(now - job.reported_at)} ago`;
    say(byId("outdated"), `Figures marked “before” were told${ago}, ${idle ? "when it last held GPUs" : "before it was given these GPUs; its next report renews them"}.`);
  }
  const told = (text) => (stale && text !== NONE ? `${text} before` : text);
  fact("GPUs", ENDED.includes(job.state) ? `${range(job.min_gpus, job.max_gpus)} allowed` : `${job.gpus} of ${range(job.min_gpus, job.max_gpus)}`);
  fact("Where", where || NONE);
  fact("Total batch", told(number(job.batch_size)));
  fact("Local batch", told(number(job.local_batch)));
  fact("Accumulation", told(number(job.accumulation)));
  fact("Learning-rate factor", told(times(job.learning_rate_factor)));
  fact("Throughput", told(job.throughput === null ? NONE : `${number(job.throughput)}/s`));
  fact("Efficiency", told(percent(job.efficiency)));
  fact("Goodput", told(job.goodput === null ? NONE : `${number(job.goodput)}/s`));
  fact("Noise scale", noiseText(job.noise_scale, noise));
  fact("Loss", number(job.loss));
  fact("Fairness", found.fairness === null || found.fairness === undefined ? NONE : found.fairness.toFixed(2));
  fact("GPU-time", gpuTime(job.gpu_seconds));
  fact("Re-allocations", `${found.reallocations?.count ?? job.restarts}, cost ${gpuTime(found.reallocations?.gpu_seconds ?? null)}`);
  fact("Next change costs", job.resize_seconds === null ? NONE : `${duration(job.resize_seconds)}${job.resize_kind ? `, ${job.resize_kind}` : ""}`);
  fact("Crashes", `${job.crashes} of ${job.retries}`);
  if (job.checkpoint_error) fact("Last save", `failed: ${job.checkpoint_error}`);
  fact("Checkpoint", job.checkpoint_age_seconds === null ? NONE : `${duration(job.checkpoint_age_seconds)} old`);
}

const showEvents = onChange((events) => {
  const rows = events.slice().reverse().map((line) => [
    el("span", { class: "number nowrap" }, moment(line.at, true)), el("span", { class: "kind" }, line.kind), el("span", {}, linked(line.text, line.jobs, id))]);
  const columns = [{ name: "When" }, { name: "What" }, { name: "In words, and why" }];
  if (rows.length) showTable(byId("events"), table("What happened, newest first", columns, rows, { class: "plain" }));
  else fill(byId("events"), el("p", { class: "empty" }, "Nothing yet."));
});

const PURPOSES = {
  cancel: "To end it", doctor: "To see what is missing", explain: "To see why that one has what it has", logs: "To see what it wrote", ls: "To see all jobs",
  resume: "To let it run again", show: "To see all about it", top: "To watch the cluster",
};

/** What a command is for; a resize may undo what has just happened, which people must know before they copy it. */
function purposeOf(step, job) {
  const resize = step.match(/^pollux resize \S+ --gpus ([0-9]+)(?:\.\.([0-9]+))?$/);
  if (!resize) return PURPOSES[step.split(" ")[1]] ?? "What helps next";
  const [least, most] = [Number(resize[1]), Number(resize[2] ?? resize[1])];
  if (least > job.gpus) return `To hold at least ${gpus(least)}; it may have to wait for them`;
  if (most < job.gpus) return `To keep it at ${gpus(most)} or fewer`;
  if (least > job.min_gpus) return `To keep at least ${gpus(least)}; it may have to wait for them`;
  return `To let it hold ${least === most ? gpus(most) : `${least} to ${gpus(most)}`}`;
}

const tellWhy = onChange(({ why, purpose }) => {
  fill(byId("why"), linked(why.text, why.jobs, id));
  fill(byId("next-step"), why.next_step && [`${purpose}:`, el("code", {}, why.next_step), el("button", {
    class: "button tiny", type: "button", "aria-label": "Copy the command", on: { click: () => copy(why.next_step) } }, "Copy")]);
});

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    toast("Copied.");
  } catch {
    toast("The browser does not let this page copy; select the command instead.", true);
  }
}

function missing(error) {
  say(byId("job-name"), id);
  const problem = byId("job-problem");
  say(problem, error.message);
  problem.hidden = false;
  for (const card of document.querySelectorAll("main .card")) card.hidden = true;
}

async function start() {
  introduce([id]);
  const role = await frame(jobPage(id));
  await serviceStatus();
  let found;
  try {
    found = await get(jobPath(id));
  } catch (error) {
    if (error.status === 404 || error.status === 422) return missing(error);
    throw error;
  }
  const series = new Series(id);
  const log = new Log(id);
  let spec = "";

  async function overview() {
    found = await get(jobPath(id));
    showHead(found.job);
    showNow(found, series.rows[series.rows.length - 1]?.values.noise);
    showEvents(found.events);
    showActions(found.job, role, async () => { await overview(); });
    log.know(Math.max(...series.rows.map((row) => row.values.num_replicas), found.job.gpus, 1), ENDED.includes(found.job.state));
    const text = found.request === null ? "" : JSON.stringify(found.request, null, 2);
    if (text !== spec) say(byId("spec"), text);
    spec = text;
    const why = await get(`${jobPath(id)}/explain`);
    tellWhy({ why, purpose: why.purpose || purposeOf(why.next_step, found.job) });
  }
  const receipt = async () => showReceipt(byId("receipt"), await get(`${jobPath(id)}/receipt`).then((value) => value.receipt));

  await series.refresh();
  await overview();
  await Promise.all([series.refreshCurve(), log.read(), receipt()]);
  performance.mark("pollux-ready");
  document.documentElement.dataset.ready = "true";

  const soonOverview = throttled(overview, 1000);
  const soonSeries = throttled(() => {
    series.until = ENDED.includes(found.job.state) ? null : serverNow();
    return series.refresh();
  }, 2000);
  const soonCurve = throttled(() => series.refreshCurve(), 10000);
  const soonReceipt = throttled(receipt, 10000);
  const soonLog = throttled(() => (log.follows ? log.read() : null), 1000);
  const seen = whenSeen(() => { soonSeries(); soonCurve(); soonReceipt(); soonLog(); });
  // The title has the state too: it is all that people see of a page in the background.
  const all = () => { soonOverview(); seen(); };
  follow({
    onState: showLive,
    onBack: all,
    onEvent: (event) => { if (event.kind === "resync" || event.lines?.some((line) => line.job_id === id)) all(); },
  });
  setInterval(() => { if (!document.hidden && !ENDED.includes(found.job.state)) { soonOverview(); soonSeries(); } }, 5000);
}

start().catch((error) => {
  if (error.status !== 401) toast(`The page could not be filled: ${error.message}`, true);
  if (error.status === undefined) console.error(error);
});

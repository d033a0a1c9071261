// The receipt of a run, as its agent wrote it: untrusted, so every part is looked at before it is shown.

import { el, fill } from "./dom.js";
import { duration, moment, NONE, number } from "./format.js";
import { info } from "./shell.js";
import { table } from "./table.js";

const EVENTS_SHOWN = 100;
const CHANGES_SHOWN = 3;
const finite = (value) => (typeof value === "number" && Number.isFinite(value) ? value : null);
const list = (value) => (Array.isArray(value) ? value : []);
const text = (value) => (value === null || value === undefined ? NONE : String(value));

const counted = (count, what) => `${count.toLocaleString()} ${what}${count === 1 ? "" : "s"}`;

function fact(name, value) {
  return el("div", {}, el("dt", {}, name, info(name)), el("dd", {}, value));
}

/** What the loss says about changes of the batch: the newest measured ones, each with its interval. */
function realised(changes) {
  const told = changes.filter((one) => finite(one?.realised_over_predicted) !== null);
  if (told.length) return told.slice(-CHANGES_SHOWN).map(ratio).join("; ");
  return changes.length ? "the loss is too noisy to tell" : "the batch was not changed";
}

function ratio(change) {
  const [low, high] = [finite(change.low), finite(change.high)];
  const span = low === null || high === null ? "" : ` (${low.toFixed(2)} to ${high.toFixed(2)})`;
  return `${change.realised_over_predicted.toFixed(2)}${span} at step ${number(finite(change.step))}`;
}

/** Show a receipt, or that there is none. */
export function showReceipt(place, receipt) {
  if (!receipt) {
    fill(place, el("p", { class: "muted" }, "None yet: the agent of a job that trains with pollux.init writes it when the job stops or ends."));
    return;
  }
  const totals = receipt.totals ?? {};
  const progress = receipt.progress ?? {};
  const because = list(receipt.not_exact_because).map(text).join("; ");
  const configurations = list(receipt.configurations);
  const events = list(receipt.events).slice(-EVENTS_SHOWN).reverse();
  fill(place,
    el("dl", { class: "facts" },
      fact("Mode", text(receipt.mode)),
      fact("Trained as plain PyTorch would", receipt.exact ? "yes" : `no${because ? `: ${because}` : ""}`),
      fact("Batch", `${text(receipt.initial_batch)} at first, ${text(receipt.final_batch)} at last`),
      fact("Learning-rate rule", text(receipt.rule)),
      fact("Steps", number(finite(totals.steps))),
      fact("Samples", number(finite(totals.samples))),
      fact("Time in training", duration(finite(totals.seconds))),
      fact("Useful samples", number(finite(progress.predicted))),
      fact("Realised by the loss", realised(list(progress.realised?.changes)))),
    configurations.length > 0 && el("details", { class: "as-table" }, el("summary", {}, counted(configurations.length, "configuration")), scrolled("Configurations", configurationTable(configurations))),
    el("details", { class: "as-table", open: events.length > 0 && events.length < 12 }, el("summary", {}, counted(events.length, "event")), scrolled("Events of the receipt", eventTable(events))));
}

const scrolled = (label, content) => el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, content);

const CONFIGURATION = [
  { key: "step", name: "From step", about: "From step" }, { key: "samples", name: "From samples", about: "From samples" },
  { key: "progress", name: "From useful samples", about: "From useful samples" }, { key: "seconds", name: "From time", about: "From time", show: duration },
  { key: "num_replicas", name: "Replicas", about: "Replicas" }, { key: "num_nodes", name: "Nodes", about: "Nodes" },
  { key: "local_batch", name: "Local batch", about: "Local batch" }, { key: "accumulation", name: "Accumulation", about: "Accumulation" },
  { key: "total_batch", name: "Total batch", about: "Total batch" },
];

function configurationTable(rows) {
  const columns = CONFIGURATION.map(({ name, about }, index) => ({ name, about, class: index > 0 ? "right" : null }));
  return table("Configurations in order", columns, rows.map((row) => CONFIGURATION.map(({ key, show = number }) => show(finite(row?.[key])))));
}

function eventTable(rows) {
  const columns = [{ name: "When" }, { name: "What" }, { name: "Step", about: "Step" }, { name: "In words" }];
  return table("Events, newest first", columns, rows.map((row) => [moment(finite(row?.time), true), text(row?.kind), number(finite(row?.step)), text(row?.text)]));
}

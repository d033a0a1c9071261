// What an operator can do to a job, each after a question; a viewer sees none of it.

import { jobPath, send } from "./api.js";
import { byId, el, fill } from "./dom.js";
import { gpus } from "./format.js";
import { quietly } from "./live.js";
import { confirmed, toast } from "./shell.js";

const ENDED = ["succeeded", "failed", "cancelled"];

/** The buttons that suit the job's state; `after` is called after an action. */
export function showActions(job, role, after) {
  const place = byId("actions");
  if (role !== "operator" || ENDED.includes(job.state)) {
    fill(place);
    return;
  }
  const shown = job.state === "paused" ? "resume" : "pause";
  if (place.dataset.shown === shown) {
    place.job = job;
    return;
  }
  place.dataset.shown = shown;
  place.job = job;
  const button = (name, text, run, kind = "") => el("button", { class: `button ${kind}`, type: "button", id: `do-${name}`, on: { click: () => run(place.job, after) } }, text);
  const hadFocus = place.contains(document.activeElement);
  fill(place, shown === "resume" ? button("resume", "Resume", resume) : button("pause", "Pause", pause), button("resize", "Resize…", resize), button("cancel", "Cancel job", cancel, "danger"));
  // Pause and Resume take turns as one button: the keyboard focus stays on it.
  if (hadFocus && !place.contains(document.activeElement)) byId(`do-${shown}`).focus({ preventScroll: true });
}

async function act(job, verb, body, done, after) {
  try {
    const answer = await send("POST", `${jobPath(job.id)}/${verb}`, body);
    toast(done);
    // The service's note, such as that there are not so many GPUs.
    if (answer?.note) toast(`${job.id}: ${answer.note}`, true);
  } catch (error) {
    toast(error.message, true);
  }
  await quietly(after());
}

/** What a stop leaves of the work so far, as far as it is known here. */
function kept(job) {
  if (job.checkpoint_age_seconds !== null) return "It is asked to save first; where that takes longer than its grace, it goes on from its last checkpoint when it is resumed.";
  if (job.reported_at !== null) return "It is asked to save first; it has told of no checkpoint yet, so what it cannot save within its grace is lost.";
  return "It has not reported: a script that does not use pollux.init begins anew when it is resumed, unless it saves by itself.";
}

async function pause(job, after) {
  const held = job.gpus ? `It gives back ${gpus(job.gpus)}. ${kept(job)}` : "It will not be started until it is resumed.";
  if (await confirmed({ title: `Pause ${job.id}?`, text: held, button: "Pause" })) await act(job, "pause", undefined, `${job.id} is paused.`, after);
}

async function resume(job, after) {
  const saved = job.checkpoint_age_seconds === null ? ", and begins anew unless it saved when it was stopped" : ", and goes on from its last checkpoint";
  const from = job.started_at === null ? "" : saved;
  if (await confirmed({ title: `Resume ${job.id}?`, text: `It waits for GPUs again${from}.`, button: "Resume" })) await act(job, "resume", undefined, `${job.id} is in the queue again.`, after);
}

async function cancel(job, after) {
  const left = job.started_at === null ? "It has not run yet." : "Files that it wrote are left as they are; its log, and its receipt where it wrote one, are kept for as long as the service keeps ended jobs.";
  const answer = await confirmed({ title: `Cancel ${job.id}?`, text: `It ends for good. ${left}`, button: "Cancel the job", danger: true });
  if (answer) await act(job, "cancel", undefined, `${job.id} is cancelled.`, after);
}

async function resize(job, after) {
  const answer = await confirmed({
    title: `Resize ${job.id}`,
    text: `It may hold ${job.min_gpus === job.max_gpus ? gpus(job.max_gpus) : `${job.min_gpus} to ${gpus(job.max_gpus)}`} now. The policy decides how many of the new range it gets.`,
    button: "Resize",
    field: { label: "GPUs", value: `${job.min_gpus}..${job.max_gpus}`, pattern: "[0-9]+(\\.\\.[0-9]+)?", hint: "A number such as 4, or a range such as 2..8" },
  });
  if (!answer) return;
  const text = answer.value.trim();
  await act(job, "resize", { gpus: /^[0-9]+$/.test(text) ? Number(text) : text }, `${job.id} may now hold ${text} GPUs.`, after);
}

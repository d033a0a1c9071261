// What an operator can do to a job, each after a question; a viewer sees none of it.

import { jobPath, send } from "./api.js";
import { byId, el, fill } from "./dom.js";
import { gpus } from "./format.js";
import { quietly } from "./live.js";
import { confirmed, toast } from "./shell.js";

const ENDED = ["succeeded", "failed", "cancelled"];

/** The buttons that make sense for the job as it is; `after` is called once something was done. */
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
  fill(place, shown === "resume" ? button("resume", "Resume", resume) : button("pause", "Pause", pause), button("resize", "Resize…", resize), button("cancel", "Cancel job", cancel, "danger"));
}

async function act(job, verb, body, done, after) {
  try {
    await send("POST", `${jobPath(job.id)}/${verb}`, body);
    toast(done);
  } catch (error) {
    toast(error.message, true);
  }
  await quietly(after());
}

async function pause(job, after) {
  const held = job.gpus ? `It saves, and gives back ${gpus(job.gpus)}. A script that saves nothing and does not use pollux.init begins anew when it is resumed.` : "It will not be started until it is resumed.";
  if (await confirmed({ title: `Pause ${job.id}?`, text: held, button: "Pause" })) await act(job, "pause", undefined, `${job.id} is paused.`, after);
}

async function resume(job, after) {
  if (await confirmed({ title: `Resume ${job.id}?`, text: "It waits for GPUs again, and goes on from its last checkpoint, if it has one.", button: "Resume" })) await act(job, "resume", undefined, `${job.id} is in the queue again.`, after);
}

async function cancel(job, after) {
  const answer = await confirmed({ title: `Cancel ${job.id}?`, text: "It ends for good. Its checkpoints, log and receipt stay.", button: "Cancel the job", danger: true });
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

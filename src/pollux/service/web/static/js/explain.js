// Sentences of the service with the jobs that they name as links.

import { jobPage } from "./api.js";
import { isJob } from "./colours.js";
import { el } from "./dom.js";

// Words of the sentences themselves: a job may be called so, but a word is a word first.
const WORDS = new Set(("a after all also and another are as at back because behind but by came changes cost costs crashed done "
  + "failed fair fits for from gave given go goes gained grew had has held here hold holds in is it its job jobs keeps limits lost "
  + "moved most needs node nodes none not now of on only or other others out paused place quota resumed run runs share shrunk "
  + "started stopped takes that the them there they to up waits was went were which with without you your").split(" "));
const NAME = /[a-z0-9](?:[a-z0-9._-]{0,70}[a-z0-9])?/g;

/** The text as nodes; `jobs`: exactly these ids are links, else those of jobs that the page has seen. */
export function linked(text, jobs = null, self = null) {
  const exactly = jobs === null ? null : new Set(jobs);
  const parts = [];
  let done = 0;
  for (const match of text.matchAll(NAME)) {
    const id = match[0];
    const before = text[match.index - 1] ?? " ";
    const links = exactly ? exactly.has(id) : isJob(id) && !WORDS.has(id) && /[a-z]/.test(id);
    if (!links || id === self || /[\w→.-]/.test(before)) continue;
    parts.push(text.slice(done, match.index), el("a", { href: jobPage(id) }, id));
    done = match.index + id.length;
  }
  parts.push(text.slice(done));
  return parts.filter((part) => part !== "");
}

// Sentences of the service with the jobs that they name as links.

import { jobPage } from "./api.js";
import { el } from "./dom.js";

const quoted = (text) => text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");

/** The places of ids in a text, each as a whole word; of two that begin alike, the longer. */
function* places(text, jobs) {
  if (!jobs.length) return;
  const ids = [...jobs].sort((a, b) => b.length - a.length).map(quoted).join("|");
  yield* text.matchAll(new RegExp(`(?<![\\w→.-])(?:${ids})(?![\\w-]|\\.\\w)`, "g"));
}

/** The text as nodes, with links to `jobs`, the ids that the service found in it, except this page's job. */
export function linked(text, jobs, self = null) {
  const parts = [];
  let done = 0;
  for (const { 0: id, index } of places(text, (jobs ?? []).filter((one) => one && one !== self))) {
    parts.push(text.slice(done, index), el("a", { href: jobPage(id) }, id));
    done = index + id.length;
  }
  parts.push(text.slice(done));
  return parts.filter((part) => part !== "");
}

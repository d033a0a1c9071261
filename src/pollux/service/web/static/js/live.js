// The stream of events: tells when something happened and whether we are still connected.

import { leave } from "./api.js";
import { messages, Stream } from "./stream.js";

/** The source of events: one stream for all pages of this browser, or this page's own if pages cannot share. */
function connect(hear) {
  let own = null;
  const alone = () => {
    own = new Stream(hear);
    own.open();
  };
  let worker = null;
  try {
    worker = new SharedWorker("/static/js/shared.js", { type: "module", name: "pollux-events-1" });
    worker.onerror = () => { if (!own) alone(); };
    worker.port.onmessage = ({ data }) => hear(data);
    worker.port.postMessage("hello");
  } catch {
    alone();
  }
  return {
    isShared: () => own === null,
    end() {
      own?.close();
      if (!worker) return;
      worker.onerror = null;
      worker.port.onmessage = null;
      worker.port.postMessage("bye");
    },
  };
}

/**
 * Follow /v1/events. `onEvent(event)` for each fact, `onState("live" | "reconnecting")`, and `onBack()` after every
 * reconnection, when what was missed must be read anew; also when a page comes back from the browser's cache.
 */
export function follow({ onEvent, onState, onBack }) {
  let wasLive = false;
  let connection = null;

  function hear({ state, kind, data }) {
    if (state === "signed-out") leave();
    else if (state === "live") {
      onState("live");
      if (wasLive) onBack();
      wasLive = true;
    } else if (state === "reconnecting") onState(state);
    else if (kind) tell(kind, data);
  }

  function tell(kind, data) {
    try {
      onEvent({ kind, ...JSON.parse(data) });
    } catch {
      onBack();
    }
  }

  const open = () => { connection ??= connect(hear); };
  const close = () => {
    connection?.end();
    connection = null;
  };
  open();
  addEventListener("pagehide", close);
  // The browser may keep a page as it was, and show it again when the reader goes back.
  addEventListener("pageshow", (event) => { if (event.persisted) open(); });
  document.addEventListener("visibilitychange", () => {
    // A page's own stream takes one of few connections, so a hidden page gives it up.
    if (document.hidden && !connection?.isShared()) close();
    else if (!document.hidden) {
      open();
      onBack();
    }
  });
}

/** `run`, but only while somebody can see the page; `onBack` comes once it is seen again. */
export const whenSeen = (run) => () => { if (!document.hidden) run(); };

/** The events after a revision, oldest first, as far as the service still has them. */
export async function eventsAfter(revision) {
  const answer = await fetch("/v1/events?follow=false", { headers: { "Last-Event-ID": String(revision) }, credentials: "same-origin", cache: "no-store" });
  return answer.ok ? messages(await answer.text()).map(({ kind, data }) => ({ kind, ...JSON.parse(data) })) : [];
}

/** Ignore the failure of a request that will be repeated; report mistakes of our own. */
export function quietly(promise) {
  return promise.catch((error) => {
    if (error.status === undefined) console.error(error);
  });
}

/** With many watchers each page reads less often, so that together they load the service no more than a few do. */
const FEW_WATCHERS = 25;
let pace = 1;
export const setPace = (watchers) => { pace = Math.max(1, (watchers ?? 0) / FEW_WATCHERS); };

/** Run `work` soon, at most once per `every` milliseconds (less often if many watch), and never twice at a time. */
export function throttled(work, every) {
  let timer = 0;
  let last = -Infinity;
  let running = false;
  let again = false;

  async function run() {
    timer = 0;
    if (running) {
      again = true;
      return;
    }
    running = true;
    last = performance.now();
    await quietly(Promise.resolve().then(work));
    running = false;
    if (again) {
      again = false;
      ask();
    }
  }

  function ask() {
    if (!timer) timer = setTimeout(run, Math.max(0, last + every * pace - performance.now()));
  }
  return ask;
}

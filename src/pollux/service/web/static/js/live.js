// The stream of events: tells when something happened and whether we are still connected.

import { leave } from "./api.js";

const RETRY_MS = 1500;
const KINDS = ["submitted", "running", "reported", "ended", "shrunk", "timer", "finished", "cancelled", "paused", "resumed",
  "limits", "forgotten", "node-added", "node-removed", "queue", "decision", "other", "resync"];

/**
 * Follow /v1/events. `onEvent(event)` for each fact, `onState("live" | "reconnecting")`, and `onBack()` after every
 * reconnection, when whatever was missed has to be read anew.
 */
export function follow({ onEvent, onState, onBack }) {
  let source = null;
  let wasLive = false;
  let timer = 0;

  function open() {
    source = new EventSource("/v1/events");
    source.onopen = () => {
      onState("live");
      if (wasLive) onBack();
      wasLive = true;
    };
    source.onerror = () => {
      onState("reconnecting");
      // The browser tries again by itself unless an answer refused it, as a service does that is about to stop.
      if (source.readyState === EventSource.CLOSED) {
        clearTimeout(timer);
        timer = setTimeout(reopen, RETRY_MS);
      }
    };
    for (const kind of KINDS) source.addEventListener(kind, hear);
  }

  function hear(message) {
    try {
      onEvent({ kind: message.type, ...JSON.parse(message.data) });
    } catch {
      onBack();
    }
  }

  async function reopen() {
    // Where the session is over, this leads to the page for signing in.
    const answer = await fetch("/v1/session", { credentials: "same-origin", cache: "no-store" }).catch(() => null);
    if (answer?.status === 401) leave();
    else open();
  }

  open();
  addEventListener("pagehide", () => source.close());
}

/** Let a request fail that is made again anyway; mistakes of our own are told. */
export function quietly(promise) {
  return promise.catch((error) => {
    if (error.status === undefined) console.error(error);
  });
}

/** Run `work` soon, at most once per `every` milliseconds, and never twice at a time. */
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
    if (!timer) timer = setTimeout(run, Math.max(0, last + every - performance.now()));
  }
  return ask;
}

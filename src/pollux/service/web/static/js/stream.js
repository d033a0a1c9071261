// One stream of /v1/events: kept open, opened again when it breaks, and caught up with what was missed meanwhile.

const RETRY_MS = 1500;
const KINDS = ["submitted", "running", "reported", "ended", "shrunk", "timer", "finished", "cancelled", "paused", "resumed",
  "limits", "forgotten", "node-added", "node-removed", "queue", "decision", "other", "resync"];

/** `tell(message)`: {state: "live" | "reconnecting" | "signed-out"} or {kind, data}, with the data as the service sent it. */
export class Stream {
  constructor(tell) {
    Object.assign(this, { tell, state: "connecting", source: null, timer: 0, last: "" });
  }

  get isOpen() {
    return this.source !== null || this.timer !== 0;
  }

  open() {
    this.close();
    const source = new EventSource("/v1/events");
    this.source = source;
    source.onopen = () => this.say("live");
    source.onerror = () => {
      this.say("reconnecting");
      // The browser tries again by itself unless it was refused, for example by a service that is stopping.
      if (source.readyState === EventSource.CLOSED) this.later();
    };
    for (const kind of KINDS) source.addEventListener(kind, (message) => this.hear(kind, message.data, message.lastEventId));
  }

  close() {
    this.source?.close();
    this.source = null;
    clearTimeout(this.timer);
    this.timer = 0;
  }

  later() {
    this.close();
    this.timer = setTimeout(() => this.again(), RETRY_MS);
  }

  /** Read what was missed, since a new stream begins with the present; then open the stream. */
  async again() {
    const asked = this.timer;
    const headers = this.last ? { "Last-Event-ID": this.last } : {};
    const answer = await fetch("/v1/events?follow=false", { headers, credentials: "same-origin", cache: "no-store" }).catch(() => null);
    const text = answer?.ok ? await answer.text().catch(() => "") : "";
    if (asked !== this.timer) return;
    if (answer?.status === 401) {
      this.close();
      this.say("signed-out");
      return;
    }
    for (const { id, kind, data } of messages(text)) this.hear(kind, data, id);
    if (answer?.ok) this.open();
    else this.later();
  }

  hear(kind, data, id) {
    if (id) this.last = id;
    this.tell({ kind, data });
  }

  say(state) {
    this.state = state;
    this.tell({ state });
  }
}

/** The messages of a stream that has ended, as text. */
export function messages(text) {
  return text.split("\n\n").map((block) => Object.fromEntries(block.split("\n").map((line) => {
    const at = line.indexOf(": ");
    return at > 0 ? [line.slice(0, at), line.slice(at + 2)] : ["", ""];
  }))).filter((found) => found.data !== undefined).map((found) => ({ id: found.id ?? "", kind: found.event ?? "other", data: found.data }));
}

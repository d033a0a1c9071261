// The log of a replica, from its end on, following what is written. Lines are text, whatever they hold.

import { get, jobPath } from "./api.js";
import { byId, el, fill, say } from "./dom.js";

const FIRST_BYTES = 65536;
const MOST_CHARACTERS = 400000;
const POLL_MS = 2000;

export class Log {
  constructor(id) {
    Object.assign(this, { id, place: byId("log"), replica: 0, offset: null, follows: true, replicas: 0, ended: false });
    this.button = el("button", { class: "button tiny", type: "button", id: "log-follow", "aria-pressed": "true", on: { click: () => this.setFollow(!this.follows) } }, "Follow");
    this.select = el("select", { id: "log-replica", on: { change: () => this.open(Number(this.select.value)) } });
    fill(byId("log-tools"), el("label", { class: "inline-field" }, "Replica ", this.select), this.button);
    this.place.addEventListener("scroll", () => {
      const atEnd = this.place.scrollHeight - this.place.scrollTop - this.place.clientHeight < 24;
      if (!atEnd && this.follows && !this.moving) this.setFollow(false);
    }, { passive: true });
    setInterval(() => { if (!document.hidden && this.follows && !this.ended) this.read(); }, POLL_MS);
  }

  /** Note the most replicas there have been, and whether the log has ended. */
  know(replicas, ended) {
    const count = Math.max(replicas, 1);
    this.ended = ended;
    if (count <= this.replicas) return;
    this.replicas = count;
    fill(this.select, Array.from({ length: Math.min(count, 1024) }, (_, index) => el("option", { value: String(index), selected: index === this.replica }, String(index))));
  }

  setFollow(follows) {
    this.follows = follows;
    this.button.setAttribute("aria-pressed", String(follows));
    if (follows) this.read().then(() => this.toEnd());
  }

  async open(replica) {
    this.replica = replica;
    this.offset = null;
    this.place.textContent = "";
    await this.read();
  }

  async read() {
    if (this.reading) return;
    this.reading = true;
    const replica = this.replica;
    try {
      for (let again = true; again;) {
        const from = this.offset ?? -FIRST_BYTES;
        const piece = await get(`${jobPath(this.id)}/logs?replica=${replica}&offset=${from}&limit=${FIRST_BYTES}`);
        if (replica !== this.replica) return;
        this.offset = piece.offset;
        again = !piece.at_end && piece.text.length > 0;
        this.append(piece.text);
      }
      say(byId("log-hint"), this.place.textContent ? "" : "Nothing written yet.");
    } catch (error) {
      if (replica === this.replica) say(byId("log-hint"), error.message);
    } finally {
      this.reading = false;
      // Another replica was chosen meanwhile, and has waited.
      if (replica !== this.replica) this.read();
    }
  }

  append(text) {
    if (!text) return;
    this.place.append(text);
    let surplus = this.place.textContent.length - MOST_CHARACTERS;
    while (surplus > 0 && this.place.firstChild) {
      surplus -= this.place.firstChild.textContent.length;
      this.place.firstChild.remove();
    }
    if (this.follows) this.toEnd();
  }

  toEnd() {
    this.moving = true;
    this.place.scrollTop = this.place.scrollHeight;
    requestAnimationFrame(() => { this.moving = false; });
  }
}

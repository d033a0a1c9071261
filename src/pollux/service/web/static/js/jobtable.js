// All jobs, however many: pages come from the service as they are scrolled to, and only rows in sight are elements.

import { getJobs, jobPage } from "./api.js";
import { el, fill, say } from "./dom.js";
import { linked } from "./explain.js";
import { eta, moment, NONE, number, partOf, percent, range } from "./format.js";
import { quietly } from "./live.js";
import { serverNow } from "./shell.js";
import { columnHead } from "./table.js";

const ROW = 38;
const PAGE = 100;
const SPARE = 8;
const OLD_MS = 10000;
const STATES = ["queued", "starting", "running", "resizing", "paused", "succeeded", "failed", "cancelled"];
const COLUMNS = [
  { name: "Job", width: "13%" }, { name: "State", width: "114px", about: "State" }, { name: "GPUs", width: "92px", about: "GPUs" },
  { name: "Batch", width: "90px", class: "right", about: "Total batch" }, { name: "Goodput", width: "106px", class: "right", about: "Goodput" },
  { name: "Efficiency", width: "108px", class: "right", about: "Efficiency" }, { name: "Progress", width: "104px", about: "Progress" },
  { name: "Fairness", width: "104px", class: "right", about: "Fairness" }, { name: "Expected end", width: "128px", about: "Expected end" },
  { name: "Why" },
];

/** The state of a job as a word in its colour. */
export const stateBadge = (state) => el("span", { class: `state ${state}` }, state);

export class JobTable {
  constructor(place, tools, hint) {
    Object.assign(this, { place, hint, rows: [], pages: [], next: null, complete: false, which: "active" });
    this.body = el("tbody");
    this.table = el("table", { "aria-label": "Jobs" },
      el("colgroup", {}, COLUMNS.map((column) => el("col", { vars: column.width ? { width: column.width } : {} }))),
      el("thead", {}, el("tr", {}, COLUMNS.map(columnHead))), this.body);
    this.view = el("div", { class: "scroll virtual", tabindex: "0", role: "region", "aria-label": "All jobs", id: "jobs-view" }, this.table);
    this.note = el("p", { class: "empty", hidden: true }, "No jobs here. Submit one with: pollux submit job.yaml");
    this.tip = el("div", { class: "tip words", hidden: true, "aria-hidden": "true" });
    fill(place, el("div", { class: "tipped" }, this.view, this.tip), this.note);
    this.view.addEventListener("scroll", () => this.soon(), { passive: true });
    this.listen();
    this.tools(tools);
  }

  tools(place) {
    const option = (value, text) => el("option", { value }, text);
    const select = el("select", { id: "jobs-which", on: { change: () => quietly(this.choose(select.value)) } },
      option("active", "not ended"), option("all", "all"), option("ended", "ended"), STATES.map((state) => option(state, state)));
    const find = el("input", { type: "search", id: "jobs-open", autocomplete: "off", spellcheck: "false", placeholder: "name" });
    const form = el("form", { class: "inline-field", on: { submit: (event) => { event.preventDefault(); if (find.value.trim()) location.assign(jobPage(find.value.trim())); } } },
      el("label", { for: "jobs-open" }, "Open a job"), find);
    fill(place, el("label", { class: "inline-field" }, "Show ", select), form);
  }

  /** Show a reason in full if its cell is too small: when it is pointed at, or its row has the focus. */
  listen() {
    this.body.addEventListener("pointerover", ({ target }) => this.tell(target.closest(".cause")?.parentNode));
    this.view.addEventListener("pointerleave", () => this.tell(null));
    // While rows are replaced, the focus stays where it was for its reader.
    this.body.addEventListener("focusin", ({ target }) => { if (!this.painting) this.tell(target.closest("tr")); });
    this.body.addEventListener("focusout", () => { if (!this.painting) this.tell(null); });
    this.view.addEventListener("keydown", (event) => event.key === "Escape" && this.tell(null));
  }

  tell(row) {
    const text = row?.querySelector(".cause > span");
    const cut = Boolean(text) && text.scrollHeight > text.clientHeight + 1;
    this.told = cut ? row.dataset.job : null;
    this.tip.hidden = !cut;
    if (!cut) return;
    say(this.tip, text.textContent);
    const [box, here] = [row.getBoundingClientRect(), this.view.getBoundingClientRect()];
    const right = Math.min(text.getBoundingClientRect().right, here.right) - here.left;
    const above = box.bottom - here.top + this.tip.offsetHeight + 4 > here.height;
    this.tip.style.left = `${Math.max(right - this.tip.offsetWidth, 4)}px`;
    this.tip.style.top = `${above ? box.top - here.top - this.tip.offsetHeight - 2 : box.bottom - here.top + 2}px`;
  }

  /** Show it again: its row may have moved, or be another element now. */
  tellAgain() {
    if (this.told) this.tell([...this.body.children].find((row) => row.dataset.job === this.told));
  }

  choose(which) {
    this.which = which;
    this.rows = [];
    this.pages = [];
    this.next = null;
    this.complete = false;
    this.view.scrollTop = 0;
    this.loading = null;
    return this.more();
  }

  query(after) {
    const filter = { active: "active=true&", all: "", ended: "active=false&" }[this.which] ?? `state=${this.which}&`;
    return `/v1/jobs?${filter}limit=${PAGE}${after ? `&after=${encodeURIComponent(after)}` : ""}`;
  }

  /** Numbers by state, for the length of the whole list. */
  count(states) {
    this.states = states;
    const ended = ["succeeded", "failed", "cancelled"];
    const sum = (wanted) => Object.entries(states ?? {}).reduce((total, [state, count]) => total + (wanted(state) ? count : 0), 0);
    const chosen = sum({ active: (state) => !ended.includes(state), all: () => true, ended: (state) => ended.includes(state) }[this.which] ?? ((state) => state === this.which));
    // Once all rows were read their number is known, whatever was counted a moment before or after.
    this.total = this.complete ? this.rows.length : Math.max(chosen, this.rows.length);
    if (states) say(this.hint, `${chosen.toLocaleString()} of ${sum(() => true).toLocaleString()}`);
    this.note.hidden = this.total > 0;
    this.view.hidden = this.total === 0;
    this.paint(true);
  }

  /** The next page; calls during a request share that request. */
  more() {
    if (this.complete) return Promise.resolve();
    this.loading ??= this.load().finally(() => { this.loading = null; });
    return this.loading;
  }

  async load() {
    const which = this.which;
    const after = this.next;
    let page;
    try {
      page = await getJobs(this.query(after));
    } catch (error) {
      if (error.status === 404 && after !== null) return this.restart();
      throw error;
    }
    // Meanwhile another list may have been chosen, or this one begun anew.
    if (which !== this.which || after !== this.next) return;
    this.pages.push({ after: this.next, start: this.rows.length, length: page.jobs.length, at: performance.now() });
    this.rows.push(...page.jobs);
    this.next = page.next;
    this.complete = page.next === null;
    setTimeout(() => this.count(this.states));
  }

  pagesInSight() {
    const [first, last] = this.inSight();
    return [...this.pages.entries()].filter(([, one]) => one.start < last && one.start + one.length >= first);
  }

  /** Read the pages in sight anew; rows keep their places. */
  async refresh() {
    if (!this.pages.length) return this.more();
    const which = this.which;
    for (const [index, page] of this.pagesInSight()) {
      let found;
      try {
        found = await getJobs(this.query(page.after));
      } catch (error) {
        // The job after which the page begins was forgotten.
        if (error.status === 404) return this.restart();
        throw error;
      }
      if (which !== this.which || this.pages[index] !== page) return;
      const following = this.pages[index + 1];
      if (following && found.next !== following.after) return this.restart();
      if (following && found.jobs.length !== page.length) return this.restart();
      this.rows.splice(page.start, page.length, ...found.jobs);
      page.length = found.jobs.length;
      page.at = performance.now();
      if (!following) {
        this.next = found.next;
        this.complete = found.next === null;
      }
    }
    this.count(this.states);
  }

  /** Jobs came into or fell out of the filter: the pages read so far no longer fit together. */
  async restart() {
    const wanted = this.inSight()[1];
    const which = this.which;
    const [rows, pages] = [[], []];
    let next = null;
    do {
      const found = await getJobs(this.query(next));
      if (which !== this.which) return;
      pages.push({ after: next, start: rows.length, length: found.jobs.length, at: performance.now() });
      rows.push(...found.jobs);
      next = found.next;
    } while (next !== null && rows.length < wanted);
    Object.assign(this, { rows, pages, next, complete: next === null });
    this.count(this.states);
  }

  inSight() {
    const first = Math.max(0, Math.floor(this.view.scrollTop / ROW) - SPARE);
    return [first, first + Math.ceil((this.view.clientHeight || 560) / ROW) + 2 * SPARE];
  }

  soon() {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      this.paint();
    });
  }

  paint(always = false) {
    const total = this.total ?? 0;
    const [first, end] = this.inSight();
    if (!always && this.painted === first) return this.tellAgain();
    this.painted = first;
    const last = Math.min(end, total);
    const focused = this.body.contains(document.activeElement) ? document.activeElement.textContent : null;
    const now = serverNow();
    const rows = [];
    for (let index = first; index < last; index += 1) rows.push(this.row(this.rows[index], index, now));
    const gap = (count) => count > 0 && el("tr", { class: "gap", "aria-hidden": "true" }, el("td", { colspan: String(COLUMNS.length), vars: { height: `${count * ROW}px` } }));
    this.painting = true;
    fill(this.body, gap(first), rows, gap(total - last));
    this.table.setAttribute("aria-rowcount", String(total + 1));
    if (focused) [...this.body.querySelectorAll("a")].find((link) => link.textContent === focused)?.focus({ preventScroll: true });
    this.painting = false;
    this.tellAgain();
    if (last > this.rows.length && !this.complete) quietly(this.more());
    // Rows that come back into sight may be old.
    else if (!always && !this.renewing && this.pagesInSight().some(([, page]) => performance.now() - page.at > OLD_MS)) {
      this.renewing = quietly(this.refresh()).finally(() => { this.renewing = null; });
    }
  }

  row(job, index, now) {
    if (!job) return el("tr", { "aria-rowindex": String(index + 2) }, el("td", { colspan: String(COLUMNS.length), class: "muted" }, "…"));
    // Reported before the job got its present GPUs.
    const told = (text) => (job.outdated && text !== NONE ? el("td", { class: "right muted", title: "Told before it was given its present GPUs" }, `~ ${text}`, el("span", { class: "sr-only" }, ", told before it was given its present GPUs")) : el("td", { class: "right" }, text));
    return el("tr", { "aria-rowindex": String(index + 2), "data-job": job.id },
      el("th", { scope: "row" }, el("a", { href: jobPage(job.id) }, job.id)),
      el("td", {}, stateBadge(job.state)),
      el("td", { class: "num" }, job.ended_at === null ? `${job.gpus} of ${range(job.min_gpus, job.max_gpus)}` : NONE),
      told(number(job.batch_size)),
      told(number(job.goodput)),
      told(percent(job.efficiency)),
      el("td", {}, progress(job.progress)),
      el("td", { class: "right" }, typeof job.fairness === "number" ? job.fairness.toFixed(2) : NONE),
      el("td", { class: "num" }, job.ended_at !== null ? `ended ${moment(job.ended_at)}` : eta(job.eta, now)),
      el("td", { class: "cause" }, el("span", {}, linked(job.why.text, job.why.jobs, job.id))));
  }
}

/** A share as a bar and a number. */
export function progress(share) {
  if (share === null || share === undefined) return NONE;
  return el("span", { class: "mini" }, el("span", { class: "bar", "aria-hidden": "true" }, el("span", { vars: { width: `${100 * share}%` } })), el("span", { class: "number" }, partOf(share)));
}

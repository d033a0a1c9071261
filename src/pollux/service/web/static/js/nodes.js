// Nodes × GPUs now. Only the nodes in sight are in the document, so that a thousand of them scroll as ten do.

import { jobPage } from "./api.js";
import { colourVar } from "./colours.js";
import { el, fill, say } from "./dom.js";
import { gpus } from "./format.js";

const CELL = 20;
const ROW_CELLS = 8;
const MOST_CELLS = 64;
const LEAST_WIDTH = ROW_CELLS * CELL + 30;
const SPARE_ROWS = 2;

export class Nodes {
  constructor(place, hint) {
    Object.assign(this, { place, hint, all: [], shown: [], find: "" });
    this.inner = el("div", { class: "nodes-inner", role: "list" });
    this.tip = el("div", { class: "tip", hidden: true, "aria-hidden": "true" });
    fill(place, this.inner, this.tip);
    place.addEventListener("scroll", () => this.soon(), { passive: true });
    new ResizeObserver(() => this.layout()).observe(place);
    for (const name of ["mouseover", "focusin"]) this.inner.addEventListener(name, (event) => this.point(event));
    for (const name of ["mouseout", "focusout"]) this.inner.addEventListener(name, () => { this.tip.hidden = true; });
  }

  update(nodes) {
    const same = this.all.length === nodes.length && this.shown.length > 0;
    this.all = nodes;
    if (!same || this.find) return this.filter(this.find);
    // Only what is in sight must be drawn.
    this.shown = nodes;
    this.from = -1;
    this.paint();
  }

  /** Show only nodes whose name, type or jobs contain the text. */
  filter(text) {
    this.find = text.trim().toLowerCase();
    const holds = (node) => node.id.toLowerCase().includes(this.find) || node.gpu_type.toLowerCase().includes(this.find)
      || Object.keys(node.jobs).some((id) => id.includes(this.find));
    this.shown = this.find ? this.all.filter(holds) : this.all;
    const total = this.all.reduce((sum, node) => sum + node.gpus, 0);
    const part = this.find ? `${this.shown.length} of ${this.all.length} nodes` : `${this.all.length} node${this.all.length === 1 ? "" : "s"}, ${gpus(total)}`;
    say(this.hint, this.all.length ? part : "No nodes yet.");
    this.layout();
  }

  layout() {
    const most = Math.min(this.shown.reduce((found, node) => Math.max(found, node.gpus), 1), MOST_CELLS);
    const lines = most > MOST_CELLS / 2 ? 1 : Math.ceil(most / ROW_CELLS);
    const width = this.place.clientWidth - 36;
    this.columns = Math.max(1, Math.floor(width / LEAST_WIDTH));
    if (this.shown.length < this.columns) this.columns = Math.max(1, Math.min(this.columns, this.shown.length));
    this.cardWidth = Math.min(Math.floor(width / this.columns), LEAST_WIDTH + 40);
    this.cardHeight = 50 + lines * CELL;
    this.lines = lines;
    const rows = Math.ceil(this.shown.length / this.columns);
    this.inner.style.height = `${rows * this.cardHeight}px`;
    this.place.classList.toggle("short", rows * this.cardHeight < 330);
    this.painted = "";
    this.from = -1;
    this.paint();
  }

  soon() {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      this.paint();
    });
  }

  paint() {
    const first = Math.max(0, Math.floor(this.place.scrollTop / this.cardHeight) - SPARE_ROWS);
    const rows = Math.ceil(Math.min(this.place.clientHeight || 330, 900) / this.cardHeight) + 2 * SPARE_ROWS;
    if (first === this.from) return;
    this.from = first;
    const begin = first * this.columns;
    const end = Math.min(begin + rows * this.columns, this.shown.length);
    const seen = JSON.stringify([begin, this.shown.slice(begin, end)]);
    if (seen === this.painted) return;
    this.painted = seen;
    const focused = document.activeElement?.dataset?.at;
    const cards = [];
    for (let index = begin; index < end; index += 1) cards.push(this.card(this.shown[index], index));
    fill(this.inner, cards);
    if (focused) this.inner.querySelector(`[data-at="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
  }

  card(node, index) {
    const jobs = Object.entries(node.jobs);
    const free = Math.max(node.gpus - node.used, 0);
    const wide = node.gpus > MOST_CELLS || (this.lines === 1 && node.gpus > ROW_CELLS);
    const cells = (count) => wide
      ? el("span", { class: "wide", vars: { width: `${(ROW_CELLS * CELL * count) / node.gpus - 3}px` } })
      : Array.from({ length: count }, () => el("s"));
    const out = node.schedulable ? "" : node.set_aside ? `, set aside: ${node.set_aside}` : ", takes no jobs now";
    const top = Math.floor(index / this.columns) * this.cardHeight;
    return el("div", {
      class: node.schedulable ? "node" : "node out", role: "listitem",
      vars: { left: `${(index % this.columns) * this.cardWidth}px`, top: `${top}px`, width: `${this.cardWidth}px`, height: `${this.cardHeight}px` },
    },
      el("div", { class: "node-card" },
        el("div", { class: "name" }, el("b", { title: `${node.id}, ${node.gpu_type}${out}` }, node.id, el("span", { class: "sr-only" }, `, ${node.gpu_type}${out}`)),
          el("span", {}, `${node.used} / ${node.gpus}`, el("span", { class: "sr-only" }, " GPUs in use"))),
        el("div", { class: "gpus" },
        jobs.map(([id, count]) => el("a", {
          href: jobPage(id), "aria-label": `${id} holds ${gpus(count)} of ${node.id}`, "data-at": `${node.id} ${id}`,
          "data-tip": `${id}\n${gpus(count)} on ${node.id} (${node.gpu_type})`, vars: { "--colour": colourVar(id) },
        }, cells(count))),
        free > 0 && el("i", { "data-tip": `${gpus(free)} free on ${node.id} (${node.gpu_type})${out}` }, cells(free), el("span", { class: "sr-only" }, `${free} free`)))));
  }

  point(event) {
    const target = event.target.closest("[data-tip]");
    if (!target) return;
    this.tip.textContent = target.dataset.tip;
    this.tip.hidden = false;
    const box = target.getBoundingClientRect();
    const here = this.place.getBoundingClientRect();
    const width = this.tip.offsetWidth;
    const left = Math.min(box.left - here.left, this.place.clientWidth - width - 8);
    const above = box.top - here.top > this.tip.offsetHeight + 8;
    const top = above ? box.top - here.top - this.tip.offsetHeight - 6 : box.bottom - here.top + 6;
    this.tip.style.left = `${Math.max(left, 4)}px`;
    this.tip.style.top = `${top + this.place.scrollTop}px`;
  }
}

// GPUs by job over time, stacked, on a canvas: zoom and pan by pointer, keys and buttons.

import { jobPage } from "./api.js";
import { colourVar, introduce, themeColour, colourIndex } from "./colours.js";
import { el, fill } from "./dom.js";
import { duration, gpus, gpuTime, moment, tick } from "./format.js";
import { quietly } from "./live.js";
import { showTable, table } from "./table.js";

const LEFT = 44;
const BOTTOM = 24;
const TOP = 8;
const COLUMN = 2;
const MOST_EDGES = 500;
const SPANS = [["15 min", 900], ["1 h", 3600], ["6 h", 21600], ["24 h", 86400]];
const LEAST_SPAN = 30;
const LEGEND_JOBS = 12;

export class Timeline {
  /** `load(since, until)` requests the data of a span; `now()` is the service's clock. */
  constructor(place, tools, hint, { load, now }) {
    Object.assign(this, { place, hint, load, now, span: 3600, end: null, data: null, first: null, fits: false });
    this.canvas = el("canvas", { tabindex: "0", role: "img", "aria-label": "GPUs by job over time", "aria-describedby": "timeline-keys" });
    this.tip = el("div", { class: "tip", hidden: true, "aria-hidden": "true" });
    this.legend = el("div", { class: "legend", id: "timeline-legend" });
    this.details = el("details", { class: "as-table", on: { toggle: () => this.fillTable() } }, el("summary", {}, "Numbers"));
    fill(place, el("div", { class: "timeline" }, this.canvas, this.tip), this.legend,
      el("p", { class: "sr-only", id: "timeline-keys" }, "Arrow keys move in time, plus and minus zoom, Home goes to now, 0 back to the first view."), this.details);
    this.tools(tools);
    this.listen();
    new ResizeObserver(() => this.draw()).observe(this.canvas);
    addEventListener("pollux-theme", () => this.draw());
  }

  tools(place) {
    const button = (text, label, run) => el("button", { class: "button tiny", type: "button", "aria-label": label, title: label, on: { click: run } }, text);
    this.spans = SPANS.map(([text, seconds]) => el("button", { class: "button tiny", type: "button", "aria-pressed": "false", "data-span": String(seconds), on: { click: () => this.choose(seconds) } }, text));
    fill(place, this.spans, button("←", "Earlier", () => this.pan(-0.4)), button("→", "Later", () => this.pan(0.4)),
      button("+", "Zoom in", () => this.zoom(0.5)), button("−", "Zoom out", () => this.zoom(2)), button("Now", "Back to now", () => this.choose(this.span)));
  }

  /** An interval that lasted until the data was read goes on until now. */
  stop(at) { return this.end === null && at >= this.data.until - 0.2 ? this.until : at; }

  get until() { return this.end ?? this.now(); }
  get since() { return this.until - this.span; }

  choose(seconds) {
    this.end = null;
    this.fits = false;
    this.span = seconds;
    this.moved();
  }

  /** The span in which jobs ran, at most a day; it grows with running jobs until another span is chosen. */
  fit() {
    this.end = null;
    this.fits = true;
    this.moved();
  }

  fitting() {
    const wanted = Math.max((this.now() - this.first) * 1.1, LEAST_SPAN);
    return SPANS.map(([, seconds]) => seconds).find((seconds) => wanted > 600 && seconds >= 0.9 * wanted) ?? Math.min(wanted, 86400);
  }

  pan(share) {
    const to = this.until + share * this.span;
    this.end = to >= this.now() ? null : to;
    this.fits = false;
    this.moved();
  }

  zoom(factor, around = null) {
    const span = Math.min(Math.max(this.span * factor, LEAST_SPAN), 31 * 86400);
    const middle = around ?? (this.end === null ? this.until : this.until - this.span / 2);
    const share = (this.until - middle) / this.span;
    const end = middle + share * span;
    this.span = span;
    this.end = end >= this.now() ? null : end;
    this.fits = false;
    this.moved();
  }

  async begin() {
    this.span = 86400;
    await this.refresh();
    this.first = Math.min(...this.data.jobs.map((job) => job.intervals[0]?.[0] ?? this.until), this.until);
    this.fit();
  }

  moved() {
    this.draw();
    clearTimeout(this.timer);
    this.timer = setTimeout(() => quietly(this.refresh()), 200);
  }

  async refresh() {
    const margin = 0.05 * this.span;
    const [since, until] = [Math.max(this.since - margin, 0), this.until + margin];
    this.asked = (this.asked ?? 0) + 1;
    const asked = this.asked;
    const data = await this.load(since, Math.min(until, this.now()));
    // The reader looks at the span of a later request now.
    if (asked !== this.asked && this.data) return;
    this.data = data;
    introduce(this.data.jobs.map((job) => job.id).filter((id) => id !== null));
    this.draw();
    this.fillLegend();
    this.fillTable();
  }

  listen() {
    const { canvas } = this;
    canvas.addEventListener("keydown", (event) => {
      const run = { ArrowLeft: () => this.pan(-0.2), ArrowRight: () => this.pan(0.2), "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2), Home: () => this.choose(this.span), 0: () => this.fit() }[event.key];
      if (!run) return;
      event.preventDefault();
      run();
    });
    canvas.addEventListener("wheel", (event) => {
      // A plain wheel scrolls the page, as everywhere else.
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      this.zoom(event.deltaY > 0 ? 1.25 : 0.8, this.timeAt(event.offsetX));
    }, { passive: false });
    let from = null;
    canvas.addEventListener("pointerdown", (event) => {
      from = { x: event.offsetX, end: this.until, moved: false };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!from) return this.point(event);
      const dx = event.offsetX - from.x;
      if (Math.abs(dx) < 4 && !from.moved) return;
      from.moved = true;
      canvas.classList.add("dragging");
      this.tip.hidden = true;
      const end = from.end - (dx / this.plotWidth) * this.span;
      this.end = end >= this.now() ? null : end;
      this.fits = false;
      this.moved();
    });
    canvas.addEventListener("pointerup", (event) => {
      const hit = from && !from.moved ? this.hit(event.offsetX, event.offsetY) : null;
      from = null;
      canvas.classList.remove("dragging");
      if (hit?.id) location.assign(jobPage(hit.id));
    });
    canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; });
    canvas.addEventListener("pointercancel", () => {
      from = null;
      canvas.classList.remove("dragging");
    });
    canvas.addEventListener("dblclick", () => this.fit());
  }

  get plotWidth() { return Math.max(this.canvas.clientWidth - LEFT - 4, 10); }
  timeAt(x) { return this.since + ((x - LEFT) / this.plotWidth) * this.span; }

  draw() {
    if (this.fits) this.span = this.fitting();
    for (const button of this.spans) button.setAttribute("aria-pressed", String(this.end === null && Number(button.dataset.span) === this.span));
    const { canvas } = this;
    const [width, height] = [canvas.clientWidth, canvas.clientHeight];
    if (!width) return;
    const scale = devicePixelRatio || 1;
    if (canvas.width !== Math.round(width * scale)) canvas.width = Math.round(width * scale);
    if (canvas.height !== Math.round(height * scale)) canvas.height = Math.round(height * scale);
    const ctx = canvas.getContext("2d");
    ctx.setTransform(scale, 0, 0, scale, 0, 0);
    ctx.clearRect(0, 0, width, height);
    this.plotHeight = height - TOP - BOTTOM;
    this.stack();
    this.axes(ctx, width, height);
    if (!this.data) return;
    this.areas(ctx);
    this.capacity(ctx);
  }

  /** Where one column ends and the next begins: at every change if there are few, else every two pixels. */
  edges() {
    const [since, until] = [this.since, this.until];
    const changes = new Set([since, until]);
    for (const job of this.data?.jobs ?? []) {
      for (const [start, stop] of job.intervals) {
        for (const at of [start, this.stop(stop)]) if (at > since && at < until) changes.add(at);
      }
      if (changes.size > MOST_EDGES) break;
    }
    if (changes.size <= MOST_EDGES) return Float64Array.from(changes).sort();
    const columns = Math.ceil(this.plotWidth / COLUMN);
    return Float64Array.from({ length: columns + 1 }, (_, index) => since + (this.span * index) / columns);
  }

  /** Mean GPUs of each job in each column, stacked from the bottom. */
  stack() {
    this.cuts = this.edges();
    const columns = this.cuts.length - 1;
    const total = new Float32Array(columns);
    this.layers = [];
    for (const job of this.data?.jobs ?? []) {
      const held = new Float32Array(columns);
      for (const [start, stop, count] of job.intervals) spread(held, this.cuts, start, this.stop(stop), count);
      const bottom = total.slice();
      for (let index = 0; index < columns; index += 1) total[index] += held[index];
      this.layers.push({ job, held, bottom });
    }
    let most = 1;
    for (const value of total) most = Math.max(most, value);
    for (const [, count] of this.data?.capacity ?? []) most = Math.max(most, count);
    this.most = most * 1.05;
    this.columns = columns;
  }

  y(count) { return TOP + this.plotHeight * (1 - count / this.most); }
  x(at) { return LEFT + ((at - this.since) / this.span) * this.plotWidth; }

  areas(ctx) {
    ctx.save();
    ctx.beginPath();
    ctx.rect(LEFT, TOP, this.plotWidth, this.plotHeight);
    ctx.clip();
    const gap = this.most < 120 ? 1 : 0;
    for (const { job, held, bottom } of this.layers) {
      ctx.fillStyle = job.id === null ? themeColour("--other") : themeColour(`--c${colourIndex(job.id)}`);
      let start = 0;
      for (let index = 1; index <= this.columns; index += 1) {
        if (index < this.columns && held[index] === held[start] && bottom[index] === bottom[start]) continue;
        if (held[start] > 0) {
          const high = this.y(bottom[start] + held[start]);
          const low = this.y(bottom[start]);
          // Whole pixels: neighbours of one job show no seam.
          const [left, right] = [snap(this.x(this.cuts[start])), snap(this.x(this.cuts[index]))];
          ctx.fillRect(left, high, right - left, Math.max(low - high - gap, 0.5));
        }
        start = index;
      }
    }
    ctx.restore();
  }

  capacity(ctx) {
    const steps = this.data.capacity;
    if (!steps?.length) return;
    ctx.save();
    ctx.beginPath();
    ctx.rect(LEFT, 0, this.plotWidth, TOP + this.plotHeight + 1);
    ctx.clip();
    ctx.strokeStyle = themeColour("--text");
    ctx.lineWidth = 1.5;
    ctx.setLineDash([5, 4]);
    ctx.beginPath();
    steps.forEach(([at, count], index) => {
      const from = Math.max(this.x(at), LEFT - 5);
      const to = index + 1 < steps.length ? this.x(steps[index + 1][0]) : this.x(this.until);
      if (index === 0) ctx.moveTo(from, this.y(count));
      else ctx.lineTo(from, this.y(count));
      ctx.lineTo(to, this.y(count));
    });
    ctx.stroke();
    ctx.restore();
  }

  axes(ctx, width, height) {
    ctx.font = "11px system-ui, sans-serif";
    ctx.fillStyle = themeColour("--muted");
    ctx.strokeStyle = themeColour("--line");
    ctx.lineWidth = 1;
    ctx.textAlign = "right";
    ctx.textBaseline = "middle";
    const step = nice(this.most / 4);
    for (let value = 0; value <= this.most; value += step) {
      const y = Math.round(this.y(value)) + 0.5;
      ctx.beginPath();
      ctx.moveTo(LEFT, y);
      ctx.lineTo(width, y);
      ctx.stroke();
      ctx.fillText(String(value), LEFT - 8, y);
    }
    ctx.textAlign = "center";
    ctx.textBaseline = "top";
    const every = timeStep(this.span / Math.max(this.plotWidth / 90, 2));
    const zone = new Date(this.until * 1000).getTimezoneOffset() * 60;
    for (let at = Math.ceil((this.since - zone) / every) * every + zone; at <= this.until; at += every) {
      const x = this.x(at);
      if (x > LEFT + 18 && x < width - 24) ctx.fillText(tick(at, every < 60), x, height - BOTTOM + 7);
    }
  }

  hit(x, y) {
    if (x < LEFT || !this.layers) return null;
    const index = Math.min(below(this.cuts, this.timeAt(x)), this.columns - 1);
    const count = this.most * (1 - (y - TOP) / this.plotHeight);
    const found = this.layers.find(({ held, bottom }) => count >= bottom[index] && count < bottom[index] + held[index]);
    return found ? { id: found.job.id, name: found.job.id ?? "other jobs", gpus: found.held[index], at: this.timeAt(x) } : null;
  }

  point(event) {
    const hit = this.hit(event.offsetX, event.offsetY);
    this.canvas.classList.toggle("over", Boolean(hit));
    if (!hit) {
      this.tip.hidden = true;
      return;
    }
    const held = Number.isInteger(hit.gpus) ? gpus(hit.gpus) : `${hit.gpus.toFixed(1)} GPUs on average`;
    const change = this.data.reallocations?.find((one) => one.job === hit.id && Math.abs(this.x(one.at) - event.offsetX) < 7);
    this.tip.textContent = `${hit.name}\n${moment(hit.at, this.span < 7200)}: ${held}${change ? `\n${change.from}→${change.to}: ${change.reason ?? ""}` : ""}`;
    this.tip.hidden = false;
    const width = this.tip.offsetWidth;
    this.tip.style.left = `${event.offsetX + width + 20 > this.canvas.clientWidth ? event.offsetX - width - 12 : event.offsetX + 14}px`;
    this.tip.style.top = `${Math.max(event.offsetY - 12, 0)}px`;
  }

  usage() {
    const found = (this.data?.jobs ?? []).map((job) => {
      const seconds = job.intervals.reduce((sum, [start, stop, count]) => sum + Math.max(Math.min(this.stop(stop), this.until) - Math.max(start, this.since), 0) * count, 0);
      return { job, seconds };
    });
    return found.filter((one) => one.seconds > 0).sort((a, b) => b.seconds - a.seconds);
  }

  fillLegend() {
    const used = this.usage();
    const total = used.reduce((sum, one) => sum + one.seconds, 0);
    this.hint.textContent = used.length ? `${gpuTime(total)} in ${duration(this.span)}` : "Nothing ran in this time.";
    const key = (job) => el("span", { class: "key", vars: { "--colour": colourVar(job.id) } });
    const shown = used.slice(0, LEGEND_JOBS).map(({ job }) => job.id === null ? el("span", {}, key(job), "other jobs") : el("a", { href: jobPage(job.id) }, key(job), job.id ?? "other jobs"));
    fill(this.legend, shown, used.length > LEGEND_JOBS && el("span", {}, `and ${used.length - LEGEND_JOBS} more`));
    this.canvas.setAttribute("aria-label", `GPUs by job over time, ${moment(this.since)} to ${moment(this.until)}. ${used.slice(0, 5).map(({ job, seconds }) => `${job.id ?? "other jobs"} ${gpuTime(seconds)}`).join(", ")}.`);
  }

  fillTable() {
    if (!this.details.open) return;
    const rows = this.usage().slice(0, 100).map(({ job, seconds }) => [job.id === null ? "other jobs" : el("a", { href: jobPage(job.id) }, job.id), gpuTime(seconds), (seconds / this.span).toFixed(1)]);
    const found = table("GPU-time of jobs in the time shown", [{ name: "Job" }, { name: "GPU-time", class: "right", about: "GPU-time in view" }, { name: "GPUs on average", class: "right", about: "GPUs on average" }], rows);
    if (!this.region) {
      this.region = el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "GPU-time by job" });
      this.details.append(this.region);
    }
    showTable(this.region, found);
  }
}

/** The last edge at or before a time, as an index. */
function below(edges, at) {
  let [low, high] = [0, edges.length - 1];
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (edges[middle] <= at) low = middle;
    else high = middle - 1;
  }
  return low;
}

/** Add `count` between two times to the columns between the edges; parts of a column count in proportion. */
function spread(held, edges, from, to, count) {
  for (let index = below(edges, from); index < held.length && edges[index] < to; index += 1) {
    const part = Math.min(to, edges[index + 1]) - Math.max(from, edges[index]);
    if (part > 0) held[index] += (count * part) / (edges[index + 1] - edges[index]);
  }
}

const snap = (x) => Math.round(x * devicePixelRatio) / devicePixelRatio;

function nice(value) {
  const size = 10 ** Math.floor(Math.log10(Math.max(value, 1)));
  return Math.max(1, [1, 2, 5, 10].map((one) => one * size).find((one) => one >= value) ?? 10 * size);
}

function timeStep(least) {
  return [5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800].find((one) => one >= least) ?? 604800;
}

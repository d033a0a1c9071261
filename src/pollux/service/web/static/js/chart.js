// Line charts: uPlot in the page's colours, with marks, a text for screen readers and the numbers as a table.

import { themeColour } from "./colours.js";
import { el, fill, say } from "./dom.js";
import { moment, NONE, number, tick } from "./format.js";
import { info } from "./shell.js";
import { table } from "./table.js";
import uPlot from "../vendor/uplot/uPlot.js";

const HEIGHT = 178;
const TABLE_ROWS = 60;
const WHOLE = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000];
const charts = new Set();
addEventListener("pollux-theme", () => charts.forEach((chart) => chart.redraw()));

const sync = uPlot.sync("time");

/** Whether only a part of the axis is shown; charts over time are zoomed together, so they share one. */
class Zoom {
  on = false;
  tell = () => {};

  set(on) {
    if (on === this.on) return;
    this.on = on;
    this.tell(on);
  }
}
const timeZoom = new Zoom();

/** Call `tell(zoomed)` when charts over time are zoomed, and when that ends. */
export function onTimeZoom(tell) {
  timeZoom.tell = tell;
}

/** Show the whole time again in all of them. */
export function wholeTime() {
  timeZoom.set(false);
  for (const chart of charts) if (chart.zoom === timeZoom) chart.plot?.setData(chart.data, true);
}

/**
 * A chart in a figure. `series`: [{label, colour, dash, step, points, band: [low, high]}]; `x`: "time" or "count".
 * `update(xs, columns, marks)`: marks are [{at, text}], drawn as dashed lines and named when pointed at.
 */
export class Chart {
  constructor({ title, about, series, x = "time", format = number, xLabel = "", log = false, waiting = "Nothing reported yet.", xFormat = null, height = HEIGHT, zero = false, whole = false, wholeX = false, share = false, latest = null }) {
    Object.assign(this, { title, series, x, format, xLabel, log, waiting, height, zero, whole, wholeX, share, latestText: latest });
    this.xFormat = xFormat ?? (x === "time" ? (value) => moment(value, true) : number);
    this.zoom = x === "time" ? timeZoom : new Zoom();
    this.marks = [];
    this.latest = el("span", { class: "latest" });
    this.place = el("div", { class: "plot waiting", role: "img", "aria-label": `${title}: ${waiting}` }, waiting);
    this.details = el("details", { on: { toggle: () => this.fillTable() } }, el("summary", {}, "Numbers"));
    const named = series.length > 1 ? series.filter((one) => one.label && !one.quiet) : [];
    const legend = el("div", { class: "legend" }, named.map((one) =>
      el("span", {}, el("span", { class: `key line${one.dash ? " dashed" : ""}`, vars: { "--colour": `var(${one.colour})` } }), one.label)));
    this.element = el("figure", { class: "chart" }, el("figcaption", {}, title, info(about ?? title), this.latest), legend, this.place, this.details);
    this.watch = new ResizeObserver(() => this.resize());
    this.watch.observe(this.place);
    charts.add(this);
  }

  update(xs, columns, marks = []) {
    this.data = [xs, ...columns];
    this.marks = marks;
    const any = columns.some((column) => column.some((value) => value !== null));
    if (!any) return;
    if (!this.plot) this.draw();
    else {
      this.plot.setData(this.data, !this.zoom.on);
      if (this.zoom.on) this.plot.redraw();
    }
    this.describe();
    if (this.details.open) this.fillTable();
  }

  describe() {
    const parts = this.series.map((one, index) => {
      const values = this.data[index + 1].filter((value) => value !== null);
      if (!values.length || one.quiet) return null;
      const last = values[values.length - 1];
      let least = Infinity;
      let most = -Infinity;
      for (const value of values) {
        least = Math.min(least, value);
        most = Math.max(most, value);
      }
      return { label: one.label, last: this.format(last), text: `${one.label || this.title} now ${this.format(last)}, between ${this.format(least)} and ${this.format(most)}` };
    }).filter(Boolean);
    say(this.latest, this.latestText?.(this.data) ?? (parts.map((part) => part.last).join(" · ") || NONE));
    this.place.setAttribute("aria-label", `${this.title}. ${parts.map((part) => part.text).join("; ")}.`);
  }

  draw() {
    fill(this.place);
    this.place.classList.remove("waiting");
    const muted = themeColour("--muted");
    const axis = { stroke: muted, grid: { stroke: themeColour("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif", labelFont: "11px system-ui, sans-serif" };
    this.tip = el("div", { class: "tip", hidden: true, "aria-hidden": "true" });
    const options = {
      width: Math.max(this.place.clientWidth, 200),
      height: this.height,
      legend: { show: false },
      padding: [8, 10, 0, 0],
      scales: { x: { time: this.x === "time" }, y: { distr: this.log ? 3 : 1, log: 2, range: this.log ? undefined : this.share ? shareSpan : this.zero ? zeroSpan : ySpan } },
      axes: [
        { ...axis, space: 70, size: 28, label: this.xLabel || undefined, labelSize: this.xLabel ? 17 : 0, labelGap: 0, incrs: this.wholeX ? WHOLE : undefined, values: this.x === "time" ? clockTicks : (_, ticks) => ticks.map(number) },
        { ...axis, size: 52, space: 32, incrs: this.whole ? WHOLE : undefined, values: (_, ticks) => ticks.map((value) => (value === null ? "" : this.format(value))) },
      ],
      series: [{}, ...this.series.map((one) => this.line(one))],
      bands: this.series.flatMap((one, index) => one.band ? [{ series: [index + 2, index + 3], fill: faded(one.colour) }] : []),
      cursor: { points: { size: 6 }, drag: { x: true, y: false }, sync: this.x === "time" ? { key: sync.key, setSeries: false } : undefined, focus: { prox: 30 } },
      hooks: { setCursor: [() => this.point()], draw: [(plot) => this.drawMarks(plot)], setSelect: [(plot) => { if (plot.select.width > 0) this.zoom.set(true); }] },
    };
    this.plot = new uPlot(options, this.data, this.place);
    this.plot.over.addEventListener("dblclick", () => this.zoom.set(false));
    this.plot.over.addEventListener("mouseenter", () => { this.inside = true; });
    this.plot.over.addEventListener("mouseleave", () => { this.inside = false; this.tip.hidden = true; });
    this.plot.over.append(this.tip);
    for (const canvas of this.place.querySelectorAll("canvas")) canvas.setAttribute("aria-hidden", "true");
  }

  line(one) {
    const colour = one.colour ? themeColour(one.colour) : "transparent";
    return {
      label: one.label,
      stroke: one.quiet ? "transparent" : colour,
      width: one.quiet ? 0 : 1.8,
      dash: one.dash,
      spanGaps: true,
      paths: one.step ? uPlot.paths.stepped({ align: 1 }) : undefined,
      fill: one.fill ? faded(one.colour) : undefined,
      points: one.points ? { show: true, size: 7, fill: colour } : { show: one.dots ?? undefined, size: 4 },
    };
  }

  redraw() {
    if (!this.plot) return;
    const { min, max } = this.plot.scales.x;
    this.plot.destroy();
    this.plot = null;
    this.draw();
    if (this.zoom.on) this.plot.setScale("x", { min, max });
  }

  resize() {
    const width = Math.floor(this.place.clientWidth);
    if (this.plot && width > 0 && Math.abs(this.plot.width - width) > 1) this.plot.setSize({ width, height: this.height });
  }

  point() {
    const { idx, left } = this.plot.cursor;
    if (idx === null || idx === undefined || left < 0 || !this.inside) {
      this.tip.hidden = true;
      return;
    }
    const lines = [this.xFormat(this.data[0][idx])];
    this.series.forEach((one, index) => {
      const value = this.data[index + 1][idx];
      if (value !== null && value !== undefined && one.label) lines.push(`${one.label}: ${this.format(value)}`);
      else if (value !== null && value !== undefined && this.series.length === 1) lines.push(this.format(value));
    });
    const mark = this.marks.find((one) => Math.abs(this.plot.valToPos(one.at, "x") - left) < 6);
    if (mark) lines.push("", mark.text);
    this.tip.textContent = lines.join("\n");
    this.tip.hidden = false;
    const width = this.tip.offsetWidth;
    this.tip.style.left = `${left + width + 18 > this.plot.over.clientWidth ? Math.max(left - width - 12, 0) : left + 12}px`;
    this.tip.style.top = "4px";
  }

  drawMarks(plot) {
    if (!this.marks.length) return;
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    ctx.strokeStyle = themeColour("--muted");
    ctx.globalAlpha = 0.7;
    ctx.setLineDash([4, 4]);
    ctx.lineWidth = devicePixelRatio;
    ctx.beginPath();
    for (const mark of this.marks) {
      const x = Math.round(plot.valToPos(mark.at, "x", true)) + 0.5;
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
    }
    ctx.stroke();
    ctx.restore();
  }

  fillTable() {
    if (!this.details.open || !this.data) return;
    const [xs, ...columns] = this.data;
    const every = Math.max(1, Math.ceil(xs.length / TABLE_ROWS));
    const rows = [];
    for (let index = xs.length - 1; index >= 0; index -= every) {
      if (columns.every((column) => column[index] === null)) continue;
      rows.push([this.xFormat(xs[index]), ...columns.map((column) => this.format(column[index]))]);
    }
    const names = this.series.map((one) => ({ name: one.label || this.title, class: "right" }));
    const found = table(`${this.title}, newest first`, [{ name: this.x === "time" ? "Time" : this.xLabel || "x" }, ...names], rows);
    const part = every > 1 && el("p", { class: "hint part" }, `One in ${every} of ${xs.length.toLocaleString()} points, the newest first.`);
    fill(this.details, this.details.firstChild, part, el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `${this.title}, numbers` }, found));
  }
}

function ySpan(_, low, high) {
  if (low === null || high === null) return [0, 1];
  const least = low >= 0 ? 0 : low;
  if (low > 0 && high - low < 0.15 * high) return [low - 0.05 * high, high + 0.05 * high];
  return [least, high + 0.08 * (high - least || 1)];
}

function zeroSpan(_, low, high) {
  return [0, (high || 1) * 1.1];
}

function shareSpan(_, low, high) {
  return [0, Math.max(1, high ?? 1) * 1.04];
}

function clockTicks(_, ticks) {
  const span = ticks.length > 1 ? ticks[1] - ticks[0] : 60;
  return ticks.map((at) => tick(at, span < 60));
}

function faded(name) {
  // The theme's colours have six digits; two more are the opacity.
  return `${themeColour(name)}2e`;
}

// The charts of a job: every report over time, losses and the user's metrics by samples, and the speed-up curve.

import { get, jobPath } from "./api.js";
import { Chart, onTimeZoom, wholeTime } from "./chart.js";
import { byId, el, fill, say } from "./dom.js";
import { duration, number, percent, times } from "./format.js";

const MOST_ROWS = 4000;
const MOST_METRICS = 24;
const value = (field) => (row) => row.values[field] ?? null;
const perSecond = (found) => `${number(found)}/s`;

const OVER_TIME = [
  { title: "GPUs", series: [{ label: "", colour: "--c0", step: true, fill: true }], read: null, zero: true, whole: true },
  { title: "Total batch", series: [{ label: "total", colour: "--c0", step: true }, { label: "on one GPU", colour: "--c1", step: true }], read: [value("batch_size"), value("local_batch")], log: true },
  { title: "Accumulation", series: [{ label: "", colour: "--c2", step: true }], read: [value("accumulation")], zero: true, whole: true },
  { title: "Learning-rate factor", series: [{ label: "", colour: "--c3", step: true }], read: [value("learning_rate_factor")], format: times, zero: true },
  { title: "Throughput", about: "Goodput", series: [{ label: "throughput", colour: "--c7" }, { label: "goodput", colour: "--c2" }], read: [value("throughput"), value("goodput")], format: perSecond },
  { title: "Efficiency", series: [{ label: "", colour: "--c11" }], read: [value("efficiency")], format: percent, share: true },
  { title: "Progress", series: [{ label: "", colour: "--c5" }], read: [(row) => (row.values.total_progress ? row.values.progress / row.values.total_progress : null)], format: percent, share: true },
  {
    title: "Noise scale",
    series: [{ label: "noise scale", colour: "--c9", band: true }, { label: "upper end", colour: "--c9", quiet: true }, { label: "lower end", colour: "--c9", dash: [2, 4] }],
    latest: ([, scales]) => number(scales.findLast((found) => found !== null)),
    read: [(row) => row.values.noise?.scale ?? null, (row) => row.values.noise?.high ?? null, (row) => row.values.noise?.low ?? null],
  },
  { title: "Step time", series: [{ label: "measured", colour: "--c0" }, { label: "predicted", colour: "--c4", dash: [6, 4] }], read: [value("step_seconds"), value("predicted_step_seconds")], format: duration },
];

export class Series {
  constructor(id) {
    Object.assign(this, { id, rows: [], marks: [] });
    this.charts = OVER_TIME.map((one) => ({ ...one, chart: new Chart({ ...one, format: one.format ?? number }) }));
    fill(byId("charts"), this.charts.map((one) => one.chart.element));
    const whole = el("button", { class: "button tiny", type: "button", id: "series-whole", hidden: true, on: { click: wholeTime } }, "Whole time");
    fill(byId("series-tools"), whole);
    onTimeZoom((zoomed) => { whole.hidden = !zoomed; });
    this.loss = new Chart({ title: "Loss", series: [{ label: "", colour: "--c4" }], x: "count", xLabel: "samples" });
    this.metrics = new Map();
    fill(byId("learning"), this.loss.element);
    this.curve = new Chart({
      title: "Speed-up", x: "count", xLabel: "GPUs", wholeX: true, format: times, xFormat: (count) => `${count} GPU${count === 1 ? "" : "s"}`,
      series: [{ label: "predicted", colour: "--c0", dots: true }, { label: "now", colour: "--c4", points: true }],
      waiting: "Known once the job has measured a few steps.", zero: true,
      latest: ([ks, , now]) => ks.flatMap((k, index) => (now[index] === null ? [] : [`${times(now[index])} with ${k} GPU${k === 1 ? "" : "s"}`])).join("") || "holds none now",
    });
    this.best = new Chart({
      title: "Best batch", x: "count", xLabel: "GPUs", wholeX: true, xFormat: (count) => `${count} GPU${count === 1 ? "" : "s"}`,
      series: [{ label: "", colour: "--c1", dots: true }], zero: true, latest: () => "", waiting: "Known once the job has measured a few steps.",
    });
    fill(byId("speedup"), this.curve.element, this.best.element);
  }

  /** Read what is new. */
  async refresh() {
    const last = this.rows.length ? this.rows[this.rows.length - 1].at : 0;
    const [reports, decisions] = await Promise.all([
      get(`${jobPath(this.id)}/series?kind=report&since=${last}`), get(`${jobPath(this.id)}/series?kind=decision`)]);
    const fresh = reports.rows.filter((row) => row.at > last);
    this.rows.push(...fresh);
    if (this.rows.length > MOST_ROWS) this.rows = this.rows.filter((_, index) => index % 2 === 0 || index === this.rows.length - 1);
    const marks = decisions.rows.map((row) => ({ at: row.at, from: row.values.from, to: row.values.to, text: row.values.text || `${row.values.from}→${row.values.to} GPUs: ${row.values.reason}` }));
    this.marks = marks;
    if (this.rows.length + marks.length > 0) this.draw();
  }

  draw() {
    const [first, last] = this.span();
    // All have the same span; unknown values at its ends are a gap.
    const at = [first, ...this.rows.map((row) => row.at), last];
    for (const { chart, read } of this.charts) {
      if (read === null) this.drawGpus(chart, at);
      else chart.update(at, read.map((one) => [null, ...this.rows.map(one), null]), this.marks);
    }
    const samples = this.rows.map((row) => row.values.samples);
    this.bySamples(this.loss, samples, value("loss"));
    const names = this.names();
    this.tellLeftOut(names.length - MOST_METRICS);
    for (const name of names.slice(0, MOST_METRICS)) {
      if (!this.metrics.has(name)) {
        const chart = new Chart({ title: name, about: "Own metric", series: [{ label: "", colour: `--c${(this.metrics.size + 5) % 12}`, dots: true }], x: "count", xLabel: "samples" });
        this.metrics.set(name, chart);
        byId("learning").append(chart.element);
      }
      this.bySamples(this.metrics.get(name), samples, (row) => row.values.metrics?.[name] ?? null);
    }
  }

  span() {
    const all = [...this.marks.map((mark) => mark.at), ...this.rows.map((row) => row.at)];
    const [first, last] = [Math.min(...all), Math.max(...all)];
    return [first - 0.001, Math.max(last, this.until ?? last) + 0.001];
  }

  /** GPUs by the changes; before the first known change, by the reports, which come only now and then. */
  drawGpus(chart, at) {
    const since = this.marks.length ? this.marks[0].at : Infinity;
    const reported = this.rows.filter((row) => row.at < since).map((row) => [row.at, row.values.num_replicas]);
    const steps = [...reported, ...this.marks.map((mark) => [mark.at, mark.to])];
    const xs = [...new Set([...at, ...steps.map(([when]) => when)])].sort((a, b) => a - b);
    let [next, held] = [0, null];
    const gpus = xs.map((x) => {
      while (next < steps.length && steps[next][0] <= x) held = steps[next++][1];
      return held;
    });
    chart.update(xs, [gpus], this.marks);
  }

  names() {
    const found = new Set();
    for (const row of this.rows) for (const name of Object.keys(row.values.metrics ?? {})) found.add(name);
    return [...found].sort();
  }

  tellLeftOut(count) {
    const place = byId("metrics-left-out");
    place.hidden = count <= 0;
    if (count > 0) say(place, `${count.toLocaleString()} more metric${count === 1 ? " is" : "s are"} not drawn: the page has room for the first ${MOST_METRICS} by name.`);
  }

  /** A measurement against samples seen; work that a checkpoint undid is drawn over. */
  bySamples(chart, samples, read) {
    const points = [];
    this.rows.forEach((row, index) => {
      const found = read(row);
      if (found === null) return;
      while (points.length && points[points.length - 1][0] >= samples[index]) points.pop();
      points.push([samples[index], found]);
    });
    chart.update(points.map(([count]) => count), [points.map(([, found]) => found)]);
  }

  async refreshCurve() {
    const found = await get(`${jobPath(this.id)}/speedup`);
    const points = found.points ?? [];
    if (!points.length) return;
    const ks = points.map((point) => point.gpus);
    const now = found.current ?? 0;
    this.curve.update(ks, [points.map((point) => point.speedup), ks.map((k, index) => (k === now ? points[index].speedup : null))]);
    this.best.update(ks, [points.map((point) => point.batch_size)]);
  }
}

// Numbers, times and spans of time as people read them. Unknown values are an en dash everywhere.

export const NONE = "–";
const known = (value) => typeof value === "number" && Number.isFinite(value);

/** Three significant digits; large numbers with k, M, G. */
export function number(value) {
  if (!known(value)) return NONE;
  const size = Math.abs(value);
  if (size === 0) return "0";
  for (const [limit, unit] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (size >= limit) return `${trim(value / (limit === 1e4 ? 1e3 : limit))} ${unit}`;
  }
  if (size < 0.001) return value.toExponential(1);
  return trim(value);
}

function trim(value) {
  const size = Math.abs(value);
  const digits = size >= 100 ? 0 : size >= 10 ? 1 : size >= 1 ? 2 : 3;
  const text = value.toFixed(digits);
  return text.includes(".") ? text.replace(/\.?0+$/, "") : text;
}

export const percent = (share) => (known(share) ? `${(100 * share).toFixed(share > 0 && share < 0.0995 ? 1 : 0)} %` : NONE);
/** How much of something is done: below 100 % until all of it is. */
export const partOf = (share) => percent(known(share) && share < 1 ? Math.min(share, 0.99) : share);
export const gpus = (count) => `${count} GPU${count === 1 ? "" : "s"}`;
export const times = (ratio) => (known(ratio) ? `${ratio.toFixed(2)}×` : NONE);

/** 45 s, 12 min, 3 h 20 min, 2 d 4 h. */
export function duration(seconds) {
  if (!known(seconds)) return NONE;
  const s = Math.max(seconds, 0);
  if (s === 0) return "0 s";
  if (s < 0.001) return `${(s * 1e6).toFixed(0)} µs`;
  if (s < 1) return `${trim(s * 1000)} ms`;
  if (s < 10) return `${trim(s)} s`;
  if (s < 90) return `${Math.round(s)} s`;
  if (s < 5400) return `${Math.round(s / 60)} min`;
  if (s < 129600) return pair(Math.round(s / 60), 60, "h", "min");
  return pair(Math.round(s / 3600), 24, "d", "h");
}

function pair(total, unit, large, small) {
  const rest = total % unit;
  return `${Math.floor(total / unit)} ${large}${rest ? ` ${rest} ${small}` : ""}`;
}

/** GPU-time: GPU-seconds below an hour of it, else GPU-hours. */
export function gpuTime(seconds) {
  if (!known(seconds)) return NONE;
  return seconds < 3600 ? `${number(seconds)} GPU-s` : `${number(seconds / 3600)} GPU-h`;
}

const clock = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", hour12: false });
const second = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });
const weekday = new Intl.DateTimeFormat(undefined, { weekday: "short" });
const day = new Intl.DateTimeFormat(undefined, { day: "numeric", month: "short" });
const sameDay = (a, b) => a.toDateString() === b.toDateString();

/** The time of day, with the day of the week or the date if it is not today. */
export function moment(at, exact = false) {
  if (!known(at)) return NONE;
  const date = new Date(at * 1000);
  const text = (exact ? second : clock).format(date);
  if (sameDay(date, new Date())) return text;
  return Math.abs(Date.now() / 1000 - at) < 6 * 86400 ? `${weekday.format(date)} ${text}` : `${day.format(date)}, ${text}`;
}

/** A mark on an axis of time: the time of day, and at midnight the date. */
export function tick(at, exact = false) {
  const date = new Date(at * 1000);
  const midnight = date.getHours() === 0 && date.getMinutes() === 0 && date.getSeconds() === 0;
  return midnight ? day.format(date) : (exact ? second : clock).format(date);
}

/** An expected end: one time if both ends are close, else an interval. */
export function eta(value, now) {
  if (!value) return NONE;
  const low = Math.max(value.low, now);
  const high = Math.max(value.high, now);
  if (high - now < 1) return "any moment";
  if (high - now < 90) return `in ${duration(high - now)}`;
  const [from, to] = [moment(low), moment(high)];
  return from === to ? to : `${from} – ${to}`;
}

/** "4" or "1–16". */
export const range = (least, most) => (least === most ? `${most}` : `${least}–${most}`);

// One colour for each job, the same on all parts of a page.

const COLOURS = 12;
const given = new Map();

/** The index of a job's colour: in the order in which jobs are first shown, so that neighbours differ. */
export function colourIndex(id) {
  if (!given.has(id)) given.set(id, given.size % COLOURS);
  return given.get(id);
}

export const colourVar = (id) => (id === null ? "var(--other)" : `var(--c${colourIndex(id)})`);

/** Give jobs their colours by name, before drawing orders them by size. */
export function introduce(ids) {
  for (const id of [...ids].sort()) colourIndex(id);
}

/** A colour of the theme as the canvas wants it. */
export function themeColour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// Tables whose columns say what they hold: the explanation is a button in the head, for pointer, keys and ears alike.

import { el, fill, keepFocus } from "./dom.js";
import { info } from "./shell.js";

/** The head of a column `{name, about, class}`; `about` is the entry of WORDS that explains it. */
export function columnHead({ name, about, class: kind }) {
  const button = about ? info(about) : null;
  // A screen reader says the column's name for each cell, not its explanation.
  return el("th", { scope: "col", class: kind, "aria-label": button && name }, button ? el("span", { class: "explained" }, name, button) : name);
}

/** A table with a caption for screen readers; cells are text or elements. */
export function table(caption, columns, rows, props = {}) {
  const body = rows.map((cells) =>
    el("tr", {}, cells.map((cell, index) =>
      index === 0 ? el("th", { scope: "row" }, cell ?? "–") : el("td", { class: columns[index].class }, cell ?? "–"))));
  return el("table", props, el("caption", { class: "sr-only" }, caption), el("thead", {}, el("tr", {}, columns.map(columnHead))), el("tbody", {}, body));
}

const columnsOf = (found) => JSON.stringify([...found.tHead.rows[0].cells].map((cell) => cell.ariaLabel ?? cell.textContent));

/** Unchanged rows stay in the page, so that no press on one of their links is lost; rows have no listeners. */
function showRows(body, rows) {
  const before = [...body.rows];
  const shown = rows.map((row) => {
    const index = before.findIndex((one) => one.isEqualNode(row));
    return index < 0 ? row : before.splice(index, 1)[0];
  });
  for (const row of before) row.remove();
  shown.forEach((row, index) => {
    if (body.rows[index] !== row) body.insertBefore(row, body.rows[index] ?? null);
  });
}

/** Show a table in a place; if the same one is there already, its head stays, with an open explanation. */
export function showTable(place, found) {
  const before = place.firstElementChild;
  if (before?.tagName !== "TABLE" || columnsOf(before) !== columnsOf(found)) fill(place, found);
  else keepFocus(before.tBodies[0], () => showRows(before.tBodies[0], [...found.tBodies[0].rows]));
}

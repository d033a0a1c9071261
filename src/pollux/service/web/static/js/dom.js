// Elements without markup in strings: whatever comes from the server becomes text, never HTML.

export const byId = (id) => document.getElementById(id);

/** An element with properties, listeners (`on`), data and children; strings become text nodes. */
export function el(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "class") element.className = value;
    else if (name === "on") for (const [event, run] of Object.entries(value)) element.addEventListener(event, run);
    else if (name === "vars") for (const [key, text] of Object.entries(value)) element.style.setProperty(key, text);
    else if (name in element && typeof value !== "string") element[name] = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** Replace an element's children; the focus goes to the same one among the new, if it is there. */
export function fill(element, ...children) {
  keepFocus(element, () => element.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false)));
}

/** Change an element's children; if that removes the focused one, the same one among the new gets the focus. */
export function keepFocus(element, change) {
  const active = document.activeElement;
  const focused = active !== element && element.contains(active) ? nameOf(active) : null;
  change();
  if (focused === null || element.contains(document.activeElement)) return;
  for (const found of element.querySelectorAll("a, button, summary, [tabindex]")) {
    if (nameOf(found) === focused) return void found.focus({ preventScroll: true });
  }
}

const nameOf = (element) => [element.tagName, element.getAttribute("href"), element.getAttribute("aria-label") ?? element.textContent].join(" ");

/** Call `show` only if `value` has changed since last time, so that nothing moves under a reader's eyes. */
export function onChange(show) {
  let before = null;
  return (value, ...rest) => {
    const text = JSON.stringify(value);
    if (text === before) return;
    before = text;
    show(value, ...rest);
  };
}

/** Set text only if it changed, so that selections and screen readers are left alone. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

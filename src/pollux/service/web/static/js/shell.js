// The frame of every page: header, the signed-in person, live state, theme, messages, small explanations.

import { get, session, signOut } from "./api.js";
import { byId, el, say } from "./dom.js";
import { WORDS } from "./words.js";

const THEMES = ["auto", "light", "dark"];
const system = matchMedia("(prefers-color-scheme: dark)");

function chosenTheme() {
  try {
    const found = localStorage.getItem("pollux-theme");
    return THEMES.includes(found) ? found : "auto";
  } catch {
    return "auto";
  }
}

function applyTheme(name) {
  const dark = name === "dark" || (name === "auto" && system.matches);
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  dispatchEvent(new Event("pollux-theme"));
}

function themeButton() {
  const button = el("button", { class: "button quiet tiny", type: "button", id: "theme" });
  const show = () => {
    const name = chosenTheme();
    say(button, { auto: "◐ Auto", light: "☀ Light", dark: "☾ Dark" }[name]);
    button.setAttribute("aria-label", `Theme: ${name}. Change`);
  };
  button.addEventListener("click", () => {
    const next = THEMES[(THEMES.indexOf(chosenTheme()) + 1) % THEMES.length];
    try {
      localStorage.setItem("pollux-theme", next);
    } catch {
      // Kept for this page only.
    }
    applyTheme(next);
    show();
  });
  system.addEventListener("change", () => applyTheme(chosenTheme()));
  show();
  return button;
}

/** Put the frame around the page; returns the role, "operator" or "viewer". */
export async function frame(current) {
  const link = (href, text) => el("a", { href, "aria-current": href === current ? "page" : null }, text);
  const live = el("span", { class: "live", id: "live", role: "status", "data-state": "connecting" }, "Connecting…");
  const role = el("span", { class: "muted small", id: "role" });
  const out = el("button", { class: "button quiet tiny", type: "button", id: "sign-out", on: { click: signOut } }, "Sign out");
  document.body.prepend(
    el("a", { class: "skip", href: "#main" }, "To the content"),
    el("header", { class: "top" }, el("div", { class: "top-inner" },
      el("a", { class: "brand", href: "/" }, el("img", { src: "/static/favicon.svg", alt: "", width: "24", height: "24" }), "Pollux"),
      el("nav", { "aria-label": "Pages" }, link("/", "Cluster"), link("/policies", "Policies")),
      el("div", { class: "top-right" }, live, role, themeButton(), out))));
  document.body.append(
    el("footer", { class: "page-foot" },
      el("span", { id: "version" }),
      el("a", { href: "/docs" }, "API"),
      el("span", {}, "Goodput means useful samples per second: throughput × statistical efficiency.")),
    el("div", { class: "toasts", id: "toasts", role: "status" }));
  const found = await session();
  say(role, found.role === "viewer" ? "Read only" : "");
  document.body.dataset.role = found.role;
  return found.role;
}

/** Show whether events arrive. */
export function showLive(state) {
  const place = byId("live");
  place.dataset.state = state;
  say(place, state === "live" ? "Live" : "Reconnecting…");
}

/** A message that disappears by itself; an error stays longer. */
export function toast(text, bad = false) {
  const message = el("div", { class: bad ? "toast bad" : "toast" }, text);
  byId("toasts").append(message);
  setTimeout(() => message.remove(), bad ? 10000 : 5000);
}

/** A small "i" that explains a number on hover, focus and press. */
export function info(name) {
  const text = WORDS[name];
  if (!text) return null;
  let bubble = null;
  const button = el("button", { type: "button", "aria-label": `What is ${name}? ${text}` }, "i");
  const place = el("span", { class: "info" }, button);
  const close = () => {
    removeEventListener("scroll", settle, true);
    bubble?.remove();
    bubble = null;
  };
  const settle = () => {
    if (!button.isConnected) return close();
    const box = bubble.getBoundingClientRect();
    const here = button.getBoundingClientRect();
    bubble.style.left = `${Math.max(Math.min(here.left - 14, document.documentElement.clientWidth - box.width - 8), 8)}px`;
    bubble.style.top = `${here.bottom + box.height + 12 > innerHeight ? here.top - box.height - 6 : here.bottom + 6}px`;
  };
  const open = () => {
    if (bubble) return;
    // Above everything, so that no list that scrolls cuts it off.
    bubble = el("span", { class: "bubble", popover: "manual", "aria-hidden": "true" }, text);
    place.append(bubble);
    bubble.showPopover?.();
    settle();
    addEventListener("scroll", settle, { capture: true, passive: true });
  };
  button.addEventListener("mouseenter", open);
  button.addEventListener("focus", open);
  button.addEventListener("mouseleave", close);
  button.addEventListener("blur", close);
  button.addEventListener("keydown", (event) => event.key === "Escape" && close());
  return place;
}

/** Put the explanation of what an element shows behind it. */
export function annotate(id, name) {
  byId(id).after(info(name));
}

/** Ask before something is done; resolves to the form's values, or null. */
export function confirmed({ title, text, button, danger = false, field = null }) {
  return new Promise((resolve) => {
    const input = field && el("input", { type: "text", id: "dialog-field", name: "value", value: field.value, required: true, autocomplete: "off", pattern: field.pattern, title: field.hint });
    const dialog = el("dialog", { "aria-labelledby": "dialog-title" },
      el("form", { method: "dialog" },
        el("h2", { id: "dialog-title" }, title),
        el("p", {}, text),
        field && el("div", { class: "field" }, el("label", { for: "dialog-field" }, field.label), input, el("p", { class: "hint" }, field.hint)),
        el("div", { class: "buttons" },
          el("button", { class: "button", type: "button", id: "dialog-no", on: { click: () => dialog.close("") } }, "Back"),
          el("button", { class: danger ? "button primary danger" : "button primary", type: "submit", value: "yes", id: "dialog-yes" }, button))));
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(dialog.returnValue === "yes" ? { value: input?.value ?? "" } : null);
    });
    document.body.append(dialog);
    dialog.showModal();
    (input ?? dialog.querySelector("#dialog-no")).focus();
  });
}

/** The clock of the service, which all times are by. */
let offset = 0;
export const serverNow = () => Date.now() / 1000 + offset;

/** The service about itself; sets the clock and the footer. */
export async function serviceStatus() {
  const status = await get("/v1/status");
  offset = status.now - Date.now() / 1000;
  say(byId("version"), `Pollux ${status.version} · policy ${status.policy} · backend ${status.backend}`);
  return status;
}

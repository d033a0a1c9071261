// Runs before the first paint, so that a page never flashes in the other theme. Not a module: modules run too late.
(() => {
  let chosen = "auto";
  try {
    chosen = localStorage.getItem("pollux-theme") || "auto";
  } catch {
    // Storage may be forbidden; the system's theme is as good.
  }
  const dark = chosen === "dark" || (chosen === "auto" && matchMedia("(prefers-color-scheme: dark)").matches);
  document.documentElement.dataset.theme = dark ? "dark" : "light";
})();

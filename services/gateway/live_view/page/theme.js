// Light or dark: as the system says, until the reader chooses.

import { $ } from "./dom.js";

const KEPT = "sluice-theme";
const root = document.documentElement;

export function themes() {
  const kept = localStorage.getItem(KEPT);
  if (kept) root.dataset.theme = kept;
  $("#theme").addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    localStorage.setItem(KEPT, root.dataset.theme);
  });
}

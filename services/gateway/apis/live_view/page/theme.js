// Light or dark theme: the system's, until the user selects one.

import { $ } from "./dom.js";

const STORAGE_KEY = "sluice-theme";
const root = document.documentElement;

export function themes() {
  const stored = localStorage.getItem(STORAGE_KEY);
  if (stored) root.dataset.theme = stored;
  $("#theme").addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    localStorage.setItem(STORAGE_KEY, root.dataset.theme);
  });
}

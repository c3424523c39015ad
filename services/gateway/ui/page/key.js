// The API key, where the gateway wants one: asked for once, kept for this tab only.

import { $ } from "./dom.js";

const KEPT = "sluice-key";
let asking = null;

export async function authorized(path, options = {}) {
  while (true) {
    const key = sessionStorage.getItem(KEPT);
    const headers = { ...options.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
    const answer = await fetch(path, { ...options, headers, cache: "no-store" });
    if (answer.status !== 401) return answer;
    if (sessionStorage.getItem(KEPT) === key) await ask();
  }
}

function ask() {
  asking ??= new Promise((resolve) => {
    const dialog = $("#key");
    dialog.addEventListener("close", () => {
      sessionStorage.setItem(KEPT, $("#key-text").value.trim());
      $("#key-text").value = "";
      asking = null;
      resolve();
    }, { once: true });
    dialog.addEventListener("cancel", (event) => event.preventDefault());
    dialog.showModal();
  });
  return asking;
}

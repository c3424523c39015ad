// The API key, where the gateway needs one: asked for once, kept for this tab only. A key without the scope that a
// request needs is asked for again, with the gateway's sentence about it.

import { $, write } from "./dom.js";

const KEPT = "sluice-key";
let asking = null;

export async function authorized(path, options = {}) {
  while (true) {
    const key = sessionStorage.getItem(KEPT);
    const headers = { ...options.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
    const answer = await fetch(path, { ...options, headers, cache: "no-store" });
    const missing = key && answer.status === 403 ? await missingScope(answer.clone()) : "";
    if (answer.status !== 401 && !missing) return answer;
    if (sessionStorage.getItem(KEPT) === key) await ask(missing);
  }
}

// The sentence of a refusal for want of a scope; empty for every other answer.
async function missingScope(answer) {
  const { error } = await answer.json().catch(() => ({}));
  return error?.code === "scope_missing" ? error.message : "";
}

function ask(reason) {
  asking ??= new Promise((resolve) => {
    const dialog = $("#key");
    write($("#key-reason"), reason);
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

// Prompts for the API key if the gateway requires one, and keeps it for this tab only. Prompts again if the key lacks
// a scope, with the gateway's message.

import { $, write } from "./dom.js";

const STORAGE_KEY = "sluice-key";
let prompting = null;

export async function authorized(path, options = {}) {
  while (true) {
    const key = sessionStorage.getItem(STORAGE_KEY);
    const headers = { ...options.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
    const response = await fetch(path, { ...options, headers, cache: "no-store" });
    const message = key && response.status === 403 ? await missingScope(response.clone()) : "";
    if (response.status !== 401 && !message) return response;
    if (sessionStorage.getItem(STORAGE_KEY) === key) await promptForKey(message);
  }
}

// Returns the error message for a missing scope; empty for any other response.
async function missingScope(response) {
  const { error } = await response.json().catch(() => ({}));
  return error?.code === "scope_missing" ? error.message : "";
}

function promptForKey(reason) {
  prompting ??= new Promise((resolve) => {
    const dialog = $("#key");
    write($("#key-reason"), reason);
    dialog.addEventListener("close", () => {
      sessionStorage.setItem(STORAGE_KEY, $("#key-text").value.trim());
      $("#key-text").value = "";
      prompting = null;
      resolve();
    }, { once: true });
    dialog.addEventListener("cancel", (event) => event.preventDefault());
    dialog.showModal();
  });
  return prompting;
}

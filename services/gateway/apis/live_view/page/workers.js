// The table of workers. Rows are reused, and only changed cells are written.

import { el, setClass, setShare, write } from "./dom.js";
import { count, duration, percent, plural } from "./format.js";

export class Workers {
  #body;
  #hidden;
  #rows = new Map();

  constructor(body, hidden) {
    this.#body = body;
    this.#hidden = hidden;
  }

  show(model) {
    const rows = model.rows;
    const ids = new Set(rows.map((row) => row.id));
    for (const [id, shown] of this.#rows) {
      if (!ids.has(id)) {
        shown.line.remove();
        this.#rows.delete(id);
      }
    }
    rows.forEach((row, index) => {
      const shown = this.#rows.get(row.id) ?? this.#add(row.id);
      if (this.#body.children[index] !== shown.line) this.#body.insertBefore(shown.line, this.#body.children[index] ?? null);
      fill(shown, row);
    });
    write(this.#hidden, model.hidden ? `and ${plural(model.hidden, "more worker")}` : rows.length ? "" : "No worker has registered yet.");
  }

  #add(id) {
    const cell = (name) => el("td", name ? { "data-name": name } : {});
    const used = el("i", { class: "used" });
    const cached = el("i");
    const meter = el("div", { class: "meter", role: "meter", "aria-label": "KV cache", "aria-valuemin": 0, "aria-valuemax": 100 }, cached, used);
    const shown = {
      line: el("tr"), about: el("div", { class: "sub" }), health: el("td", { class: "health" }), load: cell("load"),
      hit: cell("hit rate"), tokens: cell("tokens/s"), step: cell("step"), used, cached, meter, fill: el("span", { class: "sub" }),
    };
    const name = el("td", {}, el("strong", { text: id }), shown.about);
    const cache = el("td", { "data-name": "cache" }, meter, shown.fill);
    shown.line.append(name, shown.health, shown.load, cache, shown.hit, shown.tokens, shown.step);
    this.#rows.set(id, shown);
    return shown;
  }
}

// The worker's report may be older than this gateway's own streams; short requests only appear in the rate.
function load({ running, waiting, live, requests_s }) {
  const parts = [`${Math.max(running, live)} running`, ...(waiting ? [`${waiting} waiting`] : [])];
  return [...parts, ...(requests_s ? [`${count(requests_s)} requests/s`] : [])].join(", ");
}

function fill(shown, row) {
  setClass(shown.line, row.health);
  shown.line.title = `${row.model} at ${row.address}`;
  write(shown.about, [row.role, row.engine].filter(Boolean).join(" · "));
  write(shown.health, row.health === "aside" ? `set aside: ${row.why}` : row.health);
  write(shown.load, load(row));
  setShare(shown.cached, row.cached);
  setShare(shown.used, row.used);
  shown.meter.setAttribute("aria-valuenow", Math.round(row.cached * 100));
  write(shown.fill, `${percent(row.cached)} filled, ${percent(row.used)} in use`);
  write(shown.hit, percent(row.hit_rate));
  write(shown.tokens, count(row.tokens_s));
  write(shown.step, row.step_ms ? duration(row.step_ms) : "–");
}

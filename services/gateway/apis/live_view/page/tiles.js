// The main rates, each with a chart of the last two minutes.

import { el, svg, write } from "./dom.js";
import { count, percent } from "./format.js";

const TILES = [
  { name: "requests/s", track: "requests", value: (model) => count(model.rates.requests ?? 0) },
  { name: "tokens/s", track: "output_tokens", value: (model) => count(model.rates.output_tokens ?? 0) },
  { name: "running", track: "live", value: (model) => count(model.rates.live ?? 0) },
  { name: "failed/s", track: "failed", value: (model) => count(model.rates.failed ?? 0) },
  { name: "cache hit rate of recent prompts", track: null, value: (model) => percent(model.hitRate) },
];

export class Tiles {
  #tiles;

  constructor(host) {
    this.#tiles = TILES.map((tile) => {
      const value = el("p", { class: "value", text: "–" });
      const line = svg("polyline");
      const chart = svg("svg", { viewBox: "0 0 119 26", preserveAspectRatio: "none", "aria-hidden": "true" }, line);
      host.append(el("div", { class: "tile" }, value, el("p", { class: "name", text: tile.name }), ...(tile.track ? [chart] : [])));
      return { ...tile, node: value, line };
    });
  }

  show(model) {
    for (const { node, line, track, value } of this.#tiles) {
      write(node, value(model));
      if (track) line.setAttribute("points", points(model.history[track]));
    }
  }
}

function points(values) {
  const most = Math.max(...values, 1);
  return values.map((value, index) => `${120 - values.length + index},${(25 - (23 * value) / most).toFixed(1)}`).join(" ");
}

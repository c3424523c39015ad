// The explanation of a routing decision: the scores of all candidates, lowest first.

import { el, setShare } from "./dom.js";
import { count, plural } from "./format.js";

export class Why {
  #sentence;
  #list;
  #shown = null;

  constructor(section) {
    this.#sentence = section.querySelector(".sentence");
    this.#list = section.querySelector(".scores");
  }

  show({ why }) {
    if (!why || why === this.#shown) return;
    this.#shown = why;
    this.#sentence.textContent = sentence(why);
    const highest = Math.max(...why.scores.map((score) => score.cost), 0.001);
    this.#list.replaceChildren(...why.scores.map((score) => row(score, score.worker === why.worker, highest)));
  }
}

function sentence({ worker, scores, candidates, degraded }) {
  const note = degraded ? ` Degraded: ${degraded}.` : "";
  return `The sampled request was routed to ${worker}${comparison(worker, scores, candidates)}.${note}`;
}

function comparison(worker, scores, candidates) {
  const chosen = scores.find((score) => score.worker === worker);
  if (!chosen) return "";
  if (candidates === 1) return ", the only candidate";
  const lowest = scores[0].cost;
  if (chosen.cost > lowest) return `, although others of ${candidates} candidates scored lower`;
  const equal = scores.filter((score) => score.cost === lowest).length;
  return equal > 1 ? `, one of ${equal} candidates with the lowest score` : `, which scored lowest of ${candidates} candidates`;
}

function row(score, chosen, highest) {
  const decode = Math.min(score.decode, score.cost);
  const prefill = el("i", { class: "prefill" });
  const decoding = el("i", { class: "decode" });
  setShare(prefill, (score.cost - decode) / highest);
  setShare(decoding, decode / highest);
  const bar = el("span", { class: "bar", "aria-hidden": "true" }, prefill, decoding);
  const name = el("span", { class: "name", text: chosen ? `▸ ${score.worker}` : score.worker, title: score.worker });
  const cost = el("span", { class: "cost", text: count(Math.round(score.cost * 10) / 10) });
  return el("li", { class: chosen ? "chosen" : "" }, name, bar, cost, el("span", { class: "cached", text: describe(score) }));
}

function describe({ overlap, predicted, prefill, decode }) {
  const [device, host, disk] = overlap;
  const tiers = [[device, "on the device"], [host, "on the host"], [disk, "on disk"], [predicted, "predicted"]];
  const cached = tiers.filter(([blocks]) => blocks > 0).map(([blocks, where]) => `${plural(blocks, "block")} ${where}`);
  const reserved = prefill + decode > 0 ? ` · reserved ${count(Math.round(prefill))} prefill, ${count(Math.round(decode))} decode` : "";
  return (cached.length ? `cached: ${cached.join(", ")}` : "nothing cached") + reserved;
}

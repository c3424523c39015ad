// Why a request went where it went: the router's scores, the cheapest first.

import { el, part } from "./dom.js";
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
    const most = Math.max(...why.scores.map((score) => score.cost), 0.001);
    this.#list.replaceChildren(...why.scores.map((score) => line(score, score.worker === why.worker, most)));
  }
}

function sentence({ worker, scores, candidates, degraded }) {
  const chosen = scores.find((score) => score.worker === worker);
  const cheapest = chosen && chosen.cost <= scores[0].cost;
  const others = candidates > 1 ? `of ${plural(candidates, "candidate")}` : "as the only candidate";
  const equal = scores.filter((score) => score.cost === scores[0].cost).length;
  const reason = !chosen ? "" : cheapest && equal > 1 ? `, one of ${equal} that cost the same` : cheapest ? `, the cheapest ${others}` : `, ${others}, though not the cheapest`;
  return `The last request looked at went to ${worker}${reason}.` + (degraded ? ` Degraded: ${degraded}.` : "");
}

function line(score, chosen, most) {
  const decode = Math.min(score.decode, score.cost);
  const prefill = el("i", { class: "prefill" });
  const decoding = el("i", { class: "decode" });
  part(prefill, (score.cost - decode) / most);
  part(decoding, decode / most);
  const bar = el("span", { class: "bar", "aria-hidden": "true" }, prefill, decoding);
  const name = el("span", { class: "name", text: chosen ? `▸ ${score.worker}` : score.worker, title: score.worker });
  const cost = el("span", { class: "cost", text: count(Math.round(score.cost * 10) / 10) });
  return el("li", { class: chosen ? "chosen" : "" }, name, bar, cost, el("span", { class: "holds", text: holds(score) }));
}

function holds({ overlap, predicted, prefill, decode }) {
  const [device, host, disk] = overlap;
  const held = [[device, "on the device"], [host, "on the host"], [disk, "on disk"], [predicted, "predicted"]];
  const has = held.filter(([blocks]) => blocks > 0).map(([blocks, where]) => `${plural(blocks, "block")} ${where}`);
  const booked = prefill + decode > 0 ? ` · booked ${count(Math.round(prefill))} prefill, ${count(Math.round(decode))} decode` : "";
  return (has.length ? `holds ${has.join(", ")}` : "holds nothing of it") + booked;
}

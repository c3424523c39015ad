// The last requests, newest first: how long each stage took, on one scale.

import { el, part } from "./dom.js";
import { clock, count, duration, plural } from "./format.js";

const STAGES = ["tokenize", "route", "first", "rest"];
const ROWS = 14;

export class Waterfall {
  #list;
  #shown = null;

  constructor(list) {
    this.#list = list;
  }

  show({ requests }) {
    if (requests === this.#shown) return;
    this.#shown = requests;
    const last = requests.slice(-ROWS).reverse();
    const most = Math.max(...last.map(total), 1);
    const rows = last.map((request) => line(request, most));
    this.#list.replaceChildren(...(rows.length ? rows : [el("li", { class: "empty", text: "No request has come to its end yet." })]));
  }
}

const total = (request) => STAGES.reduce((sum, stage) => sum + request[`${stage}_ms`], 0);

function line(request, most) {
  const told = STAGES.map((stage) => `${stage} ${duration(request[`${stage}_ms`])}`).join(", ");
  const bar = el("span", { class: "bar", role: "img", "aria-label": told, title: told });
  for (const stage of STAGES) {
    const piece = el("i", { class: stage });
    part(piece, request[`${stage}_ms`] / most);
    bar.append(piece);
  }
  const who = el("span", { class: "who", title: request.id }, el("b", { text: request.workers.join(" → ") }));
  who.append(el("span", { class: "sub", text: `${clock(request.began_unix_ms)} · ${request.model}` }));
  const sum = el("span", { class: "sum" }, el("b", { text: duration(total(request)) }));
  sum.append(el("span", { class: "outcome", text: ` ${request.outcome}` }), el("span", { class: "sub", text: tokens(request) }));
  sum.title = `${plural(request.cached_tokens, "prompt token")} came from the worker's cache`;
  const marks = notes(request);
  const failed = request.outcome !== "finished" && request.outcome !== "cancelled";
  return el("li", { class: failed ? "failed" : request.outcome }, who, bar, sum, ...(marks ? [el("span", { class: "marks", text: marks })] : []));
}

const tokens = ({ prompt_tokens, output_tokens }) => `${count(prompt_tokens)} → ${count(output_tokens)} tokens`;

function notes({ degraded, migrations }) {
  const moved = migrations ? [`moved ${plural(migrations, "time")}`] : [];
  return [...moved, ...degraded].join(" · ");
}

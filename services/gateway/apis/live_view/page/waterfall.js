// The last requests, newest first, with the duration of each stage on one scale.

import { el, setShare } from "./dom.js";
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
    const longest = Math.max(...last.map(total), 1);
    const rows = last.map((request) => row(request, longest));
    this.#list.replaceChildren(...(rows.length ? rows : [el("li", { class: "empty", text: "No request has completed yet." })]));
  }
}

const total = (request) => STAGES.reduce((sum, stage) => sum + request[`${stage}_ms`], 0);

function row(request, longest) {
  const durations = STAGES.map((stage) => `${stage} ${duration(request[`${stage}_ms`])}`).join(", ");
  const bar = el("span", { class: "bar", role: "img", "aria-label": durations, title: durations });
  for (const stage of STAGES) {
    const segment = el("i", { class: stage });
    setShare(segment, request[`${stage}_ms`] / longest);
    bar.append(segment);
  }
  const workers = el("span", { class: "who", title: request.id }, el("b", { text: request.workers.join(" → ") }));
  workers.append(el("span", { class: "sub", text: `${clock(request.began_unix_ms)} · ${request.model}` }));
  const sum = el("span", { class: "sum" }, el("b", { text: duration(total(request)) }));
  sum.append(el("span", { class: "outcome", text: ` ${request.outcome}` }), el("span", { class: "sub", text: [tokens(request), shortMedia(request)].filter(Boolean).join(" · ") }));
  sum.title = `${plural(request.cached_tokens, "prompt token")} read from the worker's cache`;
  if (request.media) sum.title += `; ${media(request)}`;
  const notes = notesOf(request);
  const failed = request.outcome !== "finished" && request.outcome !== "cancelled";
  return el("li", { class: failed ? "failed" : request.outcome }, workers, bar, sum, ...(notes ? [el("span", { class: "marks", text: notes })] : []));
}

const tokens = ({ prompt_tokens, output_tokens }) => `${count(prompt_tokens)} → ${count(output_tokens)} tokens`;

const shortMedia = ({ media, cached_media }) => (media ? `${plural(media, "item")}, ${count(cached_media)} cached` : "");

const media = ({ media, cached_media, encoder_tokens }) =>
  `${plural(media, "media item")} in the prompt, ${count(cached_media)} of them cached; ${plural(encoder_tokens, "encoder token")} in all`;

function notesOf({ degraded, migrations }) {
  const migrated = migrations ? [`migrated ${plural(migrations, "time")}`] : [];
  return [...migrated, ...degraded].join(" · ");
}

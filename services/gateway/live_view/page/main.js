// Puts the parts together: one model, drawn at most once a frame, and not at all while the page is hidden.

import { Chat } from "./chat.js";
import { $, el, mark, write } from "./dom.js";
import { follow } from "./follow.js";
import { Model } from "./model.js";
import { Picture } from "./picture.js";
import { themes } from "./theme.js";
import { Tiles } from "./tiles.js";
import { Waterfall } from "./waterfall.js";
import { Why } from "./why.js";
import { Workers } from "./workers.js";

const model = new Model();
const parts = [
  new Picture($("#picture")),
  new Tiles($("#numbers")),
  new Workers($("#workers tbody"), $("#hidden-workers")),
  new Why($("#why")),
  new Waterfall($("#requests .waterfall")),
  new Chat(),
  { show: degraded },
  { show: title },
];
let due = false;

function draw() {
  if (due || document.hidden) return;
  due = true;
  requestAnimationFrame(() => {
    due = false;
    for (const part of parts) part.show(model);
  });
}

function degraded(model) {
  const marks = Object.entries(model.degraded).map(([reason, times]) => `${reason.replaceAll("_", " ")} × ${times}`);
  const host = $("#degraded");
  if (host.dataset.shown === marks.join()) return;
  host.dataset.shown = marks.join();
  const calm = el("li", { class: "calm", text: "No fallback in the last minute." });
  host.replaceChildren(...(marks.length ? marks.map((text) => el("li", { text })) : [calm]));
}

function title(model) {
  write($("#models"), model.models.join(", ") || "no model yet");
  write($("#version"), model.version ? `Sluice ${model.version}. What one gateway sees; read-only.` : "");
}

function say(text, kind) {
  write($("#link"), text);
  mark($("#link"), `pill ${kind}`.trim());
}

themes();
document.addEventListener("visibilitychange", draw);
draw();
follow(model, draw, say);

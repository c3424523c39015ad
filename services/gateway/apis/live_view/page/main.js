// Connects the parts: one model, drawn at most once per frame and only while the page is visible.

import { Chat } from "./chat.js";
import { $, el, setClass, write } from "./dom.js";
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
let scheduled = false;

function draw() {
  if (scheduled || document.hidden) return;
  scheduled = true;
  requestAnimationFrame(() => {
    scheduled = false;
    for (const part of parts) part.show(model);
  });
}

function degraded(model) {
  const reasons = Object.entries(model.degraded).map(([reason, times]) => `${reason.replaceAll("_", " ")} × ${times}`);
  const host = $("#degraded");
  if (host.dataset.shown === reasons.join()) return;
  host.dataset.shown = reasons.join();
  const none = el("li", { class: "calm", text: "No fallbacks in the last minute." });
  host.replaceChildren(...(reasons.length ? reasons.map((text) => el("li", { text })) : [none]));
}

function title(model) {
  write($("#models"), model.models.join(", ") || "no model available");
  write($("#version"), model.version ? `Sluice ${model.version}. State of one gateway; read-only.` : "");
}

function setStatus(text, kind) {
  write($("#link"), text);
  setClass($("#link"), `pill ${kind}`.trim());
}

themes();
document.addEventListener("visibilitychange", draw);
draw();
follow(model, draw, setStatus);

// The diagram of the pipeline: which service calls which, with current rates.

import { setClass, svg, write } from "./dom.js";
import { count, plural } from "./format.js";

const WIDE = {
  box: [980, 300], node: [150, 48],
  at: { client: [76, 150], gateway: [366, 150], preprocess: [790, 36], router: [790, 112], workers: [790, 188], postprocess: [790, 264] },
};
const NARROW = {
  box: [380, 430], node: [136, 50],
  at: { client: [70, 50], gateway: [70, 218], preprocess: [300, 50], router: [300, 162], workers: [300, 274], postprocess: [300, 386] },
};
const ARROWS = {
  client: { from: "client", to: "gateway", rate: (r) => [r.requests, `${count(r.requests)} requests/s`, `${count(r.live)} running`] },
  preprocess: { from: "gateway", to: "preprocess", rate: (r) => [r.tokenized, `${count(r.tokenized)} prompts/s`, `${count(r.prompt_tokens)} tokens/s`] },
  router: { from: "gateway", to: "router", rate: (r) => [r.decisions, `${count(r.decisions)} decisions/s`] },
  workers: { from: "gateway", to: "workers", rate: (r) => [r.output_tokens, `${count(r.output_tokens)} tokens/s`] },
  postprocess: { from: "gateway", to: "postprocess", rate: (r) => [r.characters, `${count(r.characters)} characters/s`] },
};
// Length of the straight end of an arrow, with its labels.
const STRAIGHT = 185;
const DOTS = { columns: 4, apart: 11, most: 12 };

export class Picture {
  #host;
  #narrow = matchMedia("(max-width: 620px)");
  #nodes = {};
  #arrows = {};
  #drawing;
  #last = null;

  constructor(host) {
    this.#host = host;
    this.#narrow.addEventListener("change", () => this.#draw());
    this.#draw();
  }

  show(model) {
    this.#last = model;
    const rates = { requests: 0, live: 0, tokenized: 0, prompt_tokens: 0, decisions: 0, output_tokens: 0, characters: 0, ...model.rates };
    for (const [name, arrow] of Object.entries(ARROWS)) {
      const [flow, ...lines] = arrow.rate(rates);
      const { path, tip, labels } = this.#arrows[name];
      const moving = flow > 0 ? " moving" : "";
      setClass(path, `flow${moving}`);
      setClass(tip, `tip${moving}`);
      path.style.setProperty("--pace", `${pace(flow)}s`);
      const texts = labels.length === 1 ? [lines.join(" · ")] : lines;
      labels.forEach((label, index) => {
        write(label, texts[index] ?? "");
        setClass(label, `rate${moving}`);
      });
    }
    for (const name of ["preprocess", "router", "postprocess"]) this.#service(name, model.nodes[name]);
    this.#workers(model.rows);
    const summary = `${count(rates.requests)} requests and ${count(rates.output_tokens)} tokens per second, ${count(rates.live)} running`;
    this.#drawing.setAttribute("aria-label", `The pipeline: ${summary}`);
  }

  #service(name, node) {
    const { group, under } = this.#nodes[name];
    const [serving, away] = [node?.serving.length ?? 0, node?.away.length ?? 0];
    setClass(group, `node ${serving === 0 ? "away" : node.troubled || away ? "troubled" : "ok"}`);
    const replicas = away ? `${serving} of ${plural(serving + away, "replica")}` : plural(serving, "replica");
    write(under, serving === 0 ? "unavailable" : replicas + (node.troubled ? `, ${node.troubled} failed` : ""));
  }

  #workers(rows) {
    const { group, under, dots } = this.#nodes.workers;
    const present = rows.filter((row) => row.health !== "gone" && row.health !== "left");
    const healthy = present.filter((row) => row.health === "ok" || row.health === "draining");
    setClass(group, `node ${healthy.length === 0 ? "away" : "ok"}`);
    write(under, `${healthy.length} of ${plural(rows.length, "worker")}`);
    const shown = rows.slice(0, DOTS.most);
    while (dots.children.length > shown.length) dots.lastChild.remove();
    while (dots.children.length < shown.length) dots.append(svg("circle", { r: 4 }));
    shown.forEach((row, index) => {
      const dot = dots.children[index];
      setClass(dot, `dot ${row.health}`);
      dot.setAttribute("cx", (index % DOTS.columns) * DOTS.apart);
      dot.setAttribute("cy", Math.floor(index / DOTS.columns) * DOTS.apart);
    });
  }

  #draw() {
    const layout = this.#narrow.matches ? NARROW : WIDE;
    const [width, height] = layout.box;
    this.#drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "The pipeline" });
    for (const [name, arrow] of Object.entries(ARROWS)) this.#arrows[name] = this.#arrow(layout, arrow);
    const [x, y] = layout.at.workers;
    const up = layout.at.router[1];
    const edge = x + layout.node[0] / 2;
    const bend = edge + (this.#narrow.matches ? 10 : 46);
    this.#drawing.append(svg("path", { class: "flow aside", d: `M${edge} ${y} C${bend} ${y} ${bend} ${up} ${edge + 8} ${up}` }));
    this.#drawing.append(svg("path", { class: "tip", d: "M9 -5 L0 0 L9 5 Z", transform: `translate(${edge} ${up})` }));
    if (!this.#narrow.matches) this.#drawing.append(svg("text", { class: "rate", x: bend - 4, y: (y + up) / 2 + 4, text: "cache, load" }));
    for (const name of Object.keys(layout.at)) this.#nodes[name] = this.#node(layout, name);
    this.#host.replaceChildren(this.#drawing);
    if (this.#last) this.show(this.#last);
  }

  #node(layout, name) {
    const [width, height] = layout.node;
    const [x, y] = layout.at[name];
    const group = svg("g", { class: "node", transform: `translate(${x - width / 2} ${y - height / 2})` });
    const under = svg("text", { class: "under", x: 14, y: height / 2 + 15 });
    const dots = svg("g", { transform: `translate(${width - 16 - (DOTS.columns - 1) * DOTS.apart} ${height / 2 - 11})` });
    const unlabelled = name === "client" || name === "gateway";
    group.append(svg("rect", { width, height, rx: 10 }), svg("text", { x: 14, y: unlabelled ? height / 2 + 5 : height / 2 - 2, text: name }), under);
    if (name === "workers") group.append(dots);
    else if (!unlabelled) group.append(svg("circle", { class: "state", cx: width - 16, cy: height / 2 - 7, r: 4 }));
    this.#drawing.append(group);
    return { group, under, dots };
  }

  #arrow(layout, { from, to }) {
    const [x1, y1] = layout.at[from];
    const [x2, y2] = layout.at[to];
    const [width, height] = layout.node;
    const narrow = this.#narrow.matches;
    const down = x1 === x2;
    const start = down ? [x1, y1 + height / 2] : [x1 + width / 2, y1];
    const end = down ? [x2, y2 - height / 2] : [x2 - width / 2, y2];
    const bend = start[1] === end[1] || down ? start[0] : narrow ? end[0] : end[0] - STRAIGHT;
    const middle = (start[0] + bend) / 2;
    const d = bend === start[0] ? `M${start} L${end}` : `M${start} C${middle} ${start[1]} ${middle} ${end[1]} ${bend} ${end[1]} L${end}`;
    const path = svg("path", { class: "flow", d });
    const tip = svg("path", { class: "tip", d: "M-9 -5 L0 0 L-9 5 Z", transform: `translate(${end}) rotate(${down ? 90 : 0})` });
    const labels = down
      ? [caption(start[0] + 10, start[1] + 52, "start"), caption(start[0] + 10, start[1] + 70, "start")]
      : narrow
        ? [caption(x2 + width / 2, y2 - height / 2 - 7, "end")]
        : [caption((bend + end[0] - 9) / 2, end[1] - 9, "middle"), caption((bend + end[0] - 9) / 2, end[1] + 20, "middle")];
    this.#drawing.append(path, tip, ...labels);
    return { path, tip, labels };
  }
}

function caption(x, y, anchor) {
  return svg("text", { class: "rate", x, y, "text-anchor": anchor });
}

// Seconds per dash, in few steps, because a change restarts the animation.
function pace(rate) {
  return rate > 1000 ? 0.6 : rate > 100 ? 0.9 : rate > 10 ? 1.4 : 2.2;
}

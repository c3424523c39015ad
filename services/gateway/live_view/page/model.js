// What the page knows: the whole state once, then a delta a second. Everything in it is bounded.

const SAMPLES = 120;
const REQUESTS = 40;
const TRACKS = ["requests", "output_tokens", "live", "failed"];

export class Model {
  workers = new Map();
  requests = [];
  history = Object.fromEntries(TRACKS.map((name) => [name, []]));
  rates = {};
  nodes = {};
  models = [];
  degraded = {};
  hidden = 0;
  why = null;
  version = "";

  whole(state) {
    this.workers = new Map(state.workers.map((row) => [row.id, row]));
    this.requests = state.requests.slice(-REQUESTS);
    this.history = state.history;
    this.hidden = state.hidden_workers;
    for (const name of ["rates", "nodes", "models", "degraded", "why", "version"]) this[name] = state[name];
  }

  delta(news) {
    this.rates = news.rates;
    for (const name of TRACKS) {
      this.history[name].push(news.rates[name]);
      this.history[name].splice(0, this.history[name].length - SAMPLES);
    }
    for (const row of news.workers ?? []) this.workers.set(row.id, row);
    for (const id of news.left ?? []) this.workers.delete(id);
    this.hidden = news.hidden_workers ?? 0;
    if (news.requests) this.requests = [...this.requests, ...news.requests].slice(-REQUESTS);
    for (const name of ["nodes", "models", "degraded", "why"]) if (news[name]) this[name] = news[name];
  }

  get rows() {
    return [...this.workers.values()].sort((a, b) => a.id.localeCompare(b.id, undefined, { numeric: true }));
  }

  // Cached share of the prompt tokens of the requests shown.
  get hitRate() {
    const done = this.requests.filter((request) => request.outcome === "finished");
    const prompt = done.reduce((sum, request) => sum + request.prompt_tokens, 0);
    return prompt ? done.reduce((sum, request) => sum + request.cached_tokens, 0) / prompt : null;
  }
}

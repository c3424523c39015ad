// The state of the page: the whole state once, then a delta per second. Its size is bounded.

const MAX_SAMPLES = 120;
const MAX_REQUESTS = 40;
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
    this.requests = state.requests.slice(-MAX_REQUESTS);
    this.history = state.history;
    this.hidden = state.hidden_workers;
    for (const name of ["rates", "nodes", "models", "degraded", "why", "version"]) this[name] = state[name];
  }

  delta(changes) {
    this.rates = changes.rates;
    for (const name of TRACKS) {
      this.history[name].push(changes.rates[name]);
      this.history[name].splice(0, this.history[name].length - MAX_SAMPLES);
    }
    for (const row of changes.workers ?? []) this.workers.set(row.id, row);
    for (const id of changes.left ?? []) this.workers.delete(id);
    this.hidden = changes.hidden_workers ?? 0;
    if (changes.requests) this.requests = [...this.requests, ...changes.requests].slice(-MAX_REQUESTS);
    for (const name of ["nodes", "models", "degraded", "why"]) if (changes[name]) this[name] = changes[name];
  }

  get rows() {
    return [...this.workers.values()].sort((a, b) => a.id.localeCompare(b.id, undefined, { numeric: true }));
  }

  // Cached share of the prompt tokens of the shown requests.
  get hitRate() {
    const finished = this.requests.filter((request) => request.outcome === "finished");
    const prompt = finished.reduce((sum, request) => sum + request.prompt_tokens, 0);
    return prompt ? finished.reduce((sum, request) => sum + request.cached_tokens, 0) / prompt : null;
  }
}

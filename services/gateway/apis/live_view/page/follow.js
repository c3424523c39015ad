// Reads the event stream, and reconnects after a pause when it ends or times out.

import { events } from "./events.js";
import { authorized } from "./key.js";

const TIMEOUT_MS = 6000;
const RETRY_MS = [500, 15_000];

export async function follow(model, onChange, setStatus) {
  let retryMs = RETRY_MS[0];
  while (true) {
    const timeout = new Timeout();
    try {
      setStatus("connecting", "");
      const response = await authorized("data/stream", { signal: timeout.signal });
      if (!response.ok) throw new Error(await errorMessage(response));
      timeout.restart();
      for await (const { event, data } of events(response.body)) {
        timeout.restart();
        const state = JSON.parse(data);
        if (event === "whole") model.whole(state);
        else model.delta(state);
        retryMs = RETRY_MS[0];
        setStatus("live", "ok");
        onChange();
      }
      setStatus("the gateway closed the stream", "bad");
    } catch (error) {
      setStatus(reason(error, timeout), "bad");
    } finally {
      timeout.stop();
    }
    await new Promise((resolve) => setTimeout(resolve, retryMs * (0.75 + Math.random() / 2)));
    retryMs = Math.min(retryMs * 2, RETRY_MS[1]);
  }
}

function reason(error, timeout) {
  if (timeout.expired) return "no response from the gateway";
  return error instanceof TypeError ? "cannot reach the gateway" : error.message;
}

async function errorMessage(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the gateway returned status ${response.status}`;
  }
}

class Timeout {
  #abort = new AbortController();
  #timer = null;
  expired = false;

  get signal() {
    return this.#abort.signal;
  }

  restart() {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => {
      this.expired = true;
      this.#abort.abort();
    }, TIMEOUT_MS);
  }

  stop() {
    clearTimeout(this.#timer);
    this.#abort.abort();
  }
}

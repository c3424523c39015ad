// Keeps the stream open: a new one after a pause when it ends or falls silent.

import { events } from "./events.js";
import { authorized } from "./key.js";

const SILENT_MS = 6000;
const PAUSE_MS = [500, 15_000];

export async function follow(model, changed, say) {
  let pause = PAUSE_MS[0];
  while (true) {
    const silence = new Silence();
    try {
      say("connecting", "");
      const answer = await authorized("data/stream", { signal: silence.signal });
      if (!answer.ok) throw new Error(await refusal(answer));
      silence.heard();
      for await (const { event, data } of events(answer.body)) {
        silence.heard();
        const news = JSON.parse(data);
        if (event === "whole") model.whole(news);
        else model.delta(news);
        pause = PAUSE_MS[0];
        say("live", "ok");
        changed();
      }
      say("the gateway ended the stream", "bad");
    } catch (error) {
      say(reason(error, silence), "bad");
    } finally {
      silence.stop();
    }
    await new Promise((resolve) => setTimeout(resolve, pause * (0.75 + Math.random() / 2)));
    pause = Math.min(pause * 2, PAUSE_MS[1]);
  }
}

function reason(error, silence) {
  if (silence.over) return "no news from the gateway";
  return error instanceof TypeError ? "the gateway cannot be reached" : error.message;
}

async function refusal(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `the gateway answers ${answer.status}`;
  }
}

class Silence {
  #abort = new AbortController();
  #timer = null;
  over = false;

  get signal() {
    return this.#abort.signal;
  }

  heard() {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => {
      this.over = true;
      this.#abort.abort();
    }, SILENT_MS);
  }

  stop() {
    clearTimeout(this.#timer);
    this.#abort.abort();
  }
}

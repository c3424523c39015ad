// The chat box: streams an answer and says what it took.

import { $, el, write } from "./dom.js";
import { count, duration } from "./format.js";
import { events } from "./events.js";
import { authorized } from "./key.js";

const MOST_MESSAGES = 40;
const MOST_CHARACTERS = 200_000;

export class Chat {
  #log = $("#log");
  #question = $("#question");
  #model = $("#model");
  #messages = [];
  #running = null;
  #absent = el("div", { class: "said" }, el("p", { class: "facts wrong", text: "No model is served yet. Send again when one is." }));

  constructor() {
    $("#ask").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#ask();
    });
    this.#question.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.#ask();
      }
    });
    $("#stop").addEventListener("click", () => this.#running?.abort());
    $("#forget").addEventListener("click", () => {
      this.#running?.abort();
      this.#messages = [];
      this.#log.replaceChildren();
      this.#question.focus();
    });
  }

  show({ models }) {
    const offered = [...this.#model.options].map((option) => option.value);
    if (offered.join("\n") === models.join("\n")) return;
    const chosen = this.#model.value;
    this.#model.replaceChildren(...models.map((name) => el("option", { value: name, text: name })));
    if (models.includes(chosen)) this.#model.value = chosen;
  }

  async #ask() {
    const text = this.#question.value.trim();
    if (!text || this.#running) return;
    if (!this.#model.value) {
      if (!this.#absent.isConnected) this.#add(this.#absent);
      return;
    }
    this.#absent.remove();
    this.#question.value = "";
    this.#say("mine", text);
    this.#messages = [...this.#messages, { role: "user", content: text }].slice(-MOST_MESSAGES);
    const answer = new Answer();
    this.#add(answer.node);
    this.#busy(new AbortController());
    try {
      await this.#stream(answer);
    } catch (error) {
      answer.fail(error.name === "AbortError" ? "stopped" : error.message);
    } finally {
      if (answer.text) this.#messages.push({ role: "assistant", content: answer.text });
      this.#busy(null);
    }
    if (answer.id) await answer.lookUp();
  }

  async #stream(answer) {
    const body = { model: this.#model.value, messages: this.#messages, stream: true, stream_options: { include_usage: true } };
    const response = await authorized("../v1/chat/completions", {
      method: "POST", body: JSON.stringify(body), headers: { "content-type": "application/json" }, signal: this.#running.signal,
    });
    if (!response.ok) throw new Error((await response.json().catch(() => ({}))).error?.message ?? `the gateway answers ${response.status}`);
    answer.degraded(response.headers.get("x-sluice-degraded"));
    for await (const { data } of events(response.body)) {
      if (data === "[DONE]") return;
      const below = this.#log.scrollHeight - this.#log.scrollTop - this.#log.clientHeight < 40;
      answer.take(JSON.parse(data));
      if (below) this.#log.scrollTop = this.#log.scrollHeight;
    }
  }

  #say(kind, text) {
    this.#add(el("div", { class: `said ${kind}`, text }));
  }

  #add(node) {
    this.#log.append(node);
    while (this.#log.children.length > MOST_MESSAGES) this.#log.firstChild.remove();
    this.#log.scrollTop = this.#log.scrollHeight;
  }

  #busy(running) {
    this.#running = running;
    this.#log.setAttribute("aria-busy", running !== null);
    $("#send").disabled = running !== null;
    $("#stop").hidden = running === null;
  }
}

// One answer: its text as it comes, and the facts under it.
class Answer {
  node = el("div", { class: "said" });
  text = "";
  id = "";
  #body = document.createTextNode("");
  #thoughts = 0;
  #thought = el("span", { class: "thought" });
  #facts = el("p", { class: "facts", text: "…" });
  #asked = performance.now();
  #first = 0;
  #last = 0;
  #usage = null;
  #record = null;
  #degraded = "";

  constructor() {
    this.node.append(this.#thought, this.#body, this.#facts);
  }

  degraded(reasons) {
    this.#degraded = reasons ?? "";
  }

  take(chunk) {
    if (chunk.error) throw new Error(chunk.error.message);
    this.id = chunk.id ?? this.id;
    this.#usage = chunk.usage ?? this.#usage;
    const choice = chunk.choices?.[0];
    const delta = choice?.delta ?? {};
    if (choice?.degraded) this.degraded(choice.degraded.join(", "));
    if (delta.content || delta.reasoning_content) {
      this.#first ||= performance.now();
      this.#last = performance.now();
    }
    if (delta.reasoning_content && this.#thoughts < MOST_CHARACTERS) {
      this.#thoughts += delta.reasoning_content.length;
      this.#thought.append(delta.reasoning_content);
    }
    if (delta.content && this.text.length < MOST_CHARACTERS) {
      this.text += delta.content;
      this.#body.appendData(delta.content);
    }
    this.#tell();
  }

  fail(message) {
    this.node.append(el("p", { class: "facts wrong", text: message }));
    this.#tell();
  }

  // The gateway knows which worker it was, a moment after the end.
  async lookUp() {
    for (let attempt = 0; attempt < 3 && !this.#record; attempt += 1) {
      const answer = await authorized(`data/requests/${encodeURIComponent(this.id)}`).catch(() => null);
      if (answer?.ok) this.#record = await answer.json();
      else await new Promise((resolve) => setTimeout(resolve, 300));
    }
    this.#tell();
  }

  #tell() {
    const facts = [];
    const cached = this.#usage?.prompt_tokens_details?.cached_tokens ?? 0;
    if (this.#record) facts.push(this.#record.workers.join(" → "));
    if (this.#usage) facts.push(`${count(cached)} of ${count(this.#usage.prompt_tokens)} prompt tokens cached`);
    if (this.#first) facts.push(`first token after ${duration(this.#first - this.#asked)}`);
    const rate = this.#usage && ((this.#usage.completion_tokens - 1) * 1000) / (this.#last - this.#first);
    if (rate > 0 && Number.isFinite(rate)) facts.push(`${count(rate)} tokens/s`);
    if (this.#degraded) facts.push(`degraded: ${this.#degraded}`);
    write(this.#facts, facts.join(" · ") || "…");
  }
}

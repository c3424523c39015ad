// The chat: streams responses and shows their timings.

import { $, el, write } from "./dom.js";
import { count, duration } from "./format.js";
import { events } from "./events.js";
import { authorized } from "./key.js";

const MAX_MESSAGES = 40;
const MAX_CHARACTERS = 200_000;

export class Chat {
  #log = $("#log");
  #question = $("#question");
  #model = $("#model");
  #messages = [];
  #running = null;
  #noModel = el("div", { class: "said" }, el("p", { class: "facts wrong", text: "No model is available yet; try again later." }));

  constructor() {
    $("#chat-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    this.#question.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.#send();
      }
    });
    $("#stop").addEventListener("click", () => this.#running?.abort());
    $("#clear").addEventListener("click", () => {
      this.#running?.abort();
      this.#messages = [];
      this.#log.replaceChildren();
      this.#question.focus();
    });
  }

  show({ models }) {
    const current = [...this.#model.options].map((option) => option.value);
    if (current.join("\n") === models.join("\n")) return;
    const chosen = this.#model.value;
    this.#model.replaceChildren(...models.map((name) => el("option", { value: name, text: name })));
    if (models.includes(chosen)) this.#model.value = chosen;
  }

  async #send() {
    const text = this.#question.value.trim();
    if (!text || this.#running) return;
    if (!this.#model.value) {
      if (!this.#noModel.isConnected) this.#add(this.#noModel);
      return;
    }
    this.#noModel.remove();
    this.#question.value = "";
    this.#add(el("div", { class: "said mine", text }));
    this.#messages = [...this.#messages, { role: "user", content: text }].slice(-MAX_MESSAGES);
    const output = new ChatResponse();
    this.#add(output.node);
    this.#setRunning(new AbortController());
    try {
      await this.#stream(output);
    } catch (error) {
      output.fail(error.name === "AbortError" ? "stopped" : error.message);
    } finally {
      if (output.text) this.#messages.push({ role: "assistant", content: output.text });
      this.#setRunning(null);
    }
    if (output.id) await output.fetchRecord();
  }

  async #stream(output) {
    const body = { model: this.#model.value, messages: this.#messages, stream: true, stream_options: { include_usage: true } };
    const response = await authorized("../v1/chat/completions", {
      method: "POST", body: JSON.stringify(body), headers: { "content-type": "application/json" }, signal: this.#running.signal,
    });
    if (!response.ok) throw new Error((await response.json().catch(() => ({}))).error?.message ?? `the gateway returned status ${response.status}`);
    output.degraded(response.headers.get("x-sluice-degraded"));
    for await (const { data } of events(response.body)) {
      if (data === "[DONE]") return;
      const atEnd = this.#log.scrollHeight - this.#log.scrollTop - this.#log.clientHeight < 40;
      output.take(JSON.parse(data));
      if (atEnd) this.#log.scrollTop = this.#log.scrollHeight;
    }
  }

  #add(node) {
    this.#log.append(node);
    while (this.#log.children.length > MAX_MESSAGES) this.#log.firstChild.remove();
    this.#log.scrollTop = this.#log.scrollHeight;
  }

  #setRunning(running) {
    this.#running = running;
    this.#log.setAttribute("aria-busy", running !== null);
    $("#send").disabled = running !== null;
    $("#stop").hidden = running === null;
  }
}

// One response: its text, and below it the timings.
class ChatResponse {
  node = el("div", { class: "said" });
  text = "";
  id = "";
  #body = document.createTextNode("");
  #reasoningLength = 0;
  #reasoning = el("span", { class: "thought" });
  #facts = el("p", { class: "facts", text: "…" });
  #sentAt = performance.now();
  #firstAt = 0;
  #lastAt = 0;
  #usage = null;
  #record = null;
  #degraded = "";

  constructor() {
    this.node.append(this.#reasoning, this.#body, this.#facts);
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
      this.#firstAt ||= performance.now();
      this.#lastAt = performance.now();
    }
    if (delta.reasoning_content && this.#reasoningLength < MAX_CHARACTERS) {
      this.#reasoningLength += delta.reasoning_content.length;
      this.#reasoning.append(delta.reasoning_content);
    }
    if (delta.content && this.text.length < MAX_CHARACTERS) {
      this.text += delta.content;
      this.#body.appendData(delta.content);
    }
    this.#showFacts();
  }

  fail(message) {
    this.node.append(el("p", { class: "facts wrong", text: message }));
    this.#showFacts();
  }

  // Fetches the workers of the request, which are available shortly after its end.
  async fetchRecord() {
    for (let attempt = 0; attempt < 3 && !this.#record; attempt += 1) {
      const response = await authorized(`data/requests/${encodeURIComponent(this.id)}`).catch(() => null);
      if (response?.ok) this.#record = await response.json();
      else await new Promise((resolve) => setTimeout(resolve, 300));
    }
    this.#showFacts();
  }

  #showFacts() {
    const facts = [];
    const cached = this.#usage?.prompt_tokens_details?.cached_tokens ?? 0;
    if (this.#record) facts.push(this.#record.workers.join(" → "));
    if (this.#usage) facts.push(`${count(cached)} of ${count(this.#usage.prompt_tokens)} prompt tokens cached`);
    if (this.#firstAt) facts.push(`first token after ${duration(this.#firstAt - this.#sentAt)}`);
    const rate = this.#usage && ((this.#usage.completion_tokens - 1) * 1000) / (this.#lastAt - this.#firstAt);
    if (rate > 0 && Number.isFinite(rate)) facts.push(`${count(rate)} tokens/s`);
    if (this.#degraded) facts.push(`degraded: ${this.#degraded}`);
    write(this.#facts, facts.join(" · ") || "…");
  }
}

// The conversation: sending, streaming, stopping, editing, regenerating.

import { AnswerView, editNode, userNode } from "./answer.js";
import { loadMessages, saveMessages } from "./conversation.js";
import { byId, make, show } from "./dom.js";
import { events } from "./server.js";
import { Settings } from "./settings.js";
import { keptToken } from "./tokens.js";

const SUGGESTIONS = [
  "What is the capital of France?",
  "Write a Python function that reverses a string.",
  "Explain in three points why the sky is blue.",
];

export class Chat {
  /** onUnauthorized: called with the server's words where it wants another key. */
  constructor(onUnauthorized) {
    this.onUnauthorized = onUnauthorized;
    this.model = null;
    this.messages = loadMessages();
    this.views = new Map();
    this.running = null;
    this.editing = null;
    this.settings = new Settings(() => this.render());
    this.prompt = byId("prompt");
    this.scroller = byId("scroller");
    this.listen();
    this.render();
    this.scrollDown();
  }

  listen() {
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.sendPrompt();
    });
    this.prompt.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.sendPrompt();
    });
    this.prompt.addEventListener("input", () => this.fitPrompt());
    byId("stop").addEventListener("click", () => this.stop());
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.running) this.stop();
    });
    byId("clear").addEventListener("click", () => this.clear());
    for (const text of SUGGESTIONS) {
      byId("suggestions").append(make("button", { class: "suggestion", type: "button", text, onclick: () => this.send(text) }));
    }
  }

  fitPrompt() {
    this.prompt.style.height = "auto";
    this.prompt.style.height = `${this.prompt.scrollHeight + 2}px`;
  }

  sendPrompt() {
    const text = this.prompt.value;
    if (this.running || !text.trim()) return;
    this.prompt.value = "";
    this.fitPrompt();
    this.send(text);
  }

  send(text) {
    if (this.running) return;
    this.messages.push({ role: "user", content: text });
    this.answer();
  }

  stop() {
    this.running?.abort();
  }

  clear() {
    this.stop();
    this.messages = [];
    this.editing = null;
    saveMessages([]);
    this.render();
    this.prompt.focus();
  }

  /** Answer the conversation as far as before this place once more. */
  answerFrom(place) {
    if (this.running) return;
    this.messages.length = place;
    this.answer();
  }

  async answer() {
    const message = { role: "assistant", content: "" };
    const asked = this.requestBody();
    this.messages.push(message);
    this.editing = null;
    const running = (this.running = new AbortController());
    this.render();
    this.scrollDown();
    try {
      if (this.settings.wrongField) throw new RangeError(`${this.settings.wrongField} has a value that it cannot have.`);
      await this.stream(message, asked, running.signal);
    } catch (error) {
      if (running.signal.aborted) message.stopped = true;
      else message.error = error.message;
      if (error.status === 401) this.onUnauthorized(error.message);
    }
    this.running = null;
    if (this.messages.includes(message)) saveMessages(this.messages);
    this.render();
    byId("prompt").focus({ preventScroll: true });
  }

  requestBody() {
    const messages = this.messages
      .filter(({ role, content }) => role === "user" || content)
      .map(({ role, content }) => ({ role, content }));
    if (this.settings.systemPrompt) messages.unshift({ role: "system", content: this.settings.systemPrompt });
    const model = this.model === null ? {} : { model: this.model };
    return { ...model, messages, stream: true, stream_options: { include_usage: true }, ...this.settings.requestFields() };
  }

  async stream(message, body, signal) {
    const started = performance.now();
    const since = () => (performance.now() - started) / 1000;
    for await (const event of events("v1/chat/completions", body, signal)) {
      if (event.usage) message.usage = event.usage;
      const [choice] = event.choices;
      if (choice === undefined) continue;
      const { content, reasoning_content: reasoning } = choice.delta;
      const tokens = choice.logprobs?.content ?? [];
      if (content || reasoning || tokens.length) {
        message.firstToken ??= since();
        message.total = since();
      }
      if (content) message.content += content;
      if (reasoning) message.reasoning = (message.reasoning ?? "") + reasoning;
      if (tokens.length) (message.tokens ??= []).push(...tokens.map(keptToken));
      if (choice.finish_reason) message.ended = choice.finish_reason;
      this.renderSoon(message);
    }
  }

  /** Show what has come, at most once a frame. */
  renderSoon(message) {
    if (this.frame !== undefined) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = undefined;
      const atEnd = this.isAtEnd();
      this.views.get(message)?.update(this.settings.showsProbabilities, this.running !== null);
      if (atEnd) this.scrollDown();
    });
  }

  render() {
    const atEnd = this.isAtEnd();
    show(byId("welcome"), this.messages.length === 0);
    show(byId("clear"), this.messages.length > 0);
    show(byId("stop"), this.running !== null);
    show(byId("send"), this.running === null);
    for (const message of this.views.keys()) {
      if (!this.messages.includes(message)) this.views.delete(message);
    }
    byId("messages").replaceChildren(...this.messages.map((message, place) => this.node(message, place)));
    document.body.classList.toggle("is-running", this.running !== null);
    if (atEnd) this.scrollDown();
  }

  node(message, place) {
    if (message.role === "user") {
      if (this.editing === message) return this.editNode(message, place);
      return userNode(message, { edit: () => this.edit(message) });
    }
    let view = this.views.get(message);
    if (view === undefined) {
      view = new AnswerView(message, { regenerate: () => this.answerFrom(this.messages.indexOf(message)) });
      this.views.set(message, view);
    }
    const running = this.running !== null && place === this.messages.length - 1;
    view.update(this.settings.showsProbabilities, running);
    return view.element;
  }

  edit(message) {
    if (this.running) return;
    this.editing = message;
    this.render();
    const area = byId("messages").querySelector(".editing textarea");
    area.focus();
    area.setSelectionRange(area.value.length, area.value.length);
  }

  editNode(message, place) {
    return editNode(message, {
      cancel: () => {
        this.editing = null;
        this.render();
      },
      send: (text) => {
        this.messages.length = place;
        this.send(text);
      },
    });
  }

  isAtEnd() {
    const { scrollTop, scrollHeight, clientHeight } = this.scroller;
    return scrollHeight - scrollTop - clientHeight < 40;
  }

  scrollDown() {
    this.scroller.scrollTop = this.scroller.scrollHeight;
  }
}

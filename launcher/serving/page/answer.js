// One message of the conversation on the page.

import { copyText, make, show } from "./dom.js";
import { count, number, seconds } from "./format.js";
import { MarkdownView } from "./markdown.js";
import { TokensView } from "./tokens.js";

/** A user's message. actions: {edit()}. */
export function userNode(message, actions) {
  const text = make("div", { class: "text", text: message.content });
  const edit = make("button", { class: "quiet", type: "button", text: "Edit", onclick: () => actions.edit() });
  return make("article", { class: "message user", "aria-label": "You" }, text, make("div", { class: "foot" }, edit));
}

/** The form that a user's message becomes while it is edited. actions: {send(text), cancel()}. */
export function editNode(message, actions) {
  const area = make("textarea", { rows: Math.min(12, message.content.split("\n").length + 1), "aria-label": "Edit message" });
  area.value = message.content;
  const send = () => area.value.trim() && actions.send(area.value);
  area.addEventListener("keydown", (event) => {
    if (event.key === "Escape") actions.cancel();
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  return make(
    "article",
    { class: "message user editing" },
    area,
    make(
      "div",
      { class: "actions" },
      make("button", { class: "quiet", type: "button", text: "Cancel", onclick: () => actions.cancel() }),
      make("button", { class: "primary", type: "button", text: "Send", onclick: send }),
    ),
  );
}

/** A model's answer, shown as it grows. */
export class AnswerView {
  /** actions: {regenerate()}. */
  constructor(message, actions) {
    this.message = message;
    this.text = make("div", { class: "text markdown" });
    this.markdown = new MarkdownView(this.text);
    this.tokens = null;
    this.reasoning = make("details", { class: "reasoning" }, make("summary", { text: "Reasoning" }), make("div"));
    this.error = make("p", { class: "error", role: "alert" });
    this.facts = make("span", { class: "facts" });
    const copy = (this.copy = make("button", { class: "quiet", type: "button", text: "Copy", onclick: () => copyText(message.content, copy) }));
    const again = make("button", { class: "quiet", type: "button", text: "Regenerate", onclick: () => actions.regenerate() });
    this.foot = make("div", { class: "foot" }, copy, again, this.facts);
    this.element = make("article", { class: "message assistant", "aria-label": "Answer" }, this.reasoning, this.text, this.error, this.foot);
  }

  /** Show the message as it is now. byTokens: by its tokens where it has them; running: whether more will come. */
  update(byTokens, running) {
    const { message } = this;
    show(this.reasoning, Boolean(message.reasoning));
    this.reasoning.lastChild.textContent = message.reasoning ?? "";
    this.element.classList.toggle("running", running);
    this.element.setAttribute("aria-busy", String(running));
    if (byTokens && message.tokens?.length) this.showTokens();
    else this.showMarkdown();
    show(this.text, Boolean(message.content) || running);
    show(this.error, Boolean(message.error));
    this.error.textContent = message.error ?? "";
    show(this.foot, !running);
    show(this.copy, Boolean(message.content));
    this.facts.textContent = factsOf(message);
  }

  showTokens() {
    const { message } = this;
    if (this.tokens === null) this.replaceText("text tokens", (element) => (this.tokens = new TokensView(element)));
    this.tokens.update(message.tokens, endsInToken(message));
  }

  showMarkdown() {
    if (this.tokens !== null) {
      this.tokens.close();
      this.tokens = null;
      this.replaceText("text markdown", (element) => (this.markdown = new MarkdownView(element)));
    }
    this.markdown.update(this.message.content);
  }

  replaceText(className, fill) {
    const element = make("div", { class: className });
    this.text.replaceWith(element);
    this.text = element;
    fill(element);
  }
}

/** Whether the last token is none of the text: the one by which the model ended its answer. */
function endsInToken({ ended, tokens, content }) {
  return ended === "stop" && !content.endsWith(tokens.at(-1).token);
}

function factsOf({ usage, firstToken, total, ended, stopped }) {
  const facts = [];
  if (usage) {
    facts.push(count(usage.completion_tokens, "token"));
    if (total > firstToken && usage.completion_tokens > 1) {
      facts.push(`${number((usage.completion_tokens - 1) / (total - firstToken))} tokens/s`);
    }
  }
  if (firstToken !== undefined) facts.push(`first after ${seconds(firstToken)}`);
  if (usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens;
    facts.push(`prompt ${number(usage.prompt_tokens)}${cached ? `, ${number(cached)} cached` : ""}`);
  }
  if (stopped) facts.push("stopped");
  if (ended === "length") facts.push("cut off at its longest");
  return facts.join(" · ");
}

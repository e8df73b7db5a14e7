// An answer as its tokens: each tinted by its probability, with what else was likely in a tooltip.

import { byId, make } from "./dom.js";
import { percent } from "./format.js";

/** A token of the API as it is kept: its text and bytes, its log-probability, and the likeliest ones. */
export function keptToken(entry) {
  const pair = ({ token, logprob }) => [token, Math.round(logprob * 1e4) / 1e4];
  const [token, logprob] = pair(entry);
  const torn = token.startsWith("bytes:") || token.includes("\ufffd");
  return { token, logprob, bytes: torn ? entry.bytes : undefined, top: entry.top_logprobs.map(pair) };
}

/** Shows tokens in an element as they come. */
export class TokensView {
  constructor(element) {
    this.element = element;
    this.shown = 0;
    this.decoder = new TextDecoder();
    this.encoder = new TextEncoder();
    element.tabIndex = 0;
    element.setAttribute("role", "group");
    element.setAttribute("aria-label", "Answer by tokens. Left and right arrow keys go from token to token.");
    element.addEventListener("pointerover", (event) => this.open(event.target.closest(".token")));
    element.addEventListener("click", (event) => this.open(event.target.closest(".token")));
    element.addEventListener("pointerleave", () => this.close());
    element.addEventListener("blur", () => this.close());
    element.addEventListener("keydown", (event) => this.walk(event));
  }

  /** Show those of an answer's tokens that are not shown yet; ender: whether the last one only ends the answer. */
  update(tokens, ender) {
    for (; this.shown < tokens.length; this.shown += 1) {
      const token = tokens[this.shown];
      const last = ender && this.shown === tokens.length - 1;
      // The bytes of one character may be spread over several tokens: the last of them shows it.
      const bytes = token.bytes ? new Uint8Array(token.bytes) : this.encoder.encode(token.token);
      const text = last ? token.token : this.decoder.decode(bytes, { stream: true });
      const span = make("span", { class: last ? "token ender" : "token", text });
      span.style.setProperty("--doubt", (1 - Math.exp(token.logprob)).toFixed(3));
      span.kept = token;
      this.element.append(span);
    }
  }

  walk(event) {
    if (event.key === "Escape") this.close();
    if (event.key !== "ArrowRight" && event.key !== "ArrowLeft") return;
    const current = this.element.querySelector(".token.open");
    const next = event.key === "ArrowRight" ? current?.nextElementSibling ?? this.element.firstElementChild : current?.previousElementSibling;
    if (next) this.open(next);
    event.preventDefault();
  }

  open(span) {
    if (!span) return;
    this.close();
    span.classList.add("open");
    const tooltip = byId("tooltip");
    tooltip.replaceChildren(...tooltipNodes(span.kept));
    tooltip.hidden = false;
    const box = (span.getClientRects()[0] ?? span.getBoundingClientRect());
    const { width, height } = tooltip.getBoundingClientRect();
    const left = Math.min(Math.max(8, box.left + box.width / 2 - width / 2), innerWidth - width - 8);
    const above = box.top - height - 8;
    tooltip.style.left = `${left}px`;
    tooltip.style.top = `${above < 8 ? box.bottom + 8 : above}px`;
  }

  close() {
    this.element.querySelector(".token.open")?.classList.remove("open");
    byId("tooltip").hidden = true;
  }
}

function tooltipNodes(token) {
  const rows = token.top.some(([text]) => text === token.token) ? token.top : [...token.top, [token.token, token.logprob]];
  return [
    make("p", {}, make("code", { text: visible(token.token) }), ` ${percent(Math.exp(token.logprob))}`),
    make("table", {}, ...rows.map(([text, logprob]) => alternative(text, Math.exp(logprob), text === token.token))),
  ];
}

function alternative(text, probability, chosen) {
  const bar = make("span", { class: "bar-fill" });
  bar.style.width = `${100 * probability}%`;
  return make(
    "tr",
    { class: chosen ? "chosen" : null },
    make("th", { scope: "row" }, make("code", { text: visible(text) })),
    make("td", {}, make("span", { class: "bar-room" }, bar)),
    make("td", { class: "to-end", text: percent(probability) }),
  );
}

/** A token's text with its blanks made visible. */
function visible(text) {
  return text.replaceAll(" ", "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥") || "(nothing)";
}

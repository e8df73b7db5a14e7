// The panel of settings: system prompt, sampling, token probabilities.

import { loadSettings, saveSettings } from "./conversation.js";
import { byId, make, show } from "./dom.js";

const MOST_EXACT = Number.MAX_SAFE_INTEGER;
const FIELDS = [
  { name: "temperature", label: "Temperature", min: 0, max: 100, step: 0.05, usual: "1", help: "0 always takes the likeliest token" },
  { name: "top_p", label: "Top p", min: 0, max: 1, step: 0.01, usual: "1", help: "Keep the likeliest tokens up to this share" },
  { name: "top_k", label: "Top k", min: -1, step: 1, usual: "off", help: "Keep so many of the likeliest tokens" },
  { name: "min_p", label: "Min p", min: 0, max: 1, step: 0.01, usual: "0", help: "Drop tokens below this share of the likeliest one's probability" },
  { name: "max_tokens", label: "Max tokens", min: 1, step: 1, usual: "all there is room for", help: "Longest answer" },
  { name: "seed", label: "Seed", min: -MOST_EXACT, max: MOST_EXACT, step: 1, usual: "random", help: "The same seed gives the same answer" },
  { name: "presence_penalty", label: "Presence penalty", min: -2, max: 2, step: 0.1, usual: "0", help: "Against tokens the answer has" },
  { name: "frequency_penalty", label: "Frequency penalty", min: -2, max: 2, step: 0.1, usual: "0", help: "The same, for each time it has them" },
  { name: "repetition_penalty", label: "Repetition penalty", min: 0, max: 100, step: 0.05, usual: "1", help: "Above 1: against tokens of prompt and answer" },
];
const TOP_LOGPROBS = 5;

export class Settings {
  /** onchange: called after any change. */
  constructor(onchange) {
    this.form = byId("settings-form");
    this.panel = byId("settings");
    this.onchange = onchange;
    for (const field of FIELDS) byId("sampling-fields").append(fieldNode(field));
    this.fill(loadSettings());
    this.form.addEventListener("input", () => this.changed());
    this.form.addEventListener("submit", (event) => event.preventDefault());
    byId("reset-settings").addEventListener("click", () => {
      this.form.reset();
      this.changed();
    });
    byId("open-settings").addEventListener("click", () => this.open(this.panel.hidden));
    byId("close-settings").addEventListener("click", () => this.open(false));
    this.panel.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.open(false);
    });
  }

  open(visible) {
    show(this.panel, visible);
    document.body.classList.toggle("with-settings", visible);
    byId("open-settings").setAttribute("aria-expanded", String(visible));
    (visible ? byId("system") : byId("open-settings")).focus();
  }

  fill(values) {
    for (const input of this.form.elements) {
      if (!(input.name in values)) continue;
      if (input.type === "checkbox") input.checked = values[input.name] === true;
      else input.value = values[input.name];
    }
  }

  changed() {
    const values = {};
    for (const input of this.form.elements) {
      if (input.type === "checkbox") values[input.name] = input.checked;
      else if (input.name && input.value !== "") values[input.name] = input.value;
    }
    saveSettings(values);
    this.onchange();
  }

  get showsProbabilities() {
    return this.form.elements.probabilities.checked;
  }

  get systemPrompt() {
    return byId("system").value;
  }

  /** The name of a field that holds no number it can have, or null. */
  get wrongField() {
    const wrong = FIELDS.find(({ name }) => !this.form.elements[name].validity.valid);
    return wrong ? wrong.label : null;
  }

  /** The fields of a request; those left empty are left to the server. */
  requestFields() {
    const fields = {};
    for (const { name } of FIELDS) {
      const { value, valueAsNumber } = this.form.elements[name];
      if (value !== "") fields[name] = valueAsNumber;
    }
    if (this.showsProbabilities) Object.assign(fields, { logprobs: true, top_logprobs: TOP_LOGPROBS });
    return fields;
  }
}

function fieldNode({ name, label, min, max, step, usual, help }) {
  const id = `field-${name}`;
  return make(
    "div",
    { class: "field" },
    make("label", { for: id, text: label }),
    make("input", { id, name, type: "number", inputmode: "decimal", min, max, step: step === 1 ? 1 : "any", placeholder: usual, title: help }),
  );
}

// The live view of the engine: asks for /v1/engine while it is looked at, and shows what has changed.

import { BlockMap } from "./blocks.js";
import { drawRates, drawSteps, stepAt } from "./charts.js";
import { byId, make, show } from "./dom.js";
import { count, number, percent, seconds } from "./format.js";
import { getJson } from "./server.js";
import { showRanks, showRequests } from "./tables.js";

const POLL_MS = 500;
const RETRY_MS = 2000;
const SPAN_SECONDS = 60;

export class EngineView {
  /** onUnauthorized: called with the server's words where it wants another key. */
  constructor(onUnauthorized) {
    this.onUnauthorized = onUnauthorized;
    this.watched = false;
    this.timer = undefined;
    this.samples = [];
    this.stepPlace = null;
    this.slots = new Map();
    this.map = new BlockMap(byId("blocks"), byId("blocks-readout"), (slot) => this.light(slot));
    legend("rates-legend", [["used", "generated, upwards"], ["prompt", "prompt tokens that were not cached, downwards"]]);
    legend("steps-legend", [["used", "decoded tokens, upwards"], ["prompt", "prompt tokens, downwards"]]);
    document.addEventListener("visibilitychange", () => this.poll());
    addEventListener("resize", () => this.draw());
    byId("steps").addEventListener("pointermove", (event) => this.pointAtStep(event.offsetX));
    byId("steps").addEventListener("pointerleave", () => this.pointAtStep(null));
  }

  /** Begin or stop asking. */
  watch(watched) {
    this.watched = watched;
    this.poll();
  }

  async poll() {
    clearTimeout(this.timer);
    if (!this.watched || document.hidden || this.asking) return;
    let pause = POLL_MS;
    this.asking = true;
    try {
      this.show(await getJson("v1/engine"));
    } catch (error) {
      pause = RETRY_MS;
      this.showFailure(error);
    }
    this.asking = false;
    if (this.watched) this.timer = setTimeout(() => this.poll(), pause);
  }

  showFailure(error) {
    if (error.status === 401) this.onUnauthorized(error.message);
    byId("engine-notice").textContent = `${error.message.replace(/\.?$/, ".")} Trying again.`;
    show(byId("engine-notice"), true);
    byId("engine-body").classList.add("stale");
  }

  show(state) {
    this.state = state;
    this.slots = new Map(state.requests.filter(({ slot }) => slot >= 0).map(({ slot, id }) => [slot, id]));
    this.remember(state);
    show(byId("engine-notice"), false);
    show(byId("engine-body"), true);
    byId("engine-body").classList.remove("stale");
    this.draw();
  }

  /** Add rates since the sample before; an engine that was started anew begins its history anew. */
  remember({ taken, stats, steps }) {
    const prompt = stats.prompt_tokens - stats.cached_prompt_tokens;
    const last = this.samples.at(-1);
    if (last && taken < last.taken) this.samples = [];
    if (last && taken === last.taken) return; // the server had no newer one
    if (this.samples.length === 0) this.samples = samplesOf(steps, taken);
    const before = this.samples.at(-1);
    const between = taken - before.taken;
    this.samples.push({
      taken,
      generated: stats.generated_tokens,
      prompt,
      generatedRate: last ? (stats.generated_tokens - before.generated) / between : before.generatedRate,
      promptRate: last ? (prompt - before.prompt) / between : before.promptRate,
    });
    this.samples = this.samples.filter((sample) => taken - sample.taken <= SPAN_SECONDS);
  }

  draw() {
    if (!this.state || byId("engine").hidden) return;
    const { stats, blocks, steps, requests, ranks } = this.state;
    this.showFigures(stats);
    const values = (name) => this.samples.map((sample) => sample[name]);
    drawRates(byId("rates"), values("taken"), values("generatedRate"), values("promptRate"), SPAN_SECONDS);
    const { generatedRate, promptRate } = this.samples.at(-1);
    const rates = `Now ${number(generatedRate)} generated and ${number(promptRate)} prompt tokens per second`;
    byId("rates").setAttribute("aria-label", rates);
    byId("rates-readout").textContent = rates;
    drawSteps(byId("steps"), steps);
    byId("steps").setAttribute("aria-label", "Tokens of the latest steps");
    this.pointAtStep(this.stepPlace);
    this.showBlocks(stats, blocks);
    showRequests(byId("requests"), requests, stats, (slot) => this.light(slot));
    showRanks(byId("ranks"), ranks);
    this.light(this.lit ?? null);
  }

  /** Tell of the step at this place of the chart, and of the last one where it is null. */
  pointAtStep(x) {
    this.stepPlace = x;
    const { steps, taken } = this.state;
    const step = x === null ? steps.at(-1) : stepAt(byId("steps"), steps, x);
    const ago = step ? `, ${seconds(taken - step.planned)} ago` : "";
    byId("steps-readout").textContent = stepText(step) + ago;
  }

  showFigures(stats) {
    const { free, cached, used } = stats.blocks;
    const figures = [
      ["Tokens/s", number(this.samples.at(-1).generatedRate)],
      ["Running", number(stats.running)],
      ["Waiting", number(stats.waiting)],
      ["Cache in use", percent(used / (free + cached + used))],
      ["Prefix hits", stats.prompt_tokens ? percent(stats.cached_prompt_tokens / stats.prompt_tokens) : "–"],
      ["Preemptions", number(stats.preemptions)],
      ["Generated", number(stats.generated_tokens)],
      ["Steps", number(stats.steps)],
    ];
    byId("figures").replaceChildren(...figures.map(([name, value]) => make("div", {}, make("dt", { text: name }), make("dd", { text: value }))));
  }

  showBlocks(stats, blocks) {
    const shared = blocks.runs.reduce((sum, [cells, , inCell]) => sum + cells * inCell, 0);
    const { free, cached, used } = stats.blocks;
    legend("blocks-legend", [
      ["used", `${number(used - shared)} used`],
      ["shared", `${number(shared)} used by several`],
      ["cached", `${number(cached)} cached`],
      ["free", `${number(free)} free`],
    ]);
    byId("blocks").setAttribute("aria-label", `${number(used)} blocks used, ${number(cached)} cached, ${number(free)} free`);
    this.map.update(blocks, (slot) => this.slots.get(slot) ?? "a request that has just ended");
  }

  /** Have one request stand out, in the map and in the table. */
  light(slot) {
    this.lit = slot;
    this.map.light(slot);
    for (const row of byId("requests").querySelectorAll("tr")) {
      row.classList.toggle("lit", slot !== null && row.dataset.slot === String(slot));
    }
  }
}

/** What went on before anybody looked, as far as the latest steps tell. */
function samplesOf(steps, taken) {
  const width = POLL_MS / 1000;
  const windows = Math.ceil((taken - (steps[0]?.planned ?? taken)) / width) + 1;
  const samples = Array.from({ length: Math.min(windows, SPAN_SECONDS / width) }, (_, age) => ({
    taken: taken - (age + 1) * width,
    generatedRate: 0,
    promptRate: 0,
  }));
  for (const step of steps) {
    const sample = samples[Math.floor((taken - step.planned) / width)];
    if (sample === undefined) continue;
    sample.generatedRate += step.decode_tokens / width;
    sample.promptRate += step.prompt_tokens / width;
  }
  return samples.reverse();
}

function legend(id, entries) {
  byId(id).replaceChildren(...entries.map(([name, text]) => make("li", { class: `key-${name}`, text })));
}

function stepText(step) {
  if (!step) return "No step yet";
  const { rows, prompt_tokens: prompt, decode_tokens: decoded } = step;
  return `Step ${step.step}: ${count(rows, "row")}, ${count(prompt, "prompt token")}, ${number(decoded)} decoded`;
}

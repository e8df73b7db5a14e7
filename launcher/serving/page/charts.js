// The two charts of the engine view: tokens per second over time, and what each of the latest steps computed.

import { begin, colour, roundUp } from "./canvas.js";
import { number } from "./format.js";

const HEIGHT = 150;
const LABELS = 14;
const BAR = 4;

/** Lines over the last `span` seconds. series: [{colour, values}], parallel to times, which end now. */
export function drawRates(canvas, times, series, span) {
  const { context, width, height } = begin(canvas, HEIGHT);
  const top = roundUp(Math.max(1, ...series.flatMap(({ values }) => values)));
  const room = height - LABELS;
  const x = (time) => width * (1 - (times.at(-1) - time) / span);
  const y = (value) => room - (value / top) * (room - LABELS);
  grid(context, width, [[y(top), number(top)], [y(top / 2), number(top / 2)], [room, ""]]);
  label(context, 0, height - 2, `${span} s ago`, "start");
  label(context, width, height - 2, "now", "end");
  for (const { colour: name, values } of series) {
    context.beginPath();
    values.forEach((value, index) => context.lineTo(x(times[index]), y(value)));
    context.strokeStyle = colour(name);
    context.lineWidth = 2;
    context.lineJoin = "round";
    context.stroke();
    if (values.length < 2) continue;
    context.lineTo(width, room);
    context.lineTo(x(times[0]), room);
    context.globalAlpha = 0.12;
    context.fillStyle = colour(name);
    context.fill();
    context.globalAlpha = 1;
  }
}

/** Bars for the latest steps: decoded tokens upwards, prompt tokens downwards, each in a scale of its own. */
export function drawSteps(canvas, steps) {
  const { context, width, height } = begin(canvas, HEIGHT);
  const shown = steps.slice(-Math.floor(width / BAR));
  const most = (field) => roundUp(Math.max(1, ...shown.map((step) => step[field])));
  const [decodes, prompts] = [most("decode_tokens"), most("prompt_tokens")];
  const middle = height / 2;
  const room = middle - LABELS;
  grid(context, width, [[middle - room, number(decodes)], [middle, ""], [middle + room, ""]]);
  label(context, 0, middle + room + LABELS - 2, number(prompts), "start");
  shown.forEach((step, index) => {
    const left = width - (shown.length - index) * BAR;
    bar(context, left, middle, -(step.decode_tokens / decodes) * room, "used");
    bar(context, left, middle, (step.prompt_tokens / prompts) * room, "prompt");
  });
}

/** The step whose bar is at this place, if there is one. */
export function stepAt(canvas, steps, x) {
  return steps.at(-1 - Math.floor((canvas.clientWidth - x) / BAR));
}

function bar(context, left, from, length, name) {
  if (length === 0) return;
  const size = Math.sign(length) * Math.max(1.5, Math.abs(length)); // one token among thousands is still seen
  context.fillStyle = colour(name);
  context.fillRect(left, from, BAR - 1, size);
}

function grid(context, width, lines) {
  context.strokeStyle = colour("line");
  context.lineWidth = 1;
  for (const [y, text] of lines) {
    context.beginPath();
    context.moveTo(0, Math.round(y) - 0.5);
    context.lineTo(width, Math.round(y) - 0.5);
    context.stroke();
    label(context, 0, y - 3, text, "start");
  }
}

function label(context, x, y, text, align) {
  context.fillStyle = colour("faint");
  context.font = "11px system-ui, sans-serif";
  context.textAlign = align;
  context.fillText(text, x, y);
}

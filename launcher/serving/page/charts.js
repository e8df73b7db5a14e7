// The two charts of the engine view: tokens per second over time, and what each of the latest steps computed.

import { begin, colour, roundUp } from "./canvas.js";
import { number } from "./format.js";

const HEIGHT = 150;
const LABELS = 14;
const BAR = 4;

/** Areas over the last `span` seconds, the first value upwards, the second downwards, each in a scale of its own.
    times: ascending, the last of them now; values: of each. */
export function drawRates(canvas, times, upwards, downwards, span) {
  const frame = mirrored(canvas, Math.max(1, ...upwards), Math.max(1, ...downwards));
  const { context, width, middle, room } = frame;
  const x = (time) => width * (1 - (times.at(-1) - time) / span);
  for (const [values, most, sign, name] of [[upwards, frame.up, -1, "used"], [downwards, frame.down, 1, "prompt"]]) {
    context.beginPath();
    values.forEach((value, index) => context.lineTo(x(times[index]), middle + sign * (value / most) * room));
    context.strokeStyle = context.fillStyle = colour(name);
    context.lineWidth = 2;
    context.lineJoin = "round";
    context.stroke();
    context.lineTo(width, middle);
    context.lineTo(x(times[0]), middle);
    context.globalAlpha = 0.15;
    context.fill();
    context.globalAlpha = 1;
  }
}

/** Bars for the latest steps: decoded tokens upwards, prompt tokens downwards, each in a scale of its own. */
export function drawSteps(canvas, steps) {
  const shown = steps.slice(-Math.floor(canvas.clientWidth / BAR));
  const most = (field) => Math.max(1, ...shown.map((step) => step[field]));
  const { context, width, middle, room, up, down } = mirrored(canvas, most("decode_tokens"), most("prompt_tokens"));
  shown.forEach((step, index) => {
    const left = width - (shown.length - index) * BAR;
    bar(context, left, middle, -(step.decode_tokens / up) * room, "used");
    bar(context, left, middle, (step.prompt_tokens / down) * room, "prompt");
  });
}

/** A chart with an axis in its middle, and room for so much upwards and so much downwards. */
function mirrored(canvas, up, down) {
  const { context, width, height } = begin(canvas, HEIGHT);
  const [middle, room] = [height / 2, height / 2 - LABELS];
  [up, down] = [roundUp(up), roundUp(down)];
  context.strokeStyle = colour("line");
  context.lineWidth = 1;
  for (const y of [middle - room, middle, middle + room]) {
    context.beginPath();
    context.moveTo(0, Math.round(y) - 0.5);
    context.lineTo(width, Math.round(y) - 0.5);
    context.stroke();
  }
  context.fillStyle = colour("faint");
  context.font = "11px system-ui, sans-serif";
  context.fillText(number(up), 0, middle - room - 3);
  context.fillText(number(down), 0, middle + room + LABELS - 2);
  return { context, width, middle, room, up, down };
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

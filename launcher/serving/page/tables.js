// The tables of the engine view: who is served, and by whom.

import { make } from "./dom.js";
import { bytes, number, seconds } from "./format.js";

const MOST_ROWS = 100;
/** A rank at rest gives two signs of life a second. */
const SILENT_SECONDS = 5;

/** The requests that run or wait; onslot: called with the slot of the row that is pointed at, or null. */
export function showRequests(place, requests, stats, onslot) {
  if (requests.length === 0) {
    place.replaceChildren(make("p", { class: "empty", text: "No request is running. Send one from the chat, or from any client." }));
    return;
  }
  const rows = requests.slice(0, MOST_ROWS).map((request) => requestRow(request, onslot));
  const head = ["Request", "State", "Prompt", "Cached", "Generated", "Blocks", "Age"];
  const left = stats.running + stats.waiting - rows.length;
  place.replaceChildren(table(head, rows), ...(left > 0 ? [make("p", { class: "note", text: `and ${number(left)} more` })] : []));
}

function requestRow(request, onslot) {
  const { id, slot, prompt_tokens: prompt, computed_tokens: computed, generated_tokens: generated } = request;
  const running = slot >= 0;
  const row = make(
    "tr",
    { onpointerenter: () => onslot(running ? slot : null), onpointerleave: () => onslot(null) },
    make("td", {}, make("code", { text: short(id), title: id })),
    make("td", { text: stateOf(running, prompt, computed) }),
    ...[number(prompt), number(request.cached_tokens), number(generated), number(request.blocks), seconds(request.seconds)].map((text) =>
      make("td", { class: "to-end", text }),
    ),
  );
  if (running) row.dataset.slot = slot;
  return row;
}

function stateOf(running, prompt, computed) {
  if (!running) return "waiting";
  return computed < prompt ? `reading the prompt, ${number(computed)} done` : "generating";
}

/** chatcmpl-0123…cdef-0: both ends of a long id. */
function short(id) {
  return id.length > 24 ? `${id.slice(0, 15)}…${id.slice(-6)}` : id;
}

/** The ranks: where each runs, what its memory holds, and how long ago it last gave a sign of life. */
export function showRanks(place, ranks) {
  const head = ["Rank", "Device", "Weights", "Cache", "Workspace", "Memory in use", "Steps", "Last sign"];
  place.replaceChildren(table(head, ranks.map(rankRow)));
}

function rankRow(rank) {
  const alive = rank.silence < SILENT_SECONDS;
  const inUse = `${bytes(rank.memory_used)} of ${bytes(rank.memory_total)}`;
  const sizes = [rank.weights_bytes, rank.cache_bytes, rank.workspace_bytes].map(bytes);
  return make(
    "tr",
    {},
    make("td", {}, make("span", { class: alive ? "alive" : "silent", title: alive ? "Gives signs of life" : "Gives no sign of life" }), String(rank.rank)),
    make("td", { text: rank.device }),
    ...[...sizes, inUse, number(rank.steps), seconds(rank.silence)].map((text) => make("td", { class: "to-end", text })),
  );
}

function table(head, rows) {
  const names = head.map((text, index) => make("th", { scope: "col", class: rows[0]?.children[index]?.className || null, text }));
  return make("table", {}, make("thead", {}, make("tr", {}, ...names)), make("tbody", {}, ...rows));
}

// The tables of the engine view: who is served, and by whom.

import { make } from "./dom.js";
import { bytes, number, seconds } from "./format.js";

const MOST_ROWS = 100;

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

/** The ranks; facts: what the engine knows of each beyond its device, in the same order, where it does. */
export function showRanks(place, ranks, facts) {
  const columns = [...new Set((facts ?? []).flatMap(Object.keys))].filter((name) => name !== "rank" && name !== "device");
  const rows = ranks.map(({ rank, device }, index) =>
    make(
      "tr",
      {},
      make("td", {}, make("span", { class: "alive", title: "Its steps come in" }), String(rank)),
      make("td", { text: device }),
      ...columns.map((name) => make("td", { class: "to-end", text: fact(name, facts[index]?.[name]) })),
    ),
  );
  place.replaceChildren(table(["Rank", "Device", ...columns.map((name) => name.replaceAll("_", " "))], rows));
}

function fact(name, value) {
  if (value === undefined || value === null) return "–";
  if (typeof value !== "number") return String(value);
  if (/bytes|memory/.test(name)) return bytes(value);
  return /seconds|age/.test(name) ? seconds(value) : number(value);
}

function table(head, rows) {
  const names = head.map((text, index) => make("th", { scope: "col", class: rows[0]?.children[index]?.className || null, text }));
  return make("table", {}, make("thead", {}, make("tr", {}, ...names)), make("tbody", {}, ...rows));
}

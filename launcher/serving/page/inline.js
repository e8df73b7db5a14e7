// Markdown within a line: code, emphasis, links. Gives DOM nodes; text only ever becomes text nodes.

import { make } from "./dom.js";

const RULES = [
  { pattern: /(`+)([^`]|[^`][\s\S]*?[^`])\1(?!`)/y, node: (m) => make("code", { text: m[2].replace(/^ (.*[^ ].*) $/s, "$1") }) },
  { pattern: /\\([!-/:-@[-`{-~])/y, node: (m) => document.createTextNode(m[1]) },
  { pattern: /\*\*(?=\S)([\s\S]*?\S)\*\*(?!\*)/y, node: (m) => make("strong", {}, ...inline(m[1])) },
  { pattern: /\*(?=[^\s*])([\s\S]*?[^\s*])\*(?!\*)/y, node: (m) => make("em", {}, ...inline(m[1])) },
  { pattern: /__(?=\S)([\s\S]*?\S)__(?!\w)/y, atWord: true, node: (m) => make("strong", {}, ...inline(m[1])) },
  { pattern: /_(?=[^\s_])([\s\S]*?[^\s_])_(?!\w)/y, atWord: true, node: (m) => make("em", {}, ...inline(m[1])) },
  { pattern: /~~(?=\S)([\s\S]*?\S)~~/y, node: (m) => make("del", {}, ...inline(m[1])) },
  // An image is shown as a link to it: the page loads nothing from other hosts.
  { pattern: /!?\[([^\]]*)\]\(\s*<?([^\s<>()]*(?:\([^\s<>()]*\)[^\s<>()]*)*)>?(?:\s+["'(][^"')]*["')])?\s*\)/y, node: (m) => link(m[2], inline(m[1] || m[2])) },
  { pattern: /<(https?:\/\/[^\s<>]+)>/y, node: (m) => link(m[1], [m[1]]) },
  { pattern: /https?:\/\/[^\s<>()"'`*]*[^\s<>()"'`*.,:;!?]/y, atWord: true, node: (m) => link(m[0], [m[0]]) },
];
const SPECIAL = /[`\\*_~![<h]/g;

/** The nodes of a text. */
export function inline(text) {
  const nodes = [];
  let plain = 0;
  SPECIAL.lastIndex = 0;
  let place = nextSpecial(text, 0);
  while (place >= 0) {
    const [rule, match] = matchAt(text, place);
    if (match === null) {
      place = nextSpecial(text, place + 1);
      continue;
    }
    if (place > plain) nodes.push(document.createTextNode(text.slice(plain, place)));
    nodes.push(rule.node(match));
    plain = place + match[0].length;
    place = nextSpecial(text, plain);
  }
  if (plain < text.length) nodes.push(document.createTextNode(text.slice(plain)));
  return nodes;
}

function nextSpecial(text, from) {
  SPECIAL.lastIndex = from;
  return SPECIAL.exec(text)?.index ?? -1;
}

function matchAt(text, place) {
  for (const rule of RULES) {
    if (rule.atWord && place > 0 && /\w/.test(text[place - 1])) continue;
    rule.pattern.lastIndex = place;
    const match = rule.pattern.exec(text);
    if (match !== null) return [rule, match];
  }
  return [null, null];
}

function link(target, children) {
  if (!/^(https?:|mailto:)/i.test(target)) return make("span", {}, ...children);
  return make("a", { href: target, target: "_blank", rel: "noopener noreferrer nofollow", title: target }, ...children);
}

// Markdown as models write it, to DOM nodes: headings, paragraphs, lists, quotes, tables, rules and code blocks.
// Raw HTML is text like any other.

import { copyText, make } from "./dom.js";
import { inline } from "./inline.js";

const FENCE = /^(\s*)(`{3,}|~{3,})\s*([^`\s]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(?:\s+(.*))?$/;
const QUOTE = /^ {0,3}> ?/;
const TABLE_RULE = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;

const MOST_NESTED = 12; // deeper quotes and lists are text: no answer may be too much for the page

/** Shows a growing text in an element, making only those blocks anew that have changed. */
export class MarkdownView {
  constructor(element) {
    this.element = element;
    this.sources = [];
  }

  /** Show this text in place of the one before. */
  update(text) {
    const blocks = splitBlocks(text.split(/\r?\n/));
    blocks.forEach((block, index) => {
      const source = block.kind + "\n" + block.lines.join("\n");
      if (this.sources[index] === source) return;
      const node = renderBlock(block, 0);
      const old = this.element.childNodes[index];
      if (old) old.replaceWith(node);
      else this.element.append(node);
      this.sources[index] = source;
    });
    while (this.element.childNodes.length > blocks.length) this.element.lastChild.remove();
    this.sources.length = blocks.length;
  }
}

/** Lines grouped into blocks of one kind. */
function splitBlocks(lines) {
  const blocks = [];
  let index = 0;
  while (index < lines.length) {
    if (!lines[index].trim()) {
      index += 1;
      continue;
    }
    const kind = kindOf(lines, index);
    const end = endOf(kind, lines, index);
    blocks.push({ kind, lines: lines.slice(index, end) });
    index = end;
  }
  return blocks;
}

function kindOf(lines, index) {
  const line = lines[index];
  if (FENCE.test(line)) return "code";
  if (HEADING.test(line)) return "heading";
  if (RULE.test(line)) return "rule";
  if (QUOTE.test(line)) return "quote";
  if (ITEM.test(line)) return "list";
  if (line.includes("|") && index + 1 < lines.length && TABLE_RULE.test(lines[index + 1]) && lines[index + 1].includes("-")) {
    return cells(line).length === cells(lines[index + 1]).length ? "table" : "paragraph";
  }
  return "paragraph";
}

function endOf(kind, lines, start) {
  if (kind === "heading" || kind === "rule") return start + 1;
  if (kind === "code") {
    const fence = FENCE.exec(lines[start])[2];
    const close = lines.findIndex((line, at) => at > start && closesFence(line, fence));
    return close < 0 ? lines.length : close + 1; // a block still being written has no end yet
  }
  let index = start + 1;
  if (kind === "list") {
    const depth = ITEM.exec(lines[start])[1].length;
    while (index < lines.length && continuesList(lines, index, depth)) index += 1;
    return index;
  }
  while (index < lines.length && lines[index].trim()) {
    const next = kindOf(lines, index);
    if (kind === "table" ? !lines[index].includes("|") && index > start + 1 : next !== kind && next !== "paragraph") break;
    index += 1;
  }
  return index;
}

function closesFence(line, fence) {
  const text = line.trim();
  return text.length >= fence.length && text === fence[0].repeat(text.length);
}

function continuesList(lines, index, depth) {
  const line = lines[index];
  if (!line.trim()) {
    const next = lines.slice(index + 1).find((each) => each.trim());
    return next !== undefined && (ITEM.test(next) || /^\s{2,}\S/.test(next)) && !RULE.test(next);
  }
  if (RULE.test(line) || HEADING.test(line)) return false;
  if (FENCE.test(line)) return /^\s*/.exec(line)[0].length > depth;
  return true; // an item, or the next line of one
}

function renderBlock({ kind, lines }, depth) {
  switch (depth > MOST_NESTED ? "paragraph" : kind) {
    case "heading": {
      const [, marks, text] = HEADING.exec(lines[0]);
      return make(`h${Math.min(marks.length + 2, 6)}`, {}, ...inline(text)); // the page has h1 and h2 itself
    }
    case "rule":
      return make("hr");
    case "quote":
      return make("blockquote", {}, ...renderAll(lines.map((line) => line.replace(QUOTE, "")), depth + 1));
    case "code":
      return renderCode(lines);
    case "list":
      return renderList(lines, depth);
    case "table":
      return renderTable(lines);
    default:
      return make("p", {}, ...withBreaks(lines));
  }
}

function renderAll(lines, depth) {
  return splitBlocks(lines).map((block) => renderBlock(block, depth));
}

function withBreaks(lines) {
  const text = lines.map((line) => line.trimStart()).join("\n");
  return text.split(/ {2,}\n|\\\n/).flatMap((part, index) => (index ? [make("br"), ...inline(part)] : inline(part)));
}

function renderCode(lines) {
  const [, indent, fence, language] = FENCE.exec(lines[0]);
  const closed = lines.length > 1 && closesFence(lines.at(-1), fence);
  const body = lines.slice(1, closed ? -1 : undefined).map((line) => (line.startsWith(indent) ? line.slice(indent.length) : line));
  const text = body.join("\n");
  const copy = make("button", { class: "quiet", type: "button", text: "Copy", onclick: () => copyText(text, copy) });
  return make(
    "figure",
    { class: "code" },
    make("figcaption", {}, make("span", { text: language || "text" }), copy),
    make("pre", { tabindex: "0" }, make("code", { text })),
  );
}

function renderList(lines, depth) {
  const indent = ITEM.exec(lines[0])[1].length;
  const items = [];
  for (const line of lines) {
    const match = ITEM.exec(line);
    if (match && match[1].length <= indent + 1) items.push({ mark: match[2], lines: [match[3] ?? ""] });
    else items.at(-1).lines.push(line);
  }
  const first = items[0].mark;
  const ordered = /\d/.test(first);
  const loose = lines.some((line, index) => !line.trim() && index < lines.length - 1);
  const list = make(ordered ? "ol" : "ul", { start: ordered && parseInt(first, 10) !== 1 ? parseInt(first, 10) : null });
  for (const item of items) list.append(make("li", {}, ...itemNodes(item.lines, loose, depth + 1)));
  return list;
}

function itemNodes(lines, loose, depth) {
  const indents = lines.slice(1).filter((line) => line.trim()).map((line) => /^\s*/.exec(line)[0].length);
  const strip = indents.length ? Math.min(...indents) : 0;
  const [first, ...rest] = splitBlocks([lines[0], ...lines.slice(1).map((line) => line.slice(strip))]);
  if (first === undefined) return [];
  const head = first.kind === "paragraph" && !loose ? withBreaks(first.lines) : [renderBlock(first, depth)];
  return [...head, ...rest.map((block) => renderBlock(block, depth))];
}

function cells(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/(^|[^\\])\|$/, "$1");
  return inner.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function renderTable(lines) {
  const align = cells(lines[1]).map((mark) => (mark.endsWith(":") ? (mark.startsWith(":") ? "center" : "end") : "start"));
  const row = (line, tag) =>
    make("tr", {}, ...cells(line).slice(0, align.length).map((cell, index) => make(tag, { class: `to-${align[index]}` }, ...inline(cell))));
  const table = make("table", {}, make("thead", {}, row(lines[0], "th")), make("tbody", {}, ...lines.slice(2).map((line) => row(line, "td"))));
  return make("div", { class: "scroll" }, table);
}

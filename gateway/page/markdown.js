// Markdown as models write it, made into DOM nodes. Nothing of the text is ever read as HTML.
//
// `render` is called with a growing text, many times a second: blocks whose source is what it was
// keep their elements, so the cost is that of the last block, and a selection survives.

import { copyButton, el } from "./dom.js";

const FENCE = /^( {0,3})(`{3,}|~{3,})\s*([^`\s]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^ {0,3}([-*_])( *\1){2,} *$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])( +(.*))?$/;
const DIVIDER = /^ {0,3}\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)+\|?\s*$|^ {0,3}\|\s*:?-+:?\s*\|\s*$/;
const DEEPEST = 8;
// What stands between two marks is bounded, so that a text full of marks without partners is cheap.
const INLINE = new RegExp(
  [
    /\\([!-\/:-@[-`{-~])/, // 1: an escaped character
    /(`+)(?!`)(.{1,2000}?)(?<!`)\2(?!`)/, // 2, 3: code
    /\*\*(?=\S)(.{1,2000}?\S|\S)\*\*(?!\*)/, // 4: bold
    /(?<![\w_])__(?=\S)(.{1,2000}?\S|\S)__(?![\w_])/, // 5: bold
    /\*(?=[^\s*])([^*]{0,2000}?[^\s*])\*(?!\*)/, // 6: italic
    /(?<![\w_])_(?=[^\s_])([^_]{0,2000}?[^\s_])_(?![\w_])/, // 7: italic
    /~~(?=\S)(.{1,2000}?)~~/, // 8: struck out
    /!?\[([^\[\]]{0,500})\]\(\s*<?((?:[^\s()<>]|\([^\s()]{0,500}\)){1,2000})>?(?:\s+"[^"]{0,500}")?\s*\)/, // 9, 10: link
    /<?(https?:\/\/[^\s<>]{1,2000}[^\s<>.,:;"')\]!?*_~`])>?/, // 11: bare address
    / {2,}\n|\n/, // a line's end
  ]
    .map((part) => part.source)
    .join("|"),
  "s",
);

/** Make `container` show `text`. */
export function render(container, text) {
  const sources = split(text);
  const kept = [...container.children];
  sources.forEach((source, index) => {
    const old = kept[index];
    if (old?.markdownSource === source) return;
    const made = block(source, 0);
    made.markdownSource = source;
    if (old) old.replaceWith(made);
    else container.append(made);
  });
  kept.slice(sources.length).forEach((old) => old.remove());
}

// A text as the sources of its blocks.
function split(text) {
  const lines = text.replace(/\r\n?/g, "\n").split("\n");
  const sources = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const end = endOf(lines, at);
    sources.push(lines.slice(at, end).join("\n"));
    at = end;
  }
  return sources;
}

// Where the block that starts at a line ends.
function endOf(lines, start) {
  const first = lines[start];
  const fence = FENCE.exec(first);
  let at = start + 1;
  if (fence) {
    while (at < lines.length && !closes(lines[at], fence[2])) at += 1;
    return Math.min(at + 1, lines.length);
  }
  if (HEADING.test(first) || RULE.test(first)) return at;
  if (ITEM.test(first)) return endOfList(lines, start);
  const quoted = QUOTE.test(first);
  while (at < lines.length && lines[at].trim()) {
    if (quoted !== QUOTE.test(lines[at])) break;
    if (FENCE.test(lines[at]) || HEADING.test(lines[at]) || RULE.test(lines[at])) break;
    if (!quoted && startsList(lines[at])) break;
    at += 1;
  }
  return at;
}

// A number other than 1 in the middle of a paragraph is a number, not a list.
function startsList(line) {
  const item = ITEM.exec(line);
  return item !== null && Boolean(item[4]) && (/^[-*+]$/.test(item[2]) || /^1[.)]$/.test(item[2]));
}

function closes(line, fence) {
  const trimmed = line.trim();
  return trimmed.length >= fence.length && trimmed === fence[0].repeat(trimmed.length);
}

function endOfList(lines, start) {
  const indent = ITEM.exec(lines[start])[1].length;
  const ordered = isOrdered(lines[start]);
  let at = start + 1;
  let blank = false;
  let fence = null;
  for (; at < lines.length; at += 1) {
    const line = lines[at];
    if (fence) {
      if (closes(line, fence)) fence = null;
      continue;
    }
    if (!line.trim()) {
      blank = true;
      continue;
    }
    const deeper = line.search(/\S/) > indent;
    const item = ITEM.exec(line);
    const another = item && item[1].length >= indent && (deeper || isOrdered(line) === ordered) && !RULE.test(line);
    if (!another && !deeper && (blank || item || HEADING.test(line) || FENCE.test(line) || RULE.test(line) || QUOTE.test(line))) break;
    const opening = deeper && FENCE.exec(line.trimStart());
    if (opening) fence = opening[2];
    blank = false;
  }
  while (at > start + 1 && !lines[at - 1].trim()) at -= 1;
  return at;
}

function isOrdered(line) {
  return /^ *\d/.test(line);
}

function block(source, depth) {
  const lines = source.split("\n");
  const fence = FENCE.exec(lines[0]);
  if (fence) return code(lines, fence);
  const heading = HEADING.exec(lines[0]);
  // The page itself has the first two levels.
  if (heading) return el(`h${Math.min(heading[1].length + 2, 6)}`, {}, ...inline(heading[2], depth));
  if (RULE.test(lines[0])) return el("hr");
  if (depth < DEEPEST) {
    if (QUOTE.test(lines[0])) {
      const inner = lines.map((line) => QUOTE.exec(line)[1]).join("\n");
      return el("blockquote", {}, ...split(inner).map((part) => block(part, depth + 1)));
    }
    if (ITEM.test(lines[0])) return list(lines, depth);
  }
  if (lines.length > 1 && lines[0].includes("|") && DIVIDER.test(lines[1])) return table(lines, depth);
  return el("p", {}, ...inline(source.trim(), depth));
}

function code(lines, fence) {
  const last = lines.length > 1 && closes(lines[lines.length - 1], fence[2]) ? -1 : undefined;
  const indent = new RegExp(`^ {0,${fence[1].length}}`);
  const text = lines.slice(1, last).map((line) => line.replace(indent, "")).join("\n");
  return el(
    "figure",
    { className: "code" },
    el("figcaption", {}, el("span", {}, fence[3]), copyButton("Copy the code", () => text)),
    el("pre", { tabIndex: 0 }, el("code", {}, text)),
  );
}

function list(lines, depth) {
  const first = ITEM.exec(lines[0]);
  const indent = first[1].length;
  const items = [];
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item && item[1].length <= indent + 1 && !RULE.test(line)) {
      items.push({ width: line.length - (item[4] ?? "").length, lines: [item[4] ?? ""] });
    } else {
      const current = items[items.length - 1];
      current.lines.push(line.slice(Math.min(current.width, Math.max(line.search(/\S/), 0))));
    }
  }
  const ordered = isOrdered(lines[0]);
  const made = el(ordered ? "ol" : "ul", ordered ? { start: parseInt(first[2], 10) } : {});
  for (const item of items) {
    const parts = split(item.lines.join("\n")).map((part) => block(part, depth + 1));
    // A tight item is a line, not a paragraph.
    const flat = parts.flatMap((part, index) => (index === 0 && part.tagName === "P" ? [...part.childNodes] : [part]));
    made.append(el("li", {}, ...flat));
  }
  return made;
}

function table(lines, depth) {
  const cells = (line) => line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "").split(/(?<!\\)\|/);
  const row = (line, tag) =>
    el("tr", {}, ...cells(line).map((cell) => el(tag, {}, ...inline(cell.trim().replaceAll("\\|", "|"), depth))));
  return el(
    "div",
    { className: "table", tabIndex: 0 },
    el(
      "table",
      {},
      el("thead", {}, row(lines[0], "th")),
      el("tbody", {}, ...lines.slice(2).map((line) => row(line, "td"))),
    ),
  );
}

function inline(text, depth) {
  const nodes = [];
  let rest = text;
  while (rest) {
    const found = depth > DEEPEST ? null : INLINE.exec(rest);
    if (!found) {
      nodes.push(rest);
      break;
    }
    if (found.index) nodes.push(rest.slice(0, found.index));
    nodes.push(span(found, depth + 1));
    rest = rest.slice(found.index + found[0].length);
  }
  return nodes;
}

function span(found, depth) {
  const [whole, escaped, , code_, bold, boldToo, italic, italicToo, struck, label, address, bare] = found;
  if (escaped) return escaped;
  if (code_) return el("code", {}, code_.replace(/\n/g, " ").replace(/^ (.*\S.*) $/, "$1"));
  if (bold || boldToo) return el("strong", {}, ...inline(bold || boldToo, depth));
  if (italic || italicToo) return el("em", {}, ...inline(italic || italicToo, depth));
  if (struck) return el("del", {}, ...inline(struck, depth));
  if (address) return link(address, label ? inline(label, depth) : [address], whole);
  if (bare) return link(bare, [bare], whole);
  return el("br");
}

// Only addresses that leave this page and run nothing become links.
function link(address, children, whole) {
  if (!/^(https?:\/\/|mailto:)/i.test(address)) return whole;
  return el("a", { href: address, target: "_blank", rel: "noopener noreferrer" }, ...children);
}

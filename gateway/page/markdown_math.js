// LaTeX in Markdown, as a plugin of markdown-it: \(…\), \[…\], $…$, $$…$$ and \begin{…}…\end{…}.
//
// A formula becomes an element of class `math` with its LaTeX as text, which markdown.js typesets.

const LONGEST = 4000; // characters of a formula; limits the search for a missing end
const PAIRS = { "\\[": "\\]", "\\(": "\\)", $$: "$$" };
const ENVIRONMENT = /^\\begin\{([a-zA-Z]+\*?)\}/;
// Punctuation of the sentence after a formula on lines of its own.
const BEHIND = /^[\s.,;:]*$/;

export function math(markdown) {
  markdown.block.ruler.before("fence", "math_block", displayed, {
    alt: ["paragraph", "reference", "blockquote", "list"],
  });
  markdown.inline.ruler.before("escape", "math", inline);
  const escaped = markdown.utils.escapeHtml;
  const shown = (tokens, at) => {
    const { content, tag, meta } = tokens[at];
    const display = meta.display ? ' data-display=""' : "";
    return `<${tag} class="math" data-tex="${escaped(meta.tex)}"${display}>${escaped(content)}</${tag}>`;
  };
  markdown.renderer.rules.math = shown;
  markdown.renderer.rules.math_block = shown;
}

// A formula that begins at the start of a line and ends at the end of one. LaTeX formulas contain no
// empty lines, so the end is searched for only up to the next empty line.
function displayed(state, start, last, silent) {
  const line = (at) => state.getLines(at, at + 1, state.blkIndent, false);
  const first = line(start).trimStart();
  const environment = ENVIRONMENT.exec(first);
  const open = environment ? "" : first.slice(0, 2);
  const close = environment ? `\\end{${environment[1]}}` : open !== "\\(" && PAIRS[open];
  if (!close) return false;
  let text = first.slice(open.length);
  let at = start;
  while (!text.includes(close)) {
    at += 1;
    if (at >= last || state.isEmpty(at) || state.sCount[at] < state.blkIndent || text.length > LONGEST) return false;
    text += `\n${line(at)}`;
  }
  const end = text.indexOf(close);
  const behind = text.slice(end + close.length);
  if (!BEHIND.test(behind)) return false;
  if (silent) return true;
  const token = state.push("math_block", "div", 0);
  token.content = `${open}${text}`;
  token.meta = { tex: `${text.slice(0, end)}${environment ? close : ""}${behind}`.trim(), display: true };
  token.map = [start, at + 1];
  state.line = at + 1;
  return true;
}

function inline(state, silent) {
  const { src, pos, posMax } = state;
  const two = src.slice(pos, pos + 2);
  const found = PAIRS[two] ? between(src, pos + 2, posMax, PAIRS[two]) : src[pos] === "$" ? dollars(src, pos, posMax) : null;
  if (!found) {
    if (two !== "\\[" && two !== "\\(") return false;
    // The end is missing so far: this is more often LaTeX than an escaped bracket.
    if (!silent) state.pending += two;
    state.pos += 2;
    return true;
  }
  if (!silent) {
    const token = state.push("math", "span", 0);
    token.content = src.slice(pos, found.end);
    token.meta = { tex: src.slice(...found.inside).trim(), display: two === "\\[" || two === "$$" };
  }
  state.pos = found.end;
  return true;
}

function between(src, start, limit, close) {
  const end = src.slice(start, Math.min(limit, start + LONGEST)).indexOf(close) + start;
  return end > start ? { inside: [start, end], end: end + close.length } : null;
}

// Pandoc's rule, so that amounts of money are not formulas: no space follows the first $, no space
// comes before the second one, and no digit follows it.
function dollars(src, pos, limit) {
  const inside = /^\$(?![\s$])((?:[^$\\\n]|\\.)*?(?:[^\s\\$]|\\.))\$(?!\d)/.exec(src.slice(pos, Math.min(limit, pos + LONGEST)));
  return inside ? { inside: [pos + 1, pos + 1 + inside[1].length], end: pos + inside[0].length } : null;
}

// Renders the Markdown of models as DOM nodes.
//
// `render` is called with a growing text, many times a second. Blocks whose source has not changed
// keep their elements, so only the last block costs time, and a selection survives. markdown-it
// treats HTML as text; as a second line of defence, DOMPurify removes all that is not listed below.

import { copyButton, el } from "./dom.js";
import { codeColours, formulas } from "./libraries.js";
import { math } from "./markdown_math.js";
import MarkdownIt from "./vendor/markdown-it.esm.min.mjs";
import "./vendor/purify.min.js";

const GROWING_CODE = 4000; // characters up to which code is coloured while it is generated
const LINKS = /^(https?:\/\/|mailto:)/i;
const ALLOWED_TAGS =
  "a blockquote br code del div em figcaption figure h3 h4 h5 h6 hr input li ol p pre s span strong table tbody td th thead tr ul".split(
    " ",
  );
const ALLOWED_ATTR = "align aria-label checked class data-display data-tex disabled href rel start tabindex target type".split(" ");

const markdown = new MarkdownIt({ html: false, linkify: true, breaks: true });
// Models do not underline headings, and the first dash of a list would turn the line before it into
// a heading.
markdown.disable("lheading");
markdown.linkify.set({ fuzzyLink: false, fuzzyEmail: false });
// Only addresses outside this page that run no code become links.
markdown.validateLink = (address) => LINKS.test(address);
markdown.use(math);
markdown.inline.ruler.before("html_inline", "line_break", lineBreak);
markdown.core.ruler.after("inline", "tasks", tasks);

const { rules } = markdown.renderer;
const escaped = markdown.utils.escapeHtml;
rules.fence = (tokens, at) => figure(tokens[at].info.trim().split(/\s+/)[0], tokens[at].content);
rules.code_block = (tokens, at) => figure("", tokens[at].content);
rules.table_open = () => '<div class="table" tabindex="0"><table>';
rules.table_close = () => "</table></div>";
rules.th_open = rules.td_open = (tokens, at) => {
  const side = /text-align:(\w+)/.exec(tokens[at].attrGet("style") ?? "")?.[1];
  return side ? `<${tokens[at].tag} align="${side}">` : `<${tokens[at].tag}>`;
};
// The page itself uses the first two levels of headings.
rules.heading_open = rules.heading_close = (tokens, at) => {
  const level = Math.min(Number(tokens[at].tag[1]) + 2, 6);
  return `<${tokens[at].nesting < 0 ? "/" : ""}h${level}>`;
};
rules.link_open = (tokens, at) =>
  `<a href="${escaped(tokens[at].attrGet("href"))}" target="_blank" rel="noopener noreferrer">`;
// Fetching an image would reveal the reader to its server.
rules.image = (tokens, at) => {
  const address = escaped(tokens[at].attrGet("src"));
  return `<a href="${address}" target="_blank" rel="noopener noreferrer">${escaped(tokens[at].content) || address}</a>`;
};
rules.task = (tokens, at) =>
  `<input type="checkbox" disabled${tokens[at].content} aria-label="${tokens[at].content ? "done" : "to do"}"> `;

/** Make `container` show `text`; `growing`: more text will follow. */
export function render(container, text, growing = false) {
  const sources = split(text);
  const kept = [...container.children];
  sources.forEach((source, index) => {
    const old = kept[index];
    if (old?.markdownSource === source.key) return;
    const { made, complete } = block(source, old, growing && index === sources.length - 1);
    if (complete) made.markdownSource = source.key;
    if (old) old.replaceWith(made);
    else container.append(made);
  });
  kept.slice(sources.length).forEach((old) => old.remove());
}

// The top-level blocks of a text: {text, env, key}; blocks with the same key look the same.
function split(text) {
  const env = {};
  const normal = text.replace(/\r\n?/g, "\n").replace(/\0/g, "\ufffd");
  const tokens = [];
  markdown.block.parse(normal, markdown, env, tokens);
  const lines = normal.split("\n");
  const references = env.references ? JSON.stringify(env.references) : "";
  return tokens
    .filter((token) => token.level === 0 && token.map && token.type !== "reference_definition")
    .map(({ map: [start, end] }) => {
      const source = lines.slice(start, end).join("\n");
      return { text: source, env, key: source + references };
    });
}

function block(source, old, growing) {
  const fragment = DOMPurify.sanitize(markdown.render(source.text, source.env), {
    RETURN_DOM_FRAGMENT: true,
    ALLOWED_TAGS,
    ALLOWED_ATTR,
    ALLOW_DATA_ATTR: false,
  });
  keepFormulas(fragment, old);
  const complete = [...fragment.querySelectorAll("figure.code")].map((one) => finishCode(one, growing)).every(Boolean);
  const made = fragment.children.length === 1 ? fragment.firstElementChild : el("div", {}, fragment);
  return { made, complete };
}

function figure(language, code) {
  const text = code.replace(/\n$/, "");
  return (
    `<figure class="code"><figcaption><span>${escaped(language)}</span></figcaption>` +
    `<pre tabindex="0"><code>${escaped(text)}</code></pre></figure>`
  );
}

// Whether the block needs no more work when the text is complete.
function finishCode(element, growing) {
  const code = element.querySelector("code");
  const text = code.textContent;
  const caption = element.querySelector("figcaption");
  caption.append(copyButton("Copy the code", () => text));
  const language = caption.firstChild.textContent.toLowerCase();
  if (!language) return true;
  if (growing && text.length > GROWING_CODE) return false;
  codeColours((highlighter) => {
    if (!highlighter.getLanguage(language)) return;
    const { value } = highlighter.highlight(text, { language, ignoreIllegals: true });
    const coloured = { RETURN_DOM_FRAGMENT: true, ALLOWED_TAGS: ["span"], ALLOWED_ATTR: ["class"], ALLOW_DATA_ATTR: false };
    code.replaceChildren(DOMPurify.sanitize(value, coloured));
  });
  return true;
}

// Formulas that the block already showed are moved; new ones are typeset.
function keepFormulas(fragment, old) {
  const key = (place) => `${place.dataset.display} ${place.dataset.tex}`;
  const before = new Map([...(old?.querySelectorAll(".math") ?? [])].map((place) => [key(place), place]));
  for (const place of fragment.querySelectorAll(".math")) {
    const same = before.get(key(place));
    if (same) {
      before.delete(key(place));
      place.replaceWith(same);
    } else {
      formulas((typeset) => typeset(place, place.dataset.tex, place.dataset.display !== undefined));
    }
  }
}

// The one tag that models write in table cells, because Markdown has no line break there.
function lineBreak(state, silent) {
  const found = /^<br\s*\/?>/i.exec(state.src.slice(state.pos, state.pos + 8));
  if (!found) return false;
  if (!silent) state.push("hardbreak", "br", 0);
  state.pos += found[0].length;
  return true;
}

// `- [ ] to do` and `- [x] done` (GitHub Flavored Markdown, 5.3).
function tasks(state) {
  state.tokens.forEach((token, at) => {
    if (token.type !== "inline" || state.tokens[at - 2]?.type !== "list_item_open") return;
    const [first] = token.children;
    const found = first?.type === "text" && /^\[([ xX])\]\s+/.exec(first.content);
    if (!found) return;
    first.content = first.content.slice(found[0].length);
    const box = new state.Token("task", "", 0);
    box.content = found[1] === " " ? "" : " checked";
    token.children.unshift(box);
  });
}

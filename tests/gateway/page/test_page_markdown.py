"""The page's Markdown: known texts and random ones, in the browser."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.gateway.page.browser import Page
from tests.long import TEST_LONG, examples

# Line breaks between the tags of blocks are invisible.
RENDER = """
const done = arguments[1];
import('/page/markdown.js').then(({render}) => {
  const bare = (place) => {
    const copy = place.cloneNode(true);
    copy.querySelectorAll('button').forEach((one) => one.remove());
    return copy.innerHTML.replaceAll('>\\n', '>').replaceAll('\\n<', '<');
  };
  done(arguments[0].map((text) => {
    const place = document.createElement('div');
    render(place, text);
    return bare(place);
  }));
});
"""
GROW = """
const done = arguments[1];
import('/page/markdown.js').then(({render}) => {
  const growing = document.createElement('div');
  const letters = [...arguments[0]];
  letters.forEach((_, end) => render(growing, letters.slice(0, end + 1).join(''), true));
  render(growing, arguments[0]);
  const at_once = document.createElement('div');
  render(at_once, arguments[0]);
  done([growing.innerHTML, at_once.innerHTML]);
});
"""
# How many elements a growing text creates at its top level, and how many it ends with.
COUNT = """
const [text, step, done] = arguments;
import('/page/markdown.js').then(({render}) => {
  const place = document.createElement('div');
  let made = 0;
  const watch = new MutationObserver((changes) => {
    for (const {addedNodes} of changes) made += addedNodes.length;
  });
  watch.observe(place, {childList: true});
  let renders = 0;
  for (let end = step; end < text.length + step; end += step, renders += 1) {
    render(place, text.slice(0, end), true);
  }
  for (const {addedNodes} of watch.takeRecords()) made += addedNodes.length;
  done([made, renders, place.children.length]);
});
"""
# The libraries that are loaded on demand have done their work when `waiting` matches nothing.
SHOW = """
const [text, waiting, done] = arguments;
import('/page/markdown.js').then(({render}) => {
  const place = document.createElement('div');
  place.className = 'markdown';
  document.getElementById('transcript').replaceChildren(place);
  render(place, text);
  const look = () => (place.querySelector(waiting) ? setTimeout(look, 20) : done(true));
  look();
});
"""
CODE = (
    '<figure class="code"><figcaption><span>{}</span></figcaption>'
    '<pre tabindex="0"><code>{}</code></pre></figure>'
)
LINK = '<p><a href="{}" target="_blank" rel="noopener noreferrer">{}</a></p>'
CASES = [
    ("plain", "<p>plain</p>"),
    ("one\ntwo\n\nthree", "<p>one<br>two</p><p>three</p>"),
    (
        "**bold** and *it* and ***both***",
        "<p><strong>bold</strong> and <em>it</em> and <em><strong>both</strong></em></p>",
    ),
    ("__bold__ _it_ ~~old~~", "<p><strong>bold</strong> <em>it</em> <s>old</s></p>"),
    ("2 * 3 * 4, a_b_c, ** x **", "<p>2 * 3 * 4, a_b_c, ** x **</p>"),
    (r"\*not\* `a \* b`", r"<p>*not* <code>a \* b</code></p>"),
    ("``a`b``", "<p><code>a`b</code></p>"),
    ("# One\n## Two", "<h3>One</h3><h4>Two</h4>"),
    ("---", "<hr>"),
    ("- a\n- b\n  - c\n- d", "<ul><li>a</li><li>b<ul><li>c</li></ul></li><li>d</li></ul>"),
    ("3. a\n4. b", '<ol start="3"><li>a</li><li>b</li></ol>'),
    ("Text:\n- a\n- b", "<p>Text:</p><ul><li>a</li><li>b</li></ul>"),
    ("In\n2020. it rained", "<p>In<br>2020. it rained</p>"),
    ("> a\n> b", "<blockquote><p>a<br>b</p></blockquote>"),
    ("```py\nx < 1\n\ny\n```\nafter", CODE.format("py", "x &lt; 1\n\ny") + "<p>after</p>"),
    ("```\nopen", CODE.format("", "open")),
    (
        "1. a\n   ```\n   code\n   ```\n2. b",
        "<ol><li>a" + CODE.format("", "code") + "</li><li>b</li></ol>",
    ),
    (
        "| a | b |\n|---|:-:|\n| 1 | `x` |",
        (
            '<div class="table" tabindex="0"><table><thead><tr><th>a</th><th align="center">b</th>'
            '</tr></thead><tbody><tr><td>1</td><td align="center"><code>x</code></td></tr></tbody>'
            "</table></div>"
        ),
    ),
    (
        "[a *b*](https://a.org/x_(y)) https://a.org/a.",
        (
            '<p><a href="https://a.org/x_(y)" target="_blank" rel="noopener noreferrer">'
            "a <em>b</em></a> "
            '<a href="https://a.org/a" target="_blank" rel="noopener noreferrer">https://a.org/a</a>.</p>'
        ),
    ),
    (
        "[a](javascript:x) ![b](data:image/png;base64,AA)",
        "<p>[a](javascript:x) ![b](data:image/png;base64,AA)</p>",
    ),
    ("<b>x</b> &amp; &copy; <!-- y -->", "<p>&lt;b&gt;x&lt;/b&gt; &amp; © &lt;!-- y --&gt;</p>"),
    ("a<br>b<br />c", "<p>a<br>b<br>c</p>"),
    ("A line\n---\nmore", "<p>A line</p><hr><p>more</p>"),
    (
        "- [ ] a\n- [x] b",
        (
            '<ul><li><input type="checkbox" disabled="" aria-label="to do"> a</li>'
            '<li><input type="checkbox" disabled="" checked="" aria-label="done"> b</li></ul>'
        ),
    ),
    (
        "![a tree](https://a.org/tree.png)",
        LINK.format("https://a.org/tree.png", "a tree"),
    ),
    ("[a]\n\n[a]: https://a.org", LINK.format("https://a.org", "a")),
    ("It costs $5, then $10.", "<p>It costs $5, then $10.</p>"),
    (r"A \[ that does not end", r"<p>A \[ that does not end</p>"),
]
# Pieces with a meaning for the renderer, in any order.
MARKS = (
    "* ** _ ` ``` ~~~ ~~ [ ]( ) | |---|---| < > ! \\ https://a.bc word é 😀 $ $$ \\( \\) \\[ \\]"
).split()
PIECES = st.lists(
    st.sampled_from(
        [
            *MARKS,
            "- ",
            "- [ ] ",
            "1. ",
            "# ",
            "> ",
            "<br>",
            "[a]: https://b.c",
            " ",
            "  ",
            "\n",
            "\n\n",
        ]
    ),
    max_size=24,
).map("".join)
REPEATED = 3000 if TEST_LONG else 1000


# Each with the text that KaTeX must receive.
FORMULAS = [
    (r"Where \(x^2\) is", ["x^2"]),
    (r"Where \[ \vec{x} \] is", [r"\vec{x}"]),
    ("\\[\na\n+ b\n- c\n\\]\nand", ["a\n+ b\n- c"]),
    ("- one:\n\n  $$\n  a_1 * b_1 * c\n  $$\n- two", ["a_1 * b_1 * c"]),
    ("For $n > 0$ and $m$, $$n + m$$", ["n > 0", "m", "n + m"]),
    (
        r"\begin{align*}a &= b \\ c &= d\end{align*}",
        [r"\begin{align*}a &= b \\ c &= d\end{align*}"],
    ),
    ("| a |\n|---|\n| $x$ |", ["x"]),
]


def test_it_renders_what_models_write(page: Page) -> None:
    texts, expected = zip(*CASES, strict=True)
    shown = page.driver.execute_async_script(RENDER, texts)
    assert dict(zip(texts, shown, strict=True)) == dict(zip(texts, expected, strict=True))


def test_formulas_are_typeset(page: Page) -> None:
    for text, formulas in FORMULAS:
        page.driver.execute_async_script(SHOW, text, ".math:not(:has(.katex))")
        # KaTeX repeats the LaTeX, so that it can be copied with the formula.
        typeset = [one.get_property("textContent") for one in page.all("#transcript annotation")]
        assert typeset == formulas, text
    assert page.run("return document.fonts.check('1em KaTeX_Main')")


def test_text_that_is_not_latex_stays_as_written(page: Page) -> None:
    page.driver.execute_async_script(
        SHOW, r"One \(\frac{1\) and $2$", ".math:last-child:not(:has(.katex))"
    )
    assert page.text("#transcript p").startswith(r"One \(\frac{1\) and ")


def test_code_is_coloured_if_its_language_is_known(page: Page) -> None:
    known = "```python\nreturn 'a < b'\n```\n\n```klingon\nreturn\n```"
    page.driver.execute_async_script(SHOW, known, "figure:first-child code:not(:has(span))")
    words = [one.get_property("textContent") for one in page.all("#transcript code span")]
    assert words == ["return", "'a < b'"]
    assert page.text("#transcript code") == "return 'a < b'"


def test_growing_text_rebuilds_only_its_last_block(page: Page) -> None:
    blocks = ["A *paragraph* of words. " * 6, "- one\n- two", "```c\nint x;\n```", r"\[ x^2 \]"]
    text = "\n\n".join(blocks * 120)
    assert len(text) > 20_000
    made, renders, left = page.driver.execute_async_script(COUNT, text, 20)
    assert left == 480
    assert made <= renders + 2 * left


def test_growing_text_ends_as_if_rendered_at_once(page: Page) -> None:
    @settings(max_examples=examples(150), suppress_health_check=list(HealthCheck))
    @given(PIECES)
    def check(text: str) -> None:
        growing, at_once = page.driver.execute_async_script(GROW, text)
        assert growing == at_once

    check()


def test_text_that_is_made_to_be_slow_is_not_slow(page: Page) -> None:
    page.driver.set_script_timeout(240)
    marks = [
        "**a ",
        "*a",
        "_a ",
        "`a",
        "[a](",
        "~~a ",
        "> ",
        "- " * 3,
        "|",
        "\n- ",
        "https://a",
        "<",
        "``` ",
        "$a ",
        r"\(",
        "\\[a\n",
        "$$",
        "[a]: x\n",
        "&#",
        "| a ",
    ]
    page.driver.execute_async_script(RENDER, [mark * REPEATED for mark in marks])

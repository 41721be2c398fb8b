"""The page's Markdown: known texts, and any text at all, in the browser that will show it."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.gateway.page.browser import Page

RENDER = """
const done = arguments[1];
import('/page/markdown.js').then(({render}) => {
  const bare = (place) => {
    const copy = place.cloneNode(true);
    copy.querySelectorAll('button').forEach((one) => one.remove());
    return copy.innerHTML;
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
  letters.forEach((_, end) => render(growing, letters.slice(0, end + 1).join('')));
  const at_once = document.createElement('div');
  render(at_once, arguments[0]);
  done([growing.innerHTML, at_once.innerHTML]);
});
"""
CODE = (
    '<figure class="code"><figcaption><span>{}</span></figcaption>'
    '<pre tabindex="0"><code>{}</code></pre></figure>'
)
CASES = [
    ("plain", "<p>plain</p>"),
    ("one\ntwo\n\nthree", "<p>one<br>two</p><p>three</p>"),
    (
        "**bold** and *it* and ***both***",
        "<p><strong>bold</strong> and <em>it</em> and <strong><em>both</em></strong></p>",
    ),
    ("__bold__ _it_ ~~old~~", "<p><strong>bold</strong> <em>it</em> <del>old</del></p>"),
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
        '<ol start="1"><li>a' + CODE.format("", "code") + "</li><li>b</li></ol>",
    ),
    (
        "| a | b |\n|---|:-:|\n| 1 | `x` |",
        (
            '<div class="table" tabindex="0"><table><thead><tr><th>a</th><th>b</th></tr></thead>'
            "<tbody><tr><td>1</td><td><code>x</code></td></tr></tbody></table></div>"
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
    ("<b>x</b> &amp; <!-- y -->", "<p>&lt;b&gt;x&lt;/b&gt; &amp;amp; &lt;!-- y --&gt;</p>"),
]
# Pieces that mean something to the renderer, in any order.
MARKS = "* ** _ ` ``` ~~~ ~~ [ ]( ) | |---|---| < > ! \\ https://a.bc word é 😀".split()
PIECES = st.lists(
    st.sampled_from([*MARKS, "- ", "1. ", "# ", "> ", " ", "  ", "\n", "\n\n"]), max_size=24
).map("".join)


@pytest.mark.parametrize(("text", "expected"), CASES)
def test_it_reads_what_models_write(page: Page, text: str, expected: str) -> None:
    assert page.driver.execute_async_script(RENDER, [text]) == [expected]


def test_a_growing_text_ends_as_it_would_at_once(page: Page) -> None:
    @settings(max_examples=150, suppress_health_check=list(HealthCheck))
    @given(PIECES)
    def check(text: str) -> None:
        growing, at_once = page.driver.execute_async_script(GROW, text)
        assert growing == at_once

    check()


def test_texts_made_to_be_slow_are_not(page: Page) -> None:
    page.driver.set_script_timeout(60)
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
    ]
    page.driver.execute_async_script(RENDER, [mark * 3000 for mark in marks])

"""Text from models and users is only text on the page: nothing in it is run or loaded."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import httpx
import pytest
from selenium.webdriver.common.keys import Keys

from gateway.routes.page import FOLDER
from tests.gateway.gateway_process import TINY_TEXT, WAIT, GatewayProcess, tiny
from tests.gateway.page.browser import Page, sizes

HOSTILE = [
    "<img src=x onerror=\"document.title='run'\">",
    "<script>document.title='run'</script>",
    "[a](javascript:document.title='run')",
    "![a](http://127.0.0.1:9/tracker.png)",
    "<svg onload=\"document.title='run'\">",
    "`<b onmouseover=\"document.title='run'\">x</b>`",
    "<a href=\"javascript:document.title='run'\">x</a>",
    "<javascript:document.title='run'> [a][b]\n\n[b]: javascript:document.title='run'",
    "[a](data:text/html,<script>top.document.title='run'</script>)",
    "```\"><img src=x onerror=document.title='run'>\nx\n```",
    "| a |\n|:\"><img src=x onerror=document.title='run'>-:|\n| <script>1</script> |",
    r"$\href{javascript:document.title='run'}{x}$ $\htmlStyle{color:red}{x}$",
    r"\[\includegraphics{http://127.0.0.1:9/tracker.png} \text{<img src=x onerror=1>}\]",
    "$\"><img src=x onerror=document.title='run'>$",
]
BLOCKED = ["inline event handler", "inline script", "inline style", "tracker.png"]
RENDER = """
const [text, done] = arguments;
const load = [import('/page/markdown.js'), import('/page/libraries.js')];
Promise.all(load).then(([{render}, {formulas, codeColours}]) => formulas(() => codeColours(() => {
  const place = document.createElement('div');
  document.getElementById('transcript').append(place);
  render(place, text);
  const all = [...place.querySelectorAll('*')];
  done({
    names: all.filter((one) => !one.parentNode.closest('.math')).map((one) => one.localName),
    typeset: all.filter((one) => one.parentNode.closest('.math')).map((one) => one.localName),
    attributes: all.flatMap((one) => [...one.attributes].map(({name}) => name)),
    links: all.map((one) => one.getAttribute('href') ?? one.getAttribute('src')).filter(Boolean),
  });
  place.remove();
})));
"""
# HTML that two parsers read differently (mutation XSS), and forms that post the page.
HOSTILE_TABLE = (
    "<math><mtext><table><mglyph><style><!--</style><img title='--&gt;&lt;img src=1 "
    "onerror=document.title=&quot;run&quot;&gt;'></table></math>"
    "<form action=http://127.0.0.1:9/><input name=parentNode type=image src=x></form>"
)
BREAK_THE_READER = """
const [html, done] = arguments;
import('/page/vendor/markdown-it.esm.min.mjs').then(({default: reader}) => {
  reader.prototype.render = () => html;
  done(true);
});
"""
ALLOWED = set(
    "a blockquote br button code del div em figcaption figure h3 h4 h5 h6 hr input li ol p pre s"
    " span strong svg table tbody td th thead tr ul use".split()
)
# What KaTeX creates: no link, no image, nothing that loads.
TYPESET = set(
    "annotation math mfrac mi mn mo mpadded mrow mstyle msup mtext semantics span".split()
)


@pytest.fixture(scope="module")
def guarded() -> Iterator[GatewayProcess]:
    """A gateway with a key."""
    greedy = {"model": str(TINY_TEXT), "temperature": 0}
    process = GatewayProcess({"tiny": tiny(parameters=greedy)}, MLX_GATEWAY_API_KEYS="open-sesame")
    yield process
    process.close()


def check_harmless(page: Page, text: str) -> None:
    made = page.driver.execute_async_script(RENDER, text)
    assert set(made["names"]) <= ALLOWED, text
    assert set(made["typeset"]) <= TYPESET, text
    assert not [name for name in made["attributes"] if name.startswith("on")], text
    assert all(link.startswith(("http://127.0.0.1:9/", "#i-")) for link in made["links"]), text
    assert page.driver.title != "run"


def test_model_text_stays_text(page: Page) -> None:
    for text in HOSTILE:
        check_harmless(page, text)


def test_dangerous_html_that_the_markdown_library_passes_is_removed(page: Page) -> None:
    page.driver.execute_async_script(BREAK_THE_READER, "".join(HOSTILE))
    check_harmless(page, "anything")
    page.driver.execute_async_script(BREAK_THE_READER, HOSTILE_TABLE)
    check_harmless(page, "anything")
    # The policy also blocks what the sanitiser removes, and the browser reports it.
    assert all("Content Security" in one for one in page.problems())


def test_an_echoed_tag_is_shown_as_written(page: Page) -> None:
    page.ask(HOSTILE[0])
    page.answered()
    assert page.text(".question .bubble") == HOSTILE[0]
    assert page.all("#transcript img") == []
    assert page.driver.title != "run"


def test_the_policy_blocks_injected_markup(page: Page) -> None:
    page.run(
        "document.getElementById('notice').innerHTML = arguments[0];"
        "const tag = document.createElement('script');"
        "tag.textContent = \"document.title = 'run'\"; document.head.append(tag);",
        HOSTILE[0] + '<img src="http://127.0.0.1:9/tracker.png"><p style="color:red">x</p>',
    )
    reports: list[str] = []

    def blocked() -> list[str]:
        """Each read empties the browser's log, and the reports come one by one."""
        reports.extend(page.problems())
        return sorted(what for what in BLOCKED for one in reports if what in one)

    page.until(lambda: blocked() == sorted(BLOCKED))
    assert len(reports) == len(BLOCKED)
    assert all("Content Security" in one for one in reports)
    assert page.driver.title != "run"


def test_every_file_has_the_policy_and_nothing_else_is_served(gateway: GatewayProcess) -> None:
    paths = [
        "/",
        *(
            f"/page/{file.relative_to(FOLDER).as_posix()}"
            for file in FOLDER.rglob("*")
            if file.is_file() and file.suffix not in (".py", ".pyc", ".txt", ".LICENSE")
        ),
    ]
    assert len(paths) > 40
    for path in paths:
        response = gateway.client.get(path)
        assert response.status_code == 200
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        again = gateway.client.get(path, headers={"if-none-match": response.headers["etag"]})
        assert again.status_code == 304
    for path in (
        "/page/__init__.py",
        "/page/..%2Fapp.py",
        "/page/%2e%2e/app.py",
        "/page/x.js",
        "/page/vendor",
        "/page/vendor/SOURCES.txt",
        "/page/",
    ):
        refused = gateway.client.get(path)
        assert refused.status_code == 404, path
        assert refused.json()["error"]["message"]


def test_every_library_is_the_published_one() -> None:
    vendor = FOLDER / "vendor"
    lines = (vendor / "SOURCES.txt").read_text().splitlines()
    listed = {row[1]: row[0] for row in map(str.split, lines) if row and row[0] != "#"}
    there = {
        file.relative_to(vendor).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in vendor.rglob("*")
        if file.is_file() and file.name != "SOURCES.txt"
    }
    assert there == listed


@sizes(1)
def test_the_key_is_requested_and_forgotten_with_the_tab(
    page: Page, guarded: GatewayProcess, size: tuple[int, int]
) -> None:
    refused = httpx.get(f"{guarded.url}/api/status", trust_env=False, timeout=WAIT)
    assert refused.status_code == 401
    asked = Page(page.driver, guarded.url)
    asked.resize(*size)
    page.driver.get(guarded.url)
    page.until(lambda: page.find("#key-form").is_displayed())
    assert page.text("#key-form label") == "The gateway requires an API key."
    page.until(lambda: page.find("#status").text == "API key needed")
    assert page.focused() == "key"
    page.press("open-barley", Keys.ENTER)
    wrong = "The gateway does not accept this API key."
    page.until(lambda: page.text("#key-form label") == wrong)
    page.until(lambda: page.find("#status").text == "wrong API key")
    page.ask("What is 2 + 2?")
    page.answered()
    assert page.find(".answer .error").text == wrong
    box = page.find("#key-form").rect
    assert 0 <= box["y"] <= box["y"] + box["height"] <= size[1]
    page.until(lambda: page.focused() == "key")
    page.press("open-sesame")
    page.find("#key-form .solid").click()
    page.until(lambda: page.all("#model option"))
    assert not page.find("#key-form").is_displayed()
    page.find("[aria-label=Retry]").click()
    page.until(lambda: page.states() == ["done"])
    assert page.text(".answer .body") == "2 + 2 = 4"
    assert "open-sesame" not in str(page.run("return JSON.stringify({...localStorage})"))
    assert page.run("return Object.values({...sessionStorage})") == ["open-sesame"]
    page.run("sessionStorage.clear()")
    page.problems()


def test_a_stopped_gateway_is_reported_in_a_sentence(page: Page) -> None:
    short_lived = GatewayProcess({"tiny": tiny()})
    page.driver.get(short_lived.url)
    page.until(lambda: page.all("#model option"))
    short_lived.close()
    page.ask("What is 2 + 2?")
    page.answered()
    assert page.find(".answer .error").text == "The gateway cannot be reached. Is it still running?"
    page.until(lambda: page.find("#status").text == "no connection")

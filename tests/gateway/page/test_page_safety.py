"""What a model or a person writes is text on the page: nothing of it is run or fetched."""

from __future__ import annotations

import httpx
import pytest

from gateway.routes.page import FOLDER
from tests.gateway.gateway_process import TINY_TEXT, WAIT, GatewayProcess, tiny
from tests.gateway.page.browser import Page

HOSTILE = [
    "<img src=x onerror=\"document.title='run'\">",
    "<script>document.title='run'</script>",
    "[a](javascript:document.title='run')",
    "![a](http://127.0.0.1:9/tracker.png)",
    "<svg onload=\"document.title='run'\">",
    "`<b onmouseover=\"document.title='run'\">x</b>`",
    "<a href=\"javascript:document.title='run'\">x</a>",
]
BLOCKED = ["inline event handler", "inline script", "inline style", "tracker.png"]
RENDER = """
const done = arguments[1];
import('/page/markdown.js').then(({render}) => {
  const place = document.createElement('div');
  document.getElementById('transcript').append(place);
  render(place, arguments[0]);
  const names = [...place.querySelectorAll('*')].map((one) => one.localName);
  const links = [...place.querySelectorAll('a')].map((one) => one.href);
  const shown = place.textContent;
  place.remove();
  done([names, links, shown]);
});
"""
ALLOWED = set(
    "a blockquote br button code del div em figcaption figure h3 h4 h5 h6 hr li ol p pre span"
    " strong svg table tbody td th thead tr ul use".split()
)


@pytest.mark.parametrize("text", HOSTILE)
def test_model_text_stays_text(page: Page, text: str) -> None:
    names, links, _ = page.driver.execute_async_script(RENDER, text)
    assert set(names) <= ALLOWED
    assert all(link.startswith("http://127.0.0.1:9/") for link in links)
    assert page.driver.title != "run"


def test_an_echoed_tag_is_shown_as_it_was_written(page: Page) -> None:
    page.ask(HOSTILE[0])
    page.answered()
    assert page.text(".question .said") == HOSTILE[0]
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
        """Each look empties the browser's log, and the reports come one by one."""
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
            f"/page/{file.name}"
            for file in FOLDER.iterdir()
            if file.suffix != ".py" and file.is_file()
        ),
    ]
    assert len(paths) > 10
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
        "/page/",
    ):
        refused = gateway.client.get(path)
        assert refused.status_code == 404, path
        assert refused.json()["error"]["message"]


def test_the_key_is_asked_for_and_forgotten_with_the_tab(page: Page) -> None:
    greedy = {"model": str(TINY_TEXT), "temperature": 0}
    guarded = GatewayProcess({"tiny": tiny(parameters=greedy)}, MLX_GATEWAY_API_KEYS="open-sesame")
    try:
        refused = httpx.get(f"{guarded.url}/api/status", trust_env=False, timeout=WAIT)
        assert refused.status_code == 401
        page.driver.get(guarded.url)
        page.until(lambda: page.find("#settings").get_property("open"))
        assert page.find("#settings :focus").get_property("name") == "key"
        page.find("[name=key]").send_keys("open-sesame")
        page.find("#settings .solid").click()
        page.until(lambda: page.all("#model option"))
        page.ask("What is 2 + 2?")
        assert page.answered() == "2 + 2 = 4"
        assert "open-sesame" not in str(page.run("return JSON.stringify({...localStorage})"))
        assert page.run("return Object.values({...sessionStorage})") == ["open-sesame"]
        page.problems()
    finally:
        guarded.close()


def test_a_gateway_that_is_gone_is_said_in_a_sentence(page: Page) -> None:
    short_lived = GatewayProcess({"tiny": tiny()})
    page.driver.get(short_lived.url)
    page.until(lambda: page.all("#model option"))
    short_lived.close()
    page.ask("What is 2 + 2?")
    page.answered()
    assert page.find(".answer .error").text == "The gateway cannot be reached. Is it still running?"
    page.until(lambda: page.find("#status").text == "no connection")

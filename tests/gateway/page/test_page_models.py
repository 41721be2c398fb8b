"""Choosing a model: which one a new browser has, what is told of each, and the wait for a load."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.common.keys import Keys

from tests.gateway.gateway_process import ROOT, GatewayProcess, tiny
from tests.gateway.page.browser import Page, sizes

VISION = {"parameters": {"model": str(ROOT / "tests" / "models" / "tiny_vision")}}
# Records what the page says while an answer is waited for.
DROP = """
const done = arguments[1];
const canvas = document.createElement('canvas');
canvas.width = canvas.height = 40;
canvas.getContext('2d').fillRect(5, 5, 30, 30);
canvas.toBlob((blob) => {
  const transfer = new DataTransfer();
  transfer.items.add(new File([blob], 'square.png', {type: 'image/png'}));
  const target = document.querySelector(arguments[0]);
  for (const kind of ['dragover', 'drop']) {
    const given = {bubbles: true, cancelable: true, dataTransfer: transfer};
    target.dispatchEvent(new DragEvent(kind, given));
  }
  done(true);
}, 'image/png');
"""
# The gateway's status of its models while it downloads one, or while all slots are in use.
STATUS = """
const [changes] = arguments;
const ask = window.fetch;
window.fetch = async (path, ...rest) => {
  if (path === 'v1/chat/completions') return new Promise(() => {});
  const response = await ask(path, ...rest);
  if (path !== 'api/status') return response;
  const status = await response.json();
  for (const model of status.models) Object.assign(model, changes);
  return Response.json(status);
};
"""


@pytest.fixture(scope="module")
def several() -> Iterator[GatewayProcess]:
    """A gateway whose first model cannot be loaded."""
    process = GatewayProcess(
        {
            "a-broken": {"parameters": {"model": str(ROOT / "docs")}},
            "b-text": tiny(aliases=["gpt-4o-mini"]),
            "c-vision": VISION,
        }
    )
    yield process
    process.close()


@pytest.fixture
def page(chrome: Chrome, several: GatewayProcess) -> Iterator[Page]:
    """The page of that gateway in a fresh profile."""
    shown = Page(chrome, several.url)
    shown.open()
    yield shown
    assert shown.problems() == []


def state(gateway: GatewayProcess, name: str) -> str:
    models: list[dict[str, Any]] = gateway.client.get("/api/status").json()["models"]
    return next(str(model["state"]) for model in models if model["name"] == name)


def chosen(page: Page) -> str:
    return str(page.find("#model").get_property("value"))


def pick(page: Page, name: str) -> None:
    page.run(
        "const it = document.getElementById('model'); it.value = arguments[0];"
        "it.dispatchEvent(new Event('change'))",
        name,
    )


def test_a_failed_model_is_not_preselected_and_a_loaded_one_is(
    page: Page, several: GatewayProcess
) -> None:
    refused = several.client.post(
        "/v1/chat/completions",
        json={"model": "a-broken", "messages": [{"role": "user", "content": "a"}]},
    )
    assert refused.status_code >= 400
    # Another test may have loaded it.
    several.client.post("/models/unload", json={"model": "b-text"})
    page.open()
    assert chosen(page) == "b-text"
    several.client.post("/models/load", json={"model": "c-vision"})
    page.until(lambda: state(several, "c-vision") == "ready")
    page.open()
    assert chosen(page) == "c-vision"
    page.open(model="b-text")  # a choice is remembered
    assert chosen(page) == "b-text"
    several.client.post("/models/unload", json={"model": "c-vision"})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"state": "loading"}, r"Loading b-text \(\d+\.\d MiB\) … \d+ s"),
        (
            {"state": "loading", "download_mib": 512, "download_of_mib": 2048},
            r"Downloading b-text: 512 of 2048 MiB … \d+ s",
        ),
        (
            {"state": "ready", "running": 17, "slots": 16},
            r"All 16 slots of b-text are in use: waiting … \d+ s",
        ),
    ],
)
@sizes(0)
def test_the_reason_for_a_wait_is_shown_where_the_answer_will_be(
    page: Page, size: tuple[int, int], changes: dict[str, Any], expected: str
) -> None:
    page.open(*size, model="b-text")
    page.run(STATUS, changes)
    page.ask("What is 2 + 2?")
    page.until(lambda: re.fullmatch(expected, page.text(".answer .waiting")))
    page.find("#stop").click()


def test_an_alias_is_not_a_model_of_its_own(page: Page) -> None:
    names = page.run("return [...document.getElementById('model').options].map((one) => one.value)")
    assert names == ["a-broken", "b-text", "c-vision"]
    page.open(model="gpt-4o-mini")  # chosen on an earlier version of the page
    assert chosen(page) == "b-text"
    page.find("#status").click()
    page.until(lambda: "also named gpt-4o-mini" in page.text("#models-list"))


@sizes(1)
def test_each_model_is_offered_with_size_context_and_abilities(
    page: Page, size: tuple[int, int]
) -> None:
    page.open(*size)
    page.find("#model").click()
    options = page.all("#model option")
    page.until(lambda: page.all("#model:open"))
    text, vision = (option.get_property("textContent") for option in options[1:])
    assert re.fullmatch(r"b-text · \d+\.\d MiB · 1,024 tokens tools thinking", str(text)), text
    assert re.match(r"c-vision · \d+\.\d MiB · [\d,]+ tokens vision", str(vision)), vision
    assert page.run("return document.querySelector('#model option .badge').offsetWidth") > 0
    edge = page.run(
        "return Math.max(...[...document.querySelectorAll('#model .badge')]"
        ".map((one) => one.getBoundingClientRect().right))"
    )
    assert edge <= size[0]
    options[2].click()
    assert chosen(page) == "c-vision"
    assert page.find("#model").text.splitlines()[0] == "c-vision"
    page.reload()
    assert chosen(page) == "c-vision"


def test_a_conversation_returns_to_the_model_that_answered(page: Page) -> None:
    page.open()
    pick(page, "b-text")
    page.ask("What is 2 + 2?")
    page.answered()
    assert page.text(".answer .facts").startswith("b-text · ")
    page.find("#new").click()
    pick(page, "c-vision")
    page.find(".entry").click()
    assert chosen(page) == "b-text"


@sizes(0)
def test_an_image_is_not_attached_to_a_model_that_accepts_only_text(
    page: Page, size: tuple[int, int]
) -> None:
    page.open(*size, model="b-text", temperature="0")
    page.driver.execute_async_script(DROP, "#transcript")
    reason = "b-text accepts only text. The image was not attached."
    page.until(lambda: page.text("#notice") == reason)
    assert page.find("#notice").is_displayed()
    assert page.all("#attached img") == []
    # Nor is one sent that was attached for another model.
    pick(page, "c-vision")
    page.driver.execute_async_script(DROP, "#transcript")
    page.until(lambda: page.all("#attached img"))
    pick(page, "b-text")
    page.ask("What is in this image?")
    page.until(lambda: page.text("#notice").startswith("b-text accepts only text."))
    assert page.all(".question") == []
    assert page.find("#prompt").get_property("value") == "What is in this image?"
    page.find("[aria-label='Remove image 1']").click()
    page.press(Keys.ENTER)
    page.answered()
    assert page.all(".question .thumb") == []


def test_a_dropped_image_reaches_a_model_that_sees(page: Page) -> None:
    page.open(model="c-vision", temperature="0")
    page.driver.execute_async_script(DROP, "#transcript")
    page.until(lambda: page.all("#attached img"))
    page.ask("What is in this image?")
    assert page.answered()
    assert page.find(".question .thumb").get_property("naturalWidth") == 40
    # The next model reads the conversation without the image.
    pick(page, "b-text")
    page.ask("What is 3 + 4?")
    page.answered(2)
    assert page.states() == ["done", "done"]

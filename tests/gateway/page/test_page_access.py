"""The page used with the keyboard, on a narrow screen, and with a screen reader."""

from __future__ import annotations

import io

import pytest
from PIL import Image
from selenium.webdriver.common.keys import Keys

from tests.gateway.page.browser import Page

WIDE_TEXT = (
    "```\n"
    + "x" * 400
    + "\n```\n\n| "
    + " | ".join(["column"] * 30)
    + " |\n|"
    + "---|" * 30
    + "\n\n"
    + "y" * 400
    + "\n\n$$"
    + "z" * 300
    + "$$ https://example.org/"
    + "w" * 300
)
WIDE_TABLE = "| column" * 12 + "|\n" + "|---" * 12 + "|\n" + "| cell" * 12 + "|"
SHOW = """
const done = arguments[1];
import('/page/markdown.js').then(({render}) => {
  render([...document.querySelectorAll('.answer .body')].pop(), arguments[0]);
  done(true);
});
"""
UNNAMED = """
return [...document.querySelectorAll('button, input, select, textarea, a, img')]
  .filter((one) => !one.labels?.length && !one.getAttribute('aria-label'))
  .filter((one) => !one.alt && !one.textContent.trim())
  .map((one) => one.outerHTML)
"""


def tab_to(page: Page, name: str, *, back: bool = False) -> None:
    """Press Tab until the element has the focus; every stop on the way must be visible."""
    for _ in range(40):
        if back:
            page.press_back()
        else:
            page.press(Keys.TAB)
        unseen = page.run(
            # the body has the focus between two rounds of the page
            "const it = document.activeElement;"
            "return it !== document.body && getComputedStyle(it).outlineStyle === 'none'"
        )
        assert not unseen or page.focused() == "prompt", page.focused()
        if page.focused() == name:
            return
    raise AssertionError(f"Tab does not lead to {name!r}")


def test_everything_works_from_the_keyboard(page: Page) -> None:
    assert page.focused() == "prompt"
    page.press("What is 3 + 4?", Keys.ENTER)
    assert page.answered() == "3 + 4 = 7"
    assert page.focused() == "prompt"
    tab_to(page, "Retry", back=True)
    page.run("document.querySelector('.answer').dataset.old = 'yes'")
    page.press(Keys.ENTER)
    page.until(lambda: not page.all("[data-old]") and page.states() == ["done"])
    tab_to(page, "Edit and send again", back=True)
    page.press(Keys.ENTER)
    assert page.focused() == "Edit the message"
    page.press(Keys.ESCAPE)
    assert page.focused() == "Edit and send again"
    tab_to(page, "open-settings", back=True)
    page.press(Keys.ENTER)
    assert page.find("#settings").get_property("open")
    page.press(Keys.TAB, Keys.TAB, "Be brief.")
    page.press(Keys.ESCAPE)
    assert not page.find("#settings").get_property("open")
    assert page.find("[name=system]").get_property("value") == "Be brief."
    page.until(lambda: page.focused() == "open-settings")
    tab_to(page, "new", back=True)
    page.press(Keys.SPACE)
    assert page.all("article") == []


def test_shift_enter_starts_a_line(page: Page) -> None:
    field = page.find("#prompt")
    low = field.size["height"]
    field.send_keys("one", Keys.SHIFT, Keys.ENTER, Keys.SHIFT, "two")
    assert field.get_property("value") == "one\ntwo"
    assert page.all("article") == []
    assert field.size["height"] > low


@pytest.mark.parametrize("width", [360, 700, 1200])
def test_nothing_scrolls_sideways(page: Page, width: int) -> None:
    page.open(width, 740, model="tiny", temperature="0")
    page.ask("What is 3 + 4? " + "long" * 60)
    page.answered()
    page.driver.execute_async_script(SHOW, WIDE_TEXT)
    for selector in ("html", "body", "#scroller"):
        inner, outer = page.run(
            "const it = document.querySelector(arguments[0]);"
            "return [it.scrollWidth, it.clientWidth]",
            selector,
        )
        assert inner <= outer, selector
    edge = page.run("return document.getElementById('send').getBoundingClientRect().right")
    assert edge <= width


def test_the_list_of_conversations_opens_on_a_phone(page: Page) -> None:
    page.open(360, 740, model="tiny", temperature="0")
    page.ask("What is 3 + 4?")
    page.answered()
    assert not page.find("#sidebar").is_displayed()
    page.find("#open-sidebar").click()
    page.until(lambda: page.find(".entry").is_displayed())
    assert page.find("#open-sidebar").get_attribute("aria-expanded") == "true"
    page.press(Keys.ESCAPE)
    page.until(lambda: not page.find("#sidebar").is_displayed())
    assert page.focused() == "open-sidebar"


def test_turning_a_device_with_an_open_sidebar_leaves_no_cover(page: Page) -> None:
    page.open(360, 740, model="tiny", temperature="0")
    page.find("#open-sidebar").click()
    page.until(lambda: page.find("#veil").is_displayed())
    page.resize(1200, 800)
    page.find("#open-settings").click()
    page.until(lambda: page.find("dialog[open]").is_displayed())


def test_the_model_has_more_space_than_its_status_on_a_phone(page: Page) -> None:
    page.open(360, 740, model="tiny", temperature="0")
    page.run("document.getElementById('status-text').textContent = '25 tokens/s · 1 of 32 slots'")
    assert page.find("#status").size["width"] < page.find(".picker").size["width"]


def test_every_control_has_a_name_and_the_answer_is_announced(page: Page) -> None:
    page.ask("What is 3 + 4?")
    page.answered()
    assert page.run(UNNAMED) == []
    assert page.find("#transcript").get_attribute("aria-live") == "polite"
    assert page.find(".answer").get_attribute("aria-busy") == "false"
    assert page.run("return document.documentElement.lang") == "en"


@pytest.mark.parametrize("width", [390, 1280])
def test_an_answer_follows_its_question_closely(page: Page, width: int) -> None:
    page.open(width, 844, model="tiny", temperature="0")
    page.ask("What is 3 + 4?")
    page.answered()
    gap = page.run(
        "return document.querySelector('.answer').getBoundingClientRect().top"
        " - document.querySelector('.bubble').getBoundingClientRect().bottom"
    )
    assert 0 < gap < 40


def edges(page: Page) -> list[int]:
    """The brightness of the table at its left and at its right edge, above its text."""
    image = Image.open(io.BytesIO(page.find(".table").screenshot_as_png)).convert("L")
    row = image.tobytes()[3 * image.width :]
    return [row[0], row[image.width - 1]]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_wide_table_shows_on_which_side_there_is_more(page: Page, theme: str) -> None:
    page.open(390, 844, model="tiny", temperature="0")
    page.find("#open-settings").click()
    page.choose("[name=theme]", theme)
    page.find("#settings .solid").click()
    page.ask("What is 3 + 4?")
    page.answered()
    page.driver.execute_async_script(SHOW, WIDE_TABLE)
    ground = page.run("return getComputedStyle(document.body).backgroundColor")
    plain = int(ground.removeprefix("rgb(").split(",")[0])
    left, right = edges(page)
    assert abs(left - plain) <= 3
    assert abs(right - plain) > 30
    page.run("const it = document.querySelector('.table'); it.scrollLeft = it.scrollWidth")
    left, right = edges(page)
    assert abs(left - plain) > 30
    assert abs(right - plain) <= 3


def test_the_tab_has_the_name_of_the_product_and_the_conversation(page: Page) -> None:
    assert page.driver.title == "mlx-backend"
    page.ask("What is 3 + 4?")
    page.answered()
    assert page.driver.title == "What is 3 + 4? · mlx-backend"
    page.find("#new").click()
    assert page.driver.title == "mlx-backend"


def test_the_skip_link_leads_to_the_message_field_of_the_same_conversation(page: Page) -> None:
    page.ask("What is 3 + 4?")
    page.answered()
    address = page.driver.current_url
    page.run("document.querySelector('.skip').focus()")
    page.press(Keys.ENTER)
    page.until(lambda: page.focused() == "prompt")
    assert page.driver.current_url == address
    assert len(page.all("article")) == 2


def test_escape_closes_the_list_of_models_and_stops_no_answer(page: Page) -> None:
    page.ask("Say la forever.")
    page.until(lambda: page.text(".answer .body"))
    page.find("#model").click()
    page.until(lambda: page.all("#model:open"))
    page.press(Keys.ESCAPE)
    page.until(lambda: not page.all("#model:open"))
    assert page.states() == ["running"]
    page.find("#prompt").click()
    page.press(Keys.ESCAPE)
    page.until(lambda: page.states() == ["stopped"])

"""Conversations: their versions, settings and titles, the search, and files that contain them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.common.keys import Keys

from tests.gateway.page.browser import Page

CLICK = 'document.querySelector(`[aria-label^="${arguments[0]}"]`).click()'
IMAGE = "data:image/png;base64,iVBORw0KGgo="
FILE: dict[str, Any] = {
    "format": "mlx-backend-chat",
    "version": 1,
    "conversations": [
        {
            "id": "1-2-3",
            "title": "From elsewhere",
            "updated": 1000,
            "settings": {"system": "Be brief.", "unknown": "left out"},
            "messages": [
                {"role": "user", "parent": -1, "content": "Hello?", "images": [IMAGE]},
                {"role": "assistant", "parent": 0, "content": "<b>Hi</b>", "state": "done"},
                {"role": "assistant", "parent": 0, "content": "Hello.", "state": "done"},
            ],
            "leaf": 1,
        }
    ],
}


def changed(**changes: Any) -> dict[str, Any]:
    """The exported file with a changed conversation."""
    return FILE | {"conversations": [FILE["conversations"][0] | changes]}


def message(**changes: Any) -> dict[str, Any]:
    """The exported file with a changed message."""
    return changed(messages=[FILE["conversations"][0]["messages"][0] | changes], leaf=0)


DAMAGED = [
    ({}, "contains no conversations"),
    (FILE | {"version": 2}, "has version 2"),
    (changed(leaf=3), "Conversation 1 of this file is damaged"),
    (changed(title=7), "is damaged"),
    (changed(messages=None), "is damaged"),
    (changed(settings={"temperature": "warm"}), "is damaged"),
    (changed(settings={"thinking": "maybe"}), "is damaged"),
    (message(parent=0), "is damaged"),
    (message(role="system"), "is damaged"),
    (message(content=["text"]), "is damaged"),
    (message(images=["http://127.0.0.1:9/tracker.png"]), "is damaged"),
    (message(files=[{"name": "a"}]), "is damaged"),
]


def press(page: Page, label: str) -> None:
    """Click the element with this name, visible or not: a pointer would make it visible."""
    page.run(CLICK, label)


def titles(page: Page) -> list[str]:
    found: list[str] = page.run(
        "return [...document.querySelectorAll('.entry')].map((one) => one.title)"
    )
    return found


def give(page: Page, folder: Path, content: str) -> str:
    """Import a file with this content; returns the page's message."""
    page.run("document.getElementById('notice').textContent = ''")
    file = folder / "import.json"
    file.write_text(content)
    page.find("#import-file").send_keys(str(file))
    return page.until(lambda: page.text("#notice"))


def test_a_retry_keeps_the_earlier_answer(page: Page) -> None:
    page.ask("What is 3 + 4?")
    first = page.answered()
    page.find("#open-settings").click()
    page.find("[name=max_tokens]").send_keys("2")
    page.find("[name=thinking]").send_keys("off")
    page.find("#settings .solid").click()
    press(page, "Retry")
    page.until(lambda: page.text(".answer .version") == "2 of 2" and page.states() == ["done"])
    second = page.text(".answer .body")
    assert second != first
    press(page, "Earlier version")
    assert page.text(".answer .body") == first
    assert page.text(".answer .version") == "1 of 2"
    # A new message belongs to the version that is shown.
    page.ask("What is 2 + 2?")
    page.answered(2)
    press(page, "Later version")
    assert page.text(".answer .body") == second
    assert len(page.all(".question")) == 1
    press(page, "Earlier version")
    assert len(page.all(".question")) == 2
    page.reload()
    page.find(".entry").click()
    assert len(page.all(".question")) == 2
    assert page.text(".answer .version") == "1 of 2"


def test_an_edit_keeps_the_earlier_question_with_its_answer(page: Page) -> None:
    page.ask("What is 3 + 4?")
    assert page.answered() == "3 + 4 = 7"
    press(page, "Edit and send again")
    field = page.find(".question textarea")
    field.clear()
    field.send_keys("What is 2 + 2?", Keys.ENTER)
    page.until(lambda: page.text(".question .version") == "2 of 2")
    assert page.answered() == "2 + 2 = 4"
    press(page, "Earlier version")
    assert page.text(".question .bubble") == "What is 3 + 4?"
    assert page.answered() == "3 + 4 = 7"


def test_each_conversation_has_its_own_settings(page: Page) -> None:
    page.find("#open-settings").click()
    page.find("[name=system]").send_keys("The secret code is 4711.")
    page.find("#settings .solid").click()
    page.ask("What is the secret code?")
    assert page.answered() == "The secret code is 4711."
    page.find("#new").click()
    page.find("#open-settings").click()
    assert page.find("[name=system]").get_property("value") == ""
    page.find("[name=system]").send_keys("The secret code is 1234.")
    page.find("#as-defaults").click()
    assert not page.find("#as-defaults").is_enabled()
    page.find("#settings .solid").click()
    page.reload()
    page.find("#open-settings").click()
    assert page.find("[name=system]").get_property("value") == "The secret code is 1234."
    page.find("#settings .solid").click()
    page.find(".entry").click()
    page.find("#open-settings").click()
    assert page.find("[name=system]").get_property("value") == "The secret code is 4711."
    page.find("#settings .solid").click()


def test_conversations_are_renamed_and_found(page: Page) -> None:
    page.ask("My name is Ada.")
    page.answered()
    page.find("#new").click()
    page.ask("What is 2 + 2?")
    page.answered()
    press(page, "Rename “My name")
    assert page.focused() == "New title"
    page.press("Who I am", Keys.ENTER)
    assert titles(page) == ["What is 2 + 2?", "Who I am"]
    assert page.focused() == "Who I am"
    press(page, "Rename “Who")
    page.press("not this", Keys.ESCAPE)
    page.reload()
    assert titles(page) == ["What is 2 + 2?", "Who I am"]
    search = page.find("#search")
    search.send_keys("WHO I")
    assert titles(page) == ["Who I am"]
    search.clear()
    search.send_keys("ada")  # in the text of a message
    assert titles(page) == ["Who I am"]
    search.send_keys(" nobody said this")
    assert page.text("#conversations") == "Nothing found"
    search.clear()
    search.send_keys(" ", Keys.BACKSPACE)
    assert len(titles(page)) == 2


def test_an_exported_file_can_be_imported(page: Page, tmp_path: Path) -> None:
    page.driver.execute_cdp_cmd(
        "Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)}
    )
    page.ask("What is 3 + 4?")
    page.answered()
    press(page, "Retry")
    page.until(lambda: page.text(".answer .version") == "2 of 2" and page.states() == ["done"])
    press(page, "Export “What")
    file = tmp_path / "What is 3  4.json"
    page.until(file.exists)
    exported = json.loads(file.read_text())
    assert [len(one["messages"]) for one in exported["conversations"]] == [3]
    assert "0 conversations" in give(page, tmp_path, file.read_text())
    page.run(CLICK, "Delete “")
    assert titles(page) == []
    assert "1 conversation imported" in give(page, tmp_path, file.read_text())
    page.reload()
    page.find(".entry").click()
    assert page.answered() == "3 + 4 = 7"
    assert page.text(".answer .version") == "2 of 2"
    page.ask("What is 2 + 2?")
    assert page.answered(2) == "2 + 2 = 4"


def test_a_file_from_elsewhere_is_taken_as_text(page: Page, tmp_path: Path) -> None:
    assert "1 conversation imported" in give(page, tmp_path, json.dumps(FILE))
    page.find(".entry").click()
    assert page.answered() == "<b>Hi</b>"
    page.find("#open-settings").click()
    assert page.find("[name=system]").get_property("value") == "Be brief."
    page.find("#settings .solid").click()
    page.find("[title='Later version']").click()
    assert page.answered() == "Hello."
    # Tab leads to the next step.
    assert page.focused() == "Earlier version"
    page.press(Keys.ENTER)
    assert page.answered() == "<b>Hi</b>"
    assert page.focused() == "Later version"


def test_invalid_imported_tools_are_refused_at_the_answer(page: Page, tmp_path: Path) -> None:
    give(page, tmp_path, json.dumps(changed(settings={"tools": "[{}]"})))
    page.find(".entry").click()
    page.ask("What is 2 + 2?")
    page.answered(2)
    assert page.find(".answer .error").text == ""
    assert page.all(".answer .error")[1].text == "Tools: entry 1 has no function.name."


def test_an_invalid_file_is_refused_with_a_message(page: Page, tmp_path: Path) -> None:
    assert "not JSON" in give(page, tmp_path, "{")
    for content, sentence in DAMAGED:
        assert sentence in give(page, tmp_path, json.dumps(content)), content
    assert titles(page) == []


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_theme_can_be_chosen(page: Page, theme: str) -> None:
    page.find("#open-settings").click()
    page.choose("[name=theme]", theme)
    page.find("#settings .solid").click()
    page.reload()
    shade = page.run("return getComputedStyle(document.body).backgroundColor")
    assert shade == {"light": "rgb(253, 253, 252)", "dark": "rgb(25, 26, 26)"}[theme]

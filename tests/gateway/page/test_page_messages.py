"""What can be done with a message: delete it, undo that, edit an answer, and let it continue."""

from __future__ import annotations

import json
from pathlib import Path

from selenium.webdriver.common.keys import Keys

from tests.gateway.page.browser import Page, sizes
from tests.gateway.page.test_page_conversations import give, press, titles

STORED = """
const done = arguments[0];
const opening = indexedDB.open('chat');
opening.onsuccess = () => {
  const reading = opening.result.transaction('messages').objectStore('messages').getAll();
  reading.onsuccess = () => { opening.result.close(); done(JSON.stringify(reading.result)); };
};
"""
COUNT = " ".join(map(str, range(1, 61)))


def shown(page: Page) -> list[str]:
    texts: list[str] = page.run(
        "return [...document.querySelectorAll('.bubble, .answer .body')]"
        ".map((one) => one.textContent)"
    )
    return texts


def undo(page: Page) -> None:
    """Click where nothing may cover the button."""
    page.find("#notice button").click()


@sizes(0)
def test_a_deleted_conversation_can_be_restored(page: Page, size: tuple[int, int]) -> None:
    page.open(*size, model="tiny", temperature="0")
    page.ask("What is 3 + 4?")
    page.answered()
    address = page.driver.current_url
    if page.find("#open-sidebar").is_displayed():
        page.find("#open-sidebar").click()
        page.until(lambda: page.find(".entry").is_displayed())
    press(page, "Delete “What")
    page.until(lambda: page.text("#notice").startswith("“What is 3 + 4?” was deleted."))
    assert titles(page) == shown(page) == []
    undo(page)
    assert titles(page) == ["What is 3 + 4?"]
    assert shown(page) == ["What is 3 + 4?", "3 + 4 = 7"]
    assert page.driver.current_url == address
    assert page.text("#notice") == ""
    page.driver.refresh()
    page.until(lambda: shown(page) == ["What is 3 + 4?", "3 + 4 = 7"])


def test_all_deleted_conversations_can_be_restored(page: Page) -> None:
    for question in ("What is 3 + 4?", "What is 2 + 2?"):
        page.ask(question)
        page.answered()
        page.find("#new").click()
    page.find("#forget").click()
    page.driver.switch_to.alert.accept()
    page.until(lambda: page.text("#notice").startswith("2 conversations were deleted."))
    assert titles(page) == []
    undo(page)
    page.reload()
    assert titles(page) == ["What is 2 + 2?", "What is 3 + 4?"]


def test_a_conversation_is_deleted_while_it_is_answered(page: Page) -> None:
    page.ask("Say la forever.")
    page.until(lambda: "la" in page.text(".answer .body"))
    press(page, "Delete “Say")
    page.until(lambda: titles(page) == [])
    assert not page.find("#stop").is_displayed()
    undo(page)
    assert page.states() == ["stopped"]
    assert "la" in page.text(".answer .body")


@sizes(1)
def test_one_message_is_deleted_and_restored(page: Page, size: tuple[int, int]) -> None:
    page.open(*size, model="tiny", temperature="0")
    page.ask("My name is Ada.")
    hello = page.answered()
    page.ask("What is 2 + 2?")
    page.answered(2)
    page.run("document.querySelectorAll('[title=\"Delete the answer\"]')[0].click()")
    page.until(lambda: len(shown(page)) == 3)
    assert shown(page) == ["My name is Ada.", "What is 2 + 2?", "2 + 2 = 4"]
    assert hello not in page.driver.execute_async_script(STORED)
    undo(page)
    everything = ["My name is Ada.", hello, "What is 2 + 2?", "2 + 2 = 4"]
    assert shown(page) == everything
    page.driver.refresh()
    page.until(lambda: shown(page) == everything)
    press(page, "Delete the message")
    page.until(lambda: shown(page) == everything[1:])
    page.driver.refresh()
    page.until(lambda: shown(page) == everything[1:])


def test_a_deleted_version_leaves_the_others(page: Page) -> None:
    page.ask("What is 3 + 4?")
    page.answered()
    press(page, "Retry")
    page.until(lambda: page.text(".answer .version") == "2 of 2" and page.states() == ["done"])
    press(page, "Delete the answer")
    page.until(lambda: not page.all(".version"))
    assert shown(page) == ["What is 3 + 4?", "3 + 4 = 7"]
    press(page, "Delete the answer")
    page.until(lambda: shown(page) == ["What is 3 + 4?"])
    page.ask("What is 2 + 2?")
    assert page.answered() == "2 + 2 = 4"


@sizes(0)
def test_an_answer_is_edited(page: Page, size: tuple[int, int]) -> None:
    page.open(*size, model="tiny", temperature="0")
    page.ask("My name is Ada.")
    first = page.answered()
    press(page, "Edit the answer")
    assert page.focused() == "Edit the text of the answer"
    page.press(Keys.ESCAPE)
    assert page.focused() == "Edit the answer"
    assert shown(page) == ["My name is Ada.", first]
    press(page, "Edit the answer")
    field = page.find(".answer textarea")
    field.clear()
    field.send_keys("The secret code is 4711.", Keys.ENTER)
    page.until(lambda: page.text(".answer .version") == "2 of 2")
    assert shown(page) == ["My name is Ada.", "The secret code is 4711."]
    assert "edited" in page.text(".answer .facts")
    press(page, "Earlier version")
    assert shown(page) == ["My name is Ada.", first]
    page.driver.refresh()
    page.until(lambda: shown(page) == ["My name is Ada.", first])


@sizes(1)
def test_a_stopped_answer_is_continued(page: Page, size: tuple[int, int]) -> None:
    page.open(*size, model="tiny", temperature="0")
    page.ask("Count to 60.")
    page.until(lambda: len(page.text(".answer .body")) > 20)
    page.find("#stop").click()
    page.until(lambda: page.states() == ["stopped"])
    part = page.text(".answer .body")
    assert COUNT.startswith(part.strip())
    press(page, "Continue")
    page.until(lambda: page.states() == ["done"])
    assert page.text(".answer .body") == COUNT
    assert not page.all(".version")
    page.driver.refresh()
    page.until(lambda: shown(page) == ["Count to 60.", COUNT])


def test_only_the_last_answer_can_continue(page: Page) -> None:
    page.ask("What is 3 + 4?")
    page.answered()
    page.ask("What is 2 + 2?")
    page.answered(2)
    first, last = page.all(".answer .resume")
    assert not first.is_displayed()
    assert last.is_displayed()


def test_the_model_of_an_answer_is_shown(page: Page, tmp_path: Path) -> None:
    page.ask("What is 3 + 4?")
    page.answered()
    assert page.text(".answer .facts").startswith("tiny · ")
    messages = [
        {"role": "user", "parent": -1, "content": "Hello?"},
        {"role": "assistant", "parent": 0, "content": "Hi.", "state": "done", "model": "other"},
    ]
    record = {"id": "1-2-3", "title": "a", "updated": 1, "messages": messages, "leaf": 1}
    file = {"format": "mlx-backend-chat", "version": 1, "conversations": [record]}
    give(page, tmp_path, json.dumps(file))
    page.all(".entry")[1].click()
    assert page.text(".answer .facts") == "other"


def test_a_deleted_message_is_not_found(page: Page) -> None:
    page.ask("What is 3 + 4?")
    page.answered()
    page.find("#search").send_keys("= 7")
    assert titles(page) == ["What is 3 + 4?"]
    press(page, "Delete the answer")
    page.until(lambda: page.text("#conversations") == "Nothing found")

"""Several tabs, addresses and reloads: no turn is lost, and where storage is blocked it says so."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from selenium.webdriver import Chrome

from tests.gateway.gateway_process import GatewayProcess
from tests.gateway.page import browser
from tests.gateway.page.browser import Page

ENDLESS = "Say la forever."
DEAF = "BroadcastChannel.prototype.postMessage = () => {}"
FULL = "const of = IDBTransaction.prototype; of.usual = of.commit; of.commit = of.abort"
EMPTIED = "IDBTransaction.prototype.commit = IDBTransaction.prototype.usual"
DELETE = "document.querySelector('[aria-label^=\"Delete “\"]').click()"
# What an earlier version of the page stored: one record, in which `parent` is a place in the list.
EARLIER = """
const [record, done] = arguments;
const opening = indexedDB.open('chat', 1);
opening.onupgradeneeded = () =>
  opening.result.createObjectStore('conversations', {keyPath: 'id'}).put(record);
opening.onsuccess = () => { opening.result.close(); done(true); };
"""
RECORD: dict[str, Any] = {
    "id": "1-2-3",
    "title": "From before",
    "updated": 1000,
    "settings": {},
    "messages": [
        {"role": "user", "parent": -1, "content": "Hello?"},
        {
            "role": "assistant",
            "parent": 0,
            "content": "Hi.",
            "state": "done",
            "reasoning": "",
            "calls": [],
            "facts": {},
        },
    ],
    "leaf": 1,
}


@pytest.fixture
def tabs(page: Page) -> Iterator[tuple[str, str]]:
    """Two tabs with the same conversation; the second is the current one."""
    page.ask("What is 3 + 4?")
    page.answered()
    address = page.driver.current_url
    first = page.driver.current_window_handle
    page.driver.switch_to.new_window("tab")
    second = page.driver.current_window_handle
    page.driver.get(address)
    page.until(lambda: page.all("#model option"))
    yield first, second
    page.problems()
    page.driver.close()
    page.driver.switch_to.window(first)


def questions(page: Page) -> list[str]:
    return [one.text for one in page.all(".question .bubble")]


def test_two_tabs_add_to_the_same_conversation(page: Page, tabs: tuple[str, str]) -> None:
    first, second = tabs
    page.driver.switch_to.window(first)
    page.ask("What is 2 + 2?")
    page.answered(2)
    page.driver.switch_to.window(second)
    page.until(lambda: questions(page) == ["What is 3 + 4?", "What is 2 + 2?"])
    assert page.answered(2) == "2 + 2 = 4"
    page.ask("My name is Ada.")
    page.answered(3)
    everything = ["What is 3 + 4?", "What is 2 + 2?", "My name is Ada."]
    page.driver.switch_to.window(first)
    page.until(lambda: questions(page) == everything)
    page.driver.refresh()
    page.until(lambda: questions(page) == everything)
    page.driver.switch_to.window(second)


def test_tabs_that_do_not_hear_of_each_other_lose_no_turn(
    page: Page, tabs: tuple[str, str]
) -> None:
    first, second = tabs
    page.driver.switch_to.window(first)
    page.run(DEAF)
    page.ask("What is 2 + 2?")
    page.answered(2)
    page.driver.switch_to.window(second)
    page.ask("My name is Ada.")
    page.answered(2)
    page.driver.refresh()
    page.until(lambda: len(questions(page)) == 2)
    shown = {questions(page)[1]}
    stepper = page.all(".question")[1]
    assert stepper.find_element("css selector", ".version").get_property("textContent") == "2 of 2"
    page.run("document.querySelectorAll('[title=\"Earlier version\"]')[0].click()")
    shown.add(questions(page)[1])
    assert shown == {"What is 2 + 2?", "My name is Ada."}


def test_a_deleted_conversation_disappears_in_every_tab(page: Page, tabs: tuple[str, str]) -> None:
    first, second = tabs
    page.driver.switch_to.window(first)
    page.run(DELETE)
    page.driver.switch_to.window(second)
    page.until(lambda: "deleted in another tab" in page.text("#notice"))
    assert page.all("article") == page.all(".entry") == []
    assert "#" not in page.driver.current_url


def test_a_conversation_that_another_tab_answers_is_deleted_and_restored(
    page: Page, tabs: tuple[str, str]
) -> None:
    first, second = tabs
    page.driver.switch_to.window(first)
    page.ask(ENDLESS)
    page.until(lambda: page.states() == ["done", "running"])
    page.driver.switch_to.window(second)
    page.until(lambda: page.states() == ["done", "running"])
    page.run(DELETE)
    page.until(lambda: not page.states())
    page.find("#notice button").click()
    assert page.states() == ["done", "stopped"]
    page.driver.switch_to.window(first)
    page.until(lambda: not page.find("#stop").is_displayed())
    page.driver.switch_to.window(second)


def test_what_a_full_storage_refused_is_stored_with_the_next_change(page: Page) -> None:
    page.ask("Count to 60.")
    page.until(lambda: page.text(".answer .body"))
    page.run(FULL)
    answer = page.answered()
    page.until(lambda: "storage is full" in page.text("#notice"))
    page.run(EMPTIED)
    page.ask("What is 2 + 2?")
    page.answered(2)
    page.driver.refresh()
    page.until(lambda: page.states() == ["done", "done"])
    assert page.text(".answer .body") == answer


def test_a_reload_comes_back_to_the_conversation(page: Page) -> None:
    page.ask("What is 3 + 4?")
    page.answered()
    address = page.driver.current_url
    page.driver.refresh()
    page.until(lambda: questions(page) == ["What is 3 + 4?"])
    page.find("#new").click()
    assert page.driver.current_url != address
    page.ask("What is 2 + 2?")
    page.answered()
    page.driver.back()
    page.until(lambda: questions(page) == ["What is 3 + 4?"])
    assert page.driver.current_url == address
    page.driver.forward()
    page.until(lambda: questions(page) == ["What is 2 + 2?"])


def test_an_unknown_address_is_a_new_conversation(page: Page) -> None:
    page.driver.get(page.url + "/#4-5-6")
    page.until(lambda: page.all("#model option"))
    assert page.find("#welcome").is_displayed()
    assert "#" not in page.driver.current_url


def test_a_reload_keeps_the_part_of_an_answer(page: Page) -> None:
    page.ask(ENDLESS)
    page.until(lambda: len(page.text(".answer .body")) > 20)
    page.driver.refresh()
    page.until(lambda: page.states() == ["stopped"])
    assert "la" in page.text(".answer .body")


def test_conversations_of_an_earlier_version_are_kept(page: Page) -> None:
    page.driver.get(page.url + "/page/icon.svg")
    page.driver.execute_async_script(browser.FORGET)
    page.driver.execute_async_script(EARLIER, RECORD)
    page.driver.get(page.url + "/#1-2-3")
    page.until(lambda: questions(page) == ["Hello?"])
    assert page.answered() == "Hi."
    page.ask("What is 2 + 2?")
    page.answered(2)
    page.driver.refresh()
    page.until(lambda: questions(page) == ["Hello?", "What is 2 + 2?"])


BLOCK = """
for (const name of ['localStorage', 'sessionStorage', 'indexedDB'])
    Object.defineProperty(window, name, {
        get() { throw new DOMException('Access is denied for this document.', 'SecurityError') }
    });
"""


@pytest.fixture
def blocking() -> Iterator[Chrome]:
    """A browser that blocks the storage of every site.

    Chromium's headless shell, which packages contain, ignores the setting. There a script blocks
    the storage as Chromium does.
    """
    driver = browser.launch({"profile.default_content_setting_values.cookies": 2})
    driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": BLOCK})
    yield driver
    driver.quit()


def test_the_page_works_where_storage_is_blocked(blocking: Chrome, gateway: GatewayProcess) -> None:
    page = Page(blocking, gateway.url)
    blocking.set_window_size(1200, 800)
    blocking.get(gateway.url)
    page.until(lambda: page.all("#model option"))
    blocked = "try { localStorage.length; return false } catch { return true }"
    assert page.run(blocked)
    assert "blocks storage" in page.text("#kept-note")
    page.find("#open-settings").click()
    page.find("[name=temperature]").send_keys("0")
    page.choose("[name=theme]", "dark")
    page.find("#as-defaults").click()
    page.find("#settings .solid").click()
    assert page.run("return document.documentElement.dataset.theme") == "dark"
    page.ask("What is 3 + 4?")
    assert page.answered() == "3 + 4 = 7"
    page.find("#new").click()
    page.ask("What is 2 + 2?")
    assert page.answered() == "2 + 2 = 4"
    assert [one.text for one in page.all(".entry")] == ["What is 2 + 2?", "What is 3 + 4?"]
    assert page.problems() == []


def gone(page: Page, label: str) -> bool:
    return not page.all(f"[aria-label='{label}']")


def test_an_emptied_conversation_is_filled_in_another_tab(
    page: Page, tabs: tuple[str, str]
) -> None:
    first, second = tabs
    for label in ("Delete the answer", "Delete the message"):
        page.find(f"[aria-label='{label}']").click()
        page.until(partial(gone, page, label))
    page.driver.switch_to.window(first)
    page.until(lambda: page.all("article") == [])
    page.ask("What is 2 + 2?")
    page.answered()
    page.driver.switch_to.window(second)
    page.until(lambda: questions(page) == ["What is 2 + 2?"])

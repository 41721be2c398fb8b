"""A headless Chromium, and the few actions that a user performs on the page."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import Select, WebDriverWait

from common.child_environment import backend_environ
from tests.clients.environments import Browser, packaged_browser
from tests.long import TEST_LONG

BINARIES = ("chromium", "chromium-browser", "google-chrome", "chrome")
DRIVER = "chromedriver"
FORGET = """
const done = arguments[0];
indexedDB.deleteDatabase('chat').onsuccess = () => done(true);
"""
WAIT = 240.0  # seconds, on a busy machine too
SIZES = [(1280, 800), (390, 844)]  # of a window: of a desktop computer, of a telephone
_Result = TypeVar("_Result")

# Sources of log entries that are no fault of the page: tests provoke HTTP errors, and the browser
# logs each.
_NOT_OURS = ("network",)


def find() -> Browser:
    """The Chromium and driver on PATH or, on Linux x86, those of the clients' packages.

    Skips the test if there are none.
    """
    binary = next(filter(None, map(shutil.which, BINARIES)), None)
    driver = shutil.which(DRIVER)
    if binary and driver:
        return Browser(binary, driver)
    return packaged_browser()


def launch(preferences: dict[str, Any] | None = None) -> webdriver.Chrome:
    """A browser with an empty profile and these preferences. Skips the test if there is none."""
    found = find()
    options = webdriver.ChromeOptions()
    options.add_experimental_option("prefs", preferences or {})
    options.binary_location = found.binary
    flags = ["--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--no-proxy-server"]
    if os.geteuid() == 0:
        flags.append("--no-sandbox")  # Chromium's sandbox does not work for root
    for flag in flags:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    # OpenBLAS, preloaded for MLX, starts threads, with which Chromium's processes crash.
    environment = dict(backend_environ(os.environ, {})) | found.environment
    service = Service(found.driver, env=environment)
    return webdriver.Chrome(options=options, service=service)


def sizes(first: int) -> pytest.MarkDecorator:
    """A `size` for each window; without TEST_LONG only for the one with this number."""
    return pytest.mark.parametrize("size", SIZES if TEST_LONG else [SIZES[first]])


class Page:
    """The page of one gateway, as a user sees it."""

    def __init__(self, driver: webdriver.Chrome, url: str) -> None:
        self.driver = driver
        self.url = url

    def open(self, width: int = 1200, height: int = 800, **settings: str) -> None:
        """Load it as on a first visit, in a window of this size in CSS pixels."""
        self.resize(width, height)
        self.driver.get(self.url + "/page/icon.svg")
        self.run(
            "localStorage.clear(); sessionStorage.clear();"
            "localStorage.setItem('settings', JSON.stringify(arguments[0]))",
            settings,
        )
        self.driver.execute_async_script(FORGET)
        self.reload()

    def resize(self, width: int, height: int) -> None:
        """Give the window this size in CSS pixels."""
        self.driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False},
        )

    def reload(self) -> None:
        """Load it again, and wait until it has found its models."""
        self.driver.get(self.url)
        self.until(lambda: self.run("return document.getElementById('model').options.length > 0"))
        self.problems()

    def run(self, script: str, *arguments: Any) -> Any:
        """Run a script in the page."""
        return self.driver.execute_script(script, *arguments)

    def until(self, condition: Callable[[], _Result]) -> _Result:
        """Poll until the script returns something true, and return that."""
        waiting = WebDriverWait(
            self.driver, WAIT, 0.05, ignored_exceptions=[StaleElementReferenceException]
        )
        return waiting.until(lambda _: condition())

    def choose(self, selector: str, value: str) -> None:
        """Choose a value of a list; Chromium's headless shell does not let a user type it."""
        Select(self.find(selector)).select_by_value(value)

    def find(self, selector: str) -> WebElement:
        """The one element of a CSS selector."""
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list[WebElement]:
        """Every element of a CSS selector."""
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def press(self, *keys: str) -> None:
        """Press keys in the focused element."""
        ActionChains(self.driver).send_keys(*keys).perform()

    def press_back(self) -> None:
        """Shift+Tab."""
        chain = ActionChains(self.driver)
        chain.key_down(Keys.SHIFT).send_keys(Keys.TAB).key_up(Keys.SHIFT).perform()

    def ask(self, question: str) -> None:
        """Write into the message field and press Enter."""
        self.find("#prompt").send_keys(question, Keys.ENTER)

    def states(self) -> list[str]:
        """The state of every answer: running, done, stopped or failed."""
        states: list[str] = self.run(
            "return [...document.querySelectorAll('.answer')].map((one) => one.dataset.state)"
        )
        return states

    def answered(self, count: int = 1) -> str:
        """Wait for that many answers with none running; returns the text of the last."""
        self.until(lambda: len(self.states()) == count and "running" not in self.states())
        return self.text(".answer:last-child .body")

    def text(self, selector: str) -> str:
        """The text in an element, visible or not."""
        return str(self.run("return document.querySelector(arguments[0]).textContent", selector))

    def focused(self) -> str:
        """The id, label or text of the focused element."""
        return str(
            self.run(
                "const it = document.activeElement;"
                "return it.id || it.getAttribute('aria-label') || it.textContent.trim()"
            )
        )

    def problems(self) -> list[str]:
        """The browser's complaints since the last call: scripts, styles, policies."""
        log: list[dict[str, Any]] = self.driver.get_log("browser")  # type: ignore[no-untyped-call]
        return [
            f"{entry['source']}: {entry['message']}"
            for entry in log
            if entry["level"] in ("SEVERE", "WARNING") and entry["source"] not in _NOT_OURS
        ]

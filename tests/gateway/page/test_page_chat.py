"""A conversation on the page: with a real browser, a real gateway and a real model."""

from __future__ import annotations

import json
from typing import Any

import pytest
from selenium.webdriver.common.keys import Keys

from tests.gateway.gateway_process import GatewayProcess
from tests.gateway.page.browser import Page

ENDLESS = "Say la forever."
# Records the length of the answer whenever it changes, while it is being written.
WATCH = """
window.seen = [];
new MutationObserver(() => {
  const answer = document.querySelector('.answer[data-state=running] .body');
  const length = answer ? answer.textContent.length : 0;
  if (length && window.seen.at(-1) !== length) window.seen.push(length);
}).observe(document.body, {childList: true, subtree: true, characterData: true});
"""
# One script, because the list is rebuilt whenever an answer begins or ends.
CLICK_ENTRY = "document.querySelectorAll('.entry')[arguments[0]].click()"
# The gateway's status of its models while it downloads one.
DOWNLOADING = """
const [there, all] = arguments;
window.ask ??= window.fetch;
window.fetch = async (path, ...rest) => {
  const response = await window.ask(path, ...rest);
  if (path !== 'api/status') return response;
  const status = await response.json();
  Object.assign(status.models[0], {state: 'loading', download_mib: there, download_of_mib: all});
  return Response.json(status);
};
"""
# An answer of 20,000 characters that arrives in many more pieces than there are frames; counts how
# often it is rendered, and the frames.
FLOOD = """
window.paints = window.frames_ = 0;
const count = () => { window.frames_ += 1; requestAnimationFrame(count); };
requestAnimationFrame(count);
new MutationObserver((changes) => {
  if (changes.some(({target}) => target.closest?.('.body'))) window.paints += 1;
}).observe(document.getElementById('transcript'), {childList: true, subtree: true});
const ask = window.fetch;
window.fetch = (path, ...rest) => {
  if (path !== 'v1/chat/completions') return ask(path, ...rest);
  let left = 2000;
  const chunk = {choices: [{delta: {content: 'nine char\\n'}}]};
  const bytes = new TextEncoder().encode(`data: ${JSON.stringify(chunk)}\\n\\n`);
  const end = new TextEncoder().encode('data: [DONE]\\n\\n');
  return Promise.resolve(new Response(new ReadableStream({
    async pull(stream) {
      if (left % 5 === 0) await new Promise((go) => setTimeout(go));
      left -= 1;
      stream.enqueue(left < 0 ? end : bytes);
      if (left < 0) stream.close();
    },
  })));
};
"""
WEATHER = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the weather in a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]

SILENT = {"temperature": "0", "top_p": "1", "top_k": "0", "max_tokens": "no limit"}


def running(gateway: GatewayProcess) -> int:
    status: dict[str, Any] = gateway.client.get("/api/status").json()
    return int(status["models"][0]["running"])


def test_an_answer_is_shown_as_it_grows(page: Page) -> None:
    page.run(WATCH)
    page.ask(ENDLESS)
    page.until(lambda: page.run("return window.seen.length") >= 3)
    page.find("#stop").click()
    page.until(lambda: page.states() == ["stopped"])
    whole = len(page.text(".answer .body"))
    seen = page.run("return window.seen")
    assert seen == sorted(seen)
    assert seen[0] < seen[-1] <= whole


def test_stop_stops_and_frees_the_only_slot(page: Page, gateway: GatewayProcess) -> None:
    page.ask(ENDLESS)
    page.until(lambda: page.text(".answer .body"))
    assert running(gateway) == 1
    page.find("#stop").click()
    page.until(lambda: page.states() == ["stopped"])
    page.until(lambda: running(gateway) == 0)
    assert "stopped" in page.text(".answer .facts")
    # The model has one slot: this answer had to wait for the first to end.
    page.find("#new").click()
    page.ask("What is 3 + 4?")
    assert page.answered() == "3 + 4 = 7"


def test_escape_stops_too(page: Page, gateway: GatewayProcess) -> None:
    page.ask(ENDLESS)
    page.until(lambda: page.text(".answer .body"))
    page.press(Keys.ESCAPE)
    page.until(lambda: page.states() == ["stopped"])
    page.until(lambda: running(gateway) == 0)


def test_retry_asks_again(page: Page) -> None:
    page.ask("What is 3 + 4?")
    first = page.answered()
    page.run("document.querySelector('.answer').dataset.old = 'yes'")
    page.find(".answer [aria-label=Retry]").click()
    page.until(lambda: not page.all("[data-old]") and page.states() == ["done"])
    assert page.text(".answer .body") == first == "3 + 4 = 7"
    assert len(page.all(".question")) == 1


def test_reasoning_is_folded(page: Page) -> None:
    page.ask("What is 3 + 4?")
    assert page.answered() == "3 + 4 = 7"
    reasoning = page.find(".answer .reasoning")
    assert reasoning.get_property("open") is False
    assert reasoning.text.startswith("Thought for ")
    reasoning.find_element("css selector", "summary").click()
    assert "I have to find 3 plus 4." in reasoning.text


def test_thinking_can_be_turned_off(page: Page) -> None:
    page.open(model="tiny", temperature="0", thinking="off")
    page.ask("What is 3 + 4?")
    assert page.answered() == "3 + 4 = 7"
    assert not page.find(".answer .reasoning").is_displayed()


def test_the_settings_show_the_models_defaults(page: Page) -> None:
    page.find("#open-settings").click()
    shown = {name: page.find(f"[name={name}]").get_attribute("placeholder") for name in SILENT}
    assert shown == SILENT


def test_the_settings_reach_the_model(page: Page) -> None:
    page.find("#open-settings").click()
    page.find("[name=max_tokens]").send_keys("5")
    page.find("[name=thinking]").send_keys("off")
    page.find("[name=system]").send_keys("The secret code is 4711.")
    page.find("#settings .solid").click()
    page.ask("Count to 40.")
    page.answered()
    assert "cut at the token limit" in page.text(".answer .facts")
    page.find("#open-settings").click()
    page.find("[name=max_tokens]").send_keys(Keys.CONTROL, "a", Keys.NULL, Keys.BACKSPACE)
    page.find("#settings .solid").click()
    page.ask("What is the secret code?")
    assert page.answered(2) == "The secret code is 4711."


def test_a_tool_call_is_shown_and_its_result_is_sent_back(page: Page) -> None:
    page.open(model="tiny", temperature="0", tools=json.dumps(WEATHER))
    page.ask("What is the weather in Paris?")
    page.answered()
    assert page.find(".call h3").text == "get_weather"
    assert json.loads(page.text(".call pre")) == {"city": "Paris"}
    page.find(".call textarea").send_keys('{"temperature": 21, "condition": "sunny"}')
    page.find(".calls .solid").click()
    assert "21" in page.answered(2)
    assert "sunny" in page.find(".call .result").text


def test_conversations_are_kept_and_deleted(page: Page) -> None:
    page.ask("My name is Ada.")
    page.answered()
    page.find("#new").click()
    page.ask("What is 2 + 2?")
    page.answered()
    page.reload()
    titles = [entry.text for entry in page.all(".entry")]
    assert titles == ["What is 2 + 2?", "My name is Ada."]
    page.all(".entry")[1].click()
    page.ask("What is my name?")
    assert "Ada" in page.answered(2)
    page.run("document.querySelector('[aria-label^=Delete]').click()")
    assert [entry.text for entry in page.all(".entry")] == ["What is 2 + 2?"]
    page.reload()
    assert [entry.text for entry in page.all(".entry")] == ["What is 2 + 2?"]


def test_another_conversation_can_be_read_during_an_answer(page: Page) -> None:
    page.ask("What is 2 + 2?")
    page.answered()
    page.find("#new").click()
    page.ask("Count to 60.")
    page.until(lambda: page.text(".answer .body"))
    page.run(CLICK_ENTRY, 1)
    assert page.text(".question .bubble") == "What is 2 + 2?"
    page.run(CLICK_ENTRY, 0)
    assert page.answered() == " ".join(map(str, range(1, 61)))


def test_the_status_shows_slots(page: Page) -> None:
    page.ask(ENDLESS)
    page.until(lambda: "1 of 1 slots" in page.find("#status").text)
    page.until(lambda: "tokens/s" in page.find("#status").text)
    page.find("#stop").click()
    page.until(lambda: page.find("#status").text == "ready")


def test_the_context_in_use_is_shown(page: Page) -> None:
    assert not page.find("#context").is_displayed()
    page.ask("What is 2 + 2?")
    page.answered()
    first = page.find("#context-text").text
    assert first.endswith(" of 8,192 tokens")
    page.ask("What is 3 + 4?")
    page.answered(2)
    page.until(lambda: tokens(page.find("#context-text").text) > tokens(first))
    page.find("#new").click()
    assert not page.find("#context").is_displayed()


def tokens(text: str) -> int:
    return int(text.split()[0].replace(",", ""))


def test_a_model_is_loaded_and_unloaded_by_a_button(page: Page) -> None:
    page.ask(ENDLESS)
    page.until(lambda: page.text(".answer .body"))
    page.find("#status").click()
    assert page.focused() == "models-title"
    unload = page.until(lambda: page.find("[aria-label='Unload tiny']"))
    unload.click()
    page.until(lambda: "is in use" in page.text("#models-list .trouble"))
    page.press(Keys.ESCAPE)
    page.find("#stop").click()
    page.answered()
    page.find("#status").click()
    page.find("[aria-label='Unload tiny']").click()
    page.until(lambda: page.all("#models-list .state")[1].text == "not loaded")
    assert page.text("#models-list .trouble") == ""
    page.find("[aria-label='Load tiny']").click()
    page.until(lambda: page.all("#models-list .state")[1].text.startswith("ready · "))
    assert page.all("#models-list .state")[1].text.endswith(" MiB of memory")
    assert page.text("#models-list .state").split(" · ")[1].startswith("8,192 tokens")
    page.press(Keys.ESCAPE)
    page.until(lambda: page.find("#status").text == "ready")


def test_the_progress_of_a_download_is_shown(page: Page) -> None:
    downloading = "downloading: 25 % of 2048 MiB"
    page.run(DOWNLOADING, 512, 2048)
    page.find("#status").click()
    page.until(lambda: page.all("#models-list .state")[1].text.startswith(downloading))
    for bar in ("#download", "#models-list progress"):
        assert page.run("return document.querySelector(arguments[0]).position", bar) == 0.25
    assert page.find("#status").text == downloading
    page.run(DOWNLOADING, 2048, 2048)
    page.until(lambda: page.all("#models-list .state")[1].text.startswith("loading …"))
    assert not page.find("#download").is_displayed()


@pytest.mark.parametrize("state", ["failed", "backing off"])
def test_why_a_backend_ended_is_shown(page: Page, state: str) -> None:
    end = "the backend was ended by SIGILL: this CPU lacks an instruction"
    words = page.driver.execute_async_script(
        "import('/page/status.js').then(({sentence}) => arguments[1](sentence(arguments[0])))",
        {"name": "tiny", "state": state, "error": end},
    )
    assert words.startswith("failed")
    assert words.endswith(f": {end}")


def test_many_pieces_are_shown_at_most_once_a_frame(page: Page) -> None:
    page.run(FLOOD)
    page.ask("Go on.")
    assert len(page.answered()) == 2000 * 10 - 1
    paints, frames = page.run("return [window.paints, window.frames_]")
    assert 1 < paints <= frames + 1  # the last one is shown immediately

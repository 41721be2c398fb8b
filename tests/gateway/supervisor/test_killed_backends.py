"""A backend that a signal ends: clients, page, lists of models and log say what it means."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.common.test_process_end import ADVICE
from tests.gateway.asking import chat, user_message
from tests.gateway.gateway_process import TINY_TEXT, GatewayProcess, roomy
from tests.gateway.supervising import DEADLY, refusal, script, status_of, supervising
from tests.polling import until

Json = dict[str, Any]
ENDLESS = {"model": str(TINY_TEXT), "ignore_eos": True, "max_tokens": 100_000}
ASKED = {"messages": user_message("Tell me a story."), "max_tokens": 99_999}
# The path of each API, and the message of its error object or event.
APIS: dict[str, tuple[str, Callable[[Json], str]]] = {
    "openai": ("/v1/chat/completions", lambda event: event["error"]["message"]),
    "anthropic": ("/v1/messages", lambda event: event["error"]["message"]),
    "ollama": ("/api/chat", lambda event: event["error"]),
}
ANSWERS = {
    "openai": signal.SIGILL,
    "openai-stream": signal.SIGFPE,
    "anthropic-stream": signal.SIGKILL,
    "ollama-stream": signal.SIGBUS,
}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """A gateway with a model for each test, because a second failure in a row causes a pause."""
    models = {name: roomy(parameters=ENDLESS) for name in (*ANSWERS, "idle")}
    deadly = f"export DEADLY_LOAD={int(signal.SIGSEGV)}; {DEADLY}"
    models["loading"] = roomy(backend=script(tmp_path_factory.mktemp("deadly"), deadly))
    process = GatewayProcess(models)
    yield process
    process.close()


def explains(message: str, number: signal.Signals) -> bool:
    """Whether a message has the signal, its meaning, and what to do."""
    return all(words in message for words in (f"ended by {number.name}", *ADVICE[number]))


def require_told(gateway: GatewayProcess, name: str, number: signal.Signals) -> None:
    """The page, both lists of models and the log explain how the backend of a model ended."""

    def state() -> Any:
        models = gateway.client.get("/api/status").json()["models"]
        return next(model for model in models if model["name"] == name)

    until(lambda: state()["state"] == "failed")
    assert explains(state()["error"], number)
    for path in ("/models", "/v1/models"):
        cards = gateway.client.get(path).json()["data"]
        (status,) = (card["status"] for card in cards if card["id"] == name)
        assert (status["value"], status["failed"]) == ("unloaded", True)
        assert explains(status["error"], number)
    assert explains(gateway.line_with("level=error", f"{name}: the backend was"), number)


@pytest.mark.parametrize("name", ANSWERS)
def test_during_an_answer(gateway: GatewayProcess, name: str) -> None:
    api, _, stream = name.partition("-")
    path, message_of = APIS[api]
    body = {"model": name, **ASKED, "stream": bool(stream)}
    others = gateway.backends()
    generated = re.compile(rf'^gateway_model_generated_tokens_total.model="{name}". [1-9]', re.M)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(gateway.client.post, path, json=body)
        until(lambda: generated.search(gateway.client.get("/metrics").text))
        (backend,) = (found for found in gateway.backends() if found not in others)
        backend.send_signal(ANSWERS[name])
        answer = asked.result()
    assert answer.status_code == (200 if stream else 503)
    *_, last = (line for line in answer.text.splitlines() if "{" in line)
    assert explains(message_of(json.loads(last.removeprefix("data: "))), ANSWERS[name])
    require_told(gateway, name, ANSWERS[name])


def test_during_a_load(gateway: GatewayProcess) -> None:
    body = {"model": "loading", **ASKED}
    refused = gateway.client.post("/v1/chat/completions", json=body)
    assert gateway.line_with("loading: loading")
    assert (refused.status_code, refused.json()["error"]["code"]) == (500, "model_load_failed")
    assert explains(refused.json()["error"]["message"], signal.SIGSEGV)
    require_told(gateway, "loading", signal.SIGSEGV)


@pytest.mark.parametrize("number", [signal.SIGABRT])
def test_between_two_answers(gateway: GatewayProcess, number: signal.Signals) -> None:
    asked = {"model": "idle", "max_tokens": 1}
    chat(gateway, **asked)
    (backend,) = gateway.backends()
    backend.send_signal(number)
    require_told(gateway, "idle", number)
    chat(gateway, **asked)
    card = gateway.client.get("/v1/models/idle").json()
    assert card["status"] == {"value": "loaded", "failed": False, "error": ""}


@pytest.mark.parametrize("number", ADVICE)
@pytest.mark.parametrize("shell", ["kill -{} $$", "sh -c 'kill -{} $$'; exit $?"])
async def test_at_the_start(tmp_path: Any, number: signal.Signals, shell: str) -> None:
    """Also if the backend is started by a shell that outlives it."""
    backend = script(tmp_path, shell.format(int(number)))
    async with supervising(tmp_path, {"tiny": roomy(backend=backend)}) as supervisor:
        error = await refusal(supervisor, "tiny")
        assert (error.status, error.code) == (500, "model_load_failed")
        assert explains(error.message, number)
        assert explains(status_of(supervisor, "tiny").error, number)


OK = "level=info event=log message=ok"
HANGS = 'level=error event=exit cause="it hangs"'


@pytest.mark.parametrize(
    ("lines", "end", "cause"),
    [
        (["cannot open libfoo.so", OK], "exit 1", "exit code 1: cannot open libfoo.so"),
        ([OK, HANGS], "kill -9 $$", "SIGKILL: it hangs"),
        ([HANGS, OK], "kill -9 $$", "shows whether the kernel killed it"),
    ],
)
async def test_only_some_lines_of_the_log_are_the_cause(
    tmp_path: Any, lines: list[str], end: str, cause: str
) -> None:
    written = "".join(f"echo '{line}' >&2; " for line in lines)
    models = {"tiny": roomy(backend=script(tmp_path, written + end))}
    async with supervising(tmp_path, models) as supervisor:
        assert (await refusal(supervisor, "tiny")).message.endswith(cause)

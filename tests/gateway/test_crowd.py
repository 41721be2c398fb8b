"""Many clients at once: no answer is lost or mixed up, and nothing leaks.

Every prompt asks for its own number, so an answer shows to whom it belongs. With CROWD_SECONDS=120
the clients repeat their requests for two minutes; without it each sends one.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from functools import partial
from typing import Any

import httpx
import pytest

from tests.gateway.gateway_process import GatewayProcess, roomy
from tests.long import TEST_LONG
from tests.polling import until

STAYING, PASSING = (64, 200) if TEST_LONG else (32, 80)
LARGEST = 60  # the small model counts to 60 without a mistake
SECONDS = float(os.environ.get("CROWD_SECONDS", "0"))
PATIENCE = httpx.Timeout(250.0)


@pytest.fixture
def crowded() -> Iterator[GatewayProcess]:
    process = GatewayProcess({"tiny": roomy()})
    yield process
    process.close()


def request(number: int, **fields: Any) -> dict[str, Any]:
    return {
        "model": "tiny",
        "stream": True,
        "temperature": 0,
        "messages": [{"role": "user", "content": f"Count to {number}."}],
        "chat_template_kwargs": {"enable_thinking": False},
    } | fields


def counted(number: int) -> str:
    return " ".join(str(step) for step in range(1, number + 1))


async def events(answer: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The data of each event; `{}` for the end."""
    async for line in answer.aiter_lines():
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
            yield {} if data == "[DONE]" else json.loads(data)


async def read_answer(client: httpx.AsyncClient, number: int) -> str:
    """The whole answer, which must end properly."""
    text, ended = "", False
    async with client.stream("POST", "/v1/chat/completions", json=request(number)) as answer:
        assert answer.status_code == 200
        async for event in events(answer):
            assert "error" not in event
            ended = not event
            for choice in event.get("choices", ()):
                text += choice["delta"].get("content") or ""
    assert ended
    return text


async def disconnect_early(client: httpx.AsyncClient, number: int, patience: int) -> None:
    """Disconnect after some events, or read all if there are fewer; what was read must be right."""
    text = ""
    async with client.stream("POST", "/v1/chat/completions", json=request(number)) as answer:
        assert answer.status_code == 200
        seen = 0
        async for event in events(answer):
            for choice in event.get("choices", ()):
                text += choice["delta"].get("content") or ""
            seen += 1
            if seen > patience:
                break
    assert counted(number).startswith(text)


def until_idle(gateway: GatewayProcess) -> None:
    """Wait until no answer is being generated."""
    until(lambda: gateway.client.get("/api/status").json()["models"][0]["running"] == 0)


def open_files(gateway: GatewayProcess) -> int:
    """File descriptors of the gateway and its backend together."""
    return sum(process.num_fds() for process in gateway.processes())


def test_every_client_gets_the_answer_to_its_own_question(crowded: GatewayProcess) -> None:
    dice = random.Random(7)

    async def crowd(staying: int, passing: int, seconds: float) -> None:
        """Each client comes once, and again until `seconds` are over."""
        end = asyncio.get_running_loop().time() + seconds
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(
            base_url=crowded.url, timeout=PATIENCE, limits=limits, trust_env=False
        ) as client:

            async def again(come: Callable[[], Coroutine[Any, Any, None]]) -> None:
                await come()
                while asyncio.get_running_loop().time() < end:
                    await come()

            async def ask(number: int) -> None:
                assert await read_answer(client, number) == counted(number)

            async def leave() -> None:
                await disconnect_early(client, dice.randint(1, LARGEST), dice.randint(0, 12))

            await ask(3)
            numbers = [1 + place % LARGEST for place in range(staying)]
            await asyncio.gather(
                *(again(partial(ask, number)) for number in numbers),
                *(again(leave) for _ in range(passing)),
            )

    asyncio.run(crowd(8, 8, 0))
    (backend,) = crowded.backends()
    until_idle(crowded)
    files = open_files(crowded)
    asyncio.run(crowd(STAYING, PASSING, SECONDS))
    until_idle(crowded)
    assert crowded.backends() == [backend]
    # A few may come and go with keep-alive connections; a leak would be hundreds.
    assert open_files(crowded) <= files + 16


def test_a_killed_backend_is_an_error_and_then_a_new_backend_serves(
    crowded: GatewayProcess,
) -> None:
    async def run() -> None:
        async with httpx.AsyncClient(
            base_url=crowded.url, timeout=PATIENCE, trust_env=False
        ) as client:
            assert await read_answer(client, 5) == counted(5)
            (backend,) = crowded.backends()
            begun = asyncio.Barrier(9)

            async def talk(number: int) -> dict[str, Any]:
                endless = request(number, ignore_eos=True)
                async with client.stream("POST", "/v1/chat/completions", json=endless) as answer:
                    parts = events(answer)
                    async for event in parts:
                        if event["choices"][0]["delta"].get("content"):
                            break
                    await begun.wait()
                    rest = [event async for event in parts]
                assert {} not in rest, "a broken answer has no end"
                assert all(
                    choice["finish_reason"] is None
                    for event in rest
                    for choice in event.get("choices", ())
                )
                return rest[-1]

            talks = [asyncio.ensure_future(talk(number)) for number in range(20, 28)]
            await begun.wait()
            backend.kill()
            for last in await asyncio.gather(*talks):
                assert last["error"]["type"] == "server_error"
            assert await read_answer(client, 7) == counted(7)
            assert crowded.backends() != [backend]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", request(4, stream=False)),
        ("/v1/tokenize", {"content": "one two"}),
    ],
)
def test_a_request_right_after_a_kill_is_served(
    crowded: GatewayProcess, path: str, body: dict[str, Any]
) -> None:
    """For some milliseconds the gateway cannot know that the backend has died."""
    before = crowded.client.post(path, json=body)
    (backend,) = crowded.backends()
    backend.kill()
    after = crowded.client.post(path, json=body)
    assert after.status_code == before.status_code == 200, after.text
    assert _comparable(after) == _comparable(before)
    assert crowded.backends() != [backend]


def _comparable(answer: httpx.Response) -> Any:
    """The answer without the fields that always differ."""
    response = answer.json()
    return response.get("choices", response)

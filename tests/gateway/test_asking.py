"""A request during which backends die is not repeated for ever."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from pydantic import BaseModel

from gateway import asking
from gateway.asking import Suspects, ask
from gateway.errors import BACKEND_GONE, NOT_LOADED, SERVER, ApiError, backend_gone
from gateway.openai.chat_request import ChatCompletionRequest
from gateway.supervisor.supervisor import Lease


class Fake:
    """A lease of a backend that dies of some requests."""

    def __init__(self) -> None:
        self.asked = 0
        self.doubts: list[bool] = []
        self.survives = False
        self.end = "the backend was ended by SIGILL"

    @asynccontextmanager
    async def lend(self) -> AsyncIterator[Lease]:
        config: Any = None
        backend: Any = self
        yield Lease(config, backend)

    @property
    def up(self) -> bool:
        return self.survives

    async def ending(self) -> str:
        return self.end

    def doubt(self, *, emptied: bool) -> None:
        self.doubts.append(emptied)

    def dying(
        self,
        pieces: int = 0,
        error: ApiError | None = None,
        *,
        reached: bool = True,
        died: bool = True,
    ) -> Any:
        async def send(_: Lease) -> AsyncGenerator[int, None]:
            self.asked += 1
            for number in range(pieces):
                yield number
            raise error or replace(backend_gone(died=died), reached=reached)

        return send


@pytest.fixture(autouse=True)
def suspects(monkeypatch: pytest.MonkeyPatch) -> Suspects:
    fresh = Suspects()
    monkeypatch.setattr(asking, "SUSPECTS", fresh)
    return fresh


class Asked(BaseModel):
    prompt: str
    seed: int | None = None


DEADLY = Asked(prompt="deadly")


async def failure_of(fake: Fake, send: Any, request: Asked = DEADLY) -> ApiError:
    with pytest.raises(ApiError) as caught:
        async for _ in ask(fake.lend, send, request):
            pass
    return caught.value


async def test_a_request_during_two_deaths_is_refused_with_a_message() -> None:
    fake = Fake()
    error = await failure_of(fake, fake.dying())
    assert (error.status, error.message) == (503, fake.end)
    error = await failure_of(fake, fake.dying())
    assert (fake.asked, error.status, error.code) == (2, 500, "backend_killed")
    assert error.headers()["x-should-retry"] == "false"
    assert "died 2 times" in error.message
    assert error.message.endswith(f"this: {fake.end}")
    await failure_of(fake, fake.dying())
    assert fake.asked == 2


async def test_a_request_that_never_reached_a_backend_is_repeated_and_not_suspected() -> None:
    """Each request is sent twice, and then refused: none counts as the cause of a crash."""
    fake = Fake()
    fake.survives = True
    for _ in range(3):
        error = await failure_of(fake, fake.dying(reached=False))
        assert (error.status, error.headers()["x-should-retry"]) == (503, "true")
    assert fake.asked == 6


async def test_a_request_that_may_have_reached_two_backends_that_died_is_suspected() -> None:
    fake = Fake()
    error = await failure_of(fake, fake.dying(reached=False))
    assert (fake.asked, error.code) == (2, "backend_killed")


async def test_the_end_of_a_backend_that_stops_as_asked_is_no_reason_for_suspicion() -> None:
    fake = Fake()
    for _ in range(3):
        assert (await failure_of(fake, fake.dying(died=False))).code == BACKEND_GONE
    assert fake.asked == 3


async def test_an_accepted_request_is_not_repeated_but_its_client_may_send_it_once_more() -> None:
    fake = Fake()
    first = await failure_of(fake, fake.dying(pieces=1))
    assert (fake.asked, first.status, first.headers()["x-should-retry"]) == (1, 503, "true")
    second = await failure_of(fake, fake.dying(pieces=1))
    assert (fake.asked, second.code) == (2, "backend_killed")


async def test_other_requests_are_not_suspected(suspects: Suspects) -> None:
    fake = Fake()
    await failure_of(fake, fake.dying(pieces=1))
    assert (await failure_of(fake, fake.dying(pieces=1), Asked(prompt="other"))).status == 503
    suspects.check(Asked(prompt="other"))


@pytest.mark.filterwarnings("error")
def test_a_deadly_request_may_have_parts() -> None:
    """Serialising the parts must give no warning, which would be in the gateway's log."""
    part = {"type": "text", "text": "deadly"}
    body = {"model": "m", "messages": [{"role": "user", "content": [part]}]}
    suspects = Suspects()
    for _ in range(2):
        suspects.note(ChatCompletionRequest.model_validate(body), "")
    with pytest.raises(ApiError, match="died 2 times"):
        suspects.check(ChatCompletionRequest.model_validate(body))


async def test_a_backend_that_lost_its_model_has_not_died() -> None:
    fake = Fake()
    emptied = ApiError(503, "no model", SERVER, NOT_LOADED, retry_after=1)
    for _ in range(3):
        error = await failure_of(fake, fake.dying(error=emptied), Asked(prompt="harmless"))
        assert error.code == NOT_LOADED
    assert fake.doubts == [True] * 6


def test_a_suspicion_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    suspects = Suspects(clock=lambda: now)
    for _ in range(2):
        suspects.note(DEADLY, "")
    with pytest.raises(ApiError):
        suspects.check(Asked(prompt="deadly", seed=7))
    now = 601.0
    monkeypatch.setattr(asking, "_digest", None)  # which would read every later request
    suspects.check(Asked(prompt="deadly", seed=7))

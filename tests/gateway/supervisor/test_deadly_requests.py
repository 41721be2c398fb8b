"""A request that kills its backend, and with it the answers of others."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.gateway.asking import user_message
from tests.gateway.gateway_process import GatewayProcess, tiny
from tests.gateway.supervising import DEADLY, script
from tests.long import TEST_LONG
from tests.polling import PAUSE


def starts(gateway: GatewayProcess, expected: int) -> bool:
    """Whether that many backends were started so far; prints the gateway's log if not."""
    log = gateway.whole_log()
    found = sum("starting a backend" in line for line in log)
    if found != expected:
        print(*log, sep="\n")
    return found == expected


def code(answer: httpx.Response) -> str:
    found: str = answer.json()["error"]["code"]
    return found


@pytest.mark.parametrize(
    ("path", "deadly", "harmless"),
    [
        (
            "chat/completions",
            {"messages": user_message("a deadly text"), "max_tokens": 2},
            {"messages": user_message("a text"), "max_tokens": 2},
        ),
        (
            "completions",
            {"prompt": ["a text", "a deadly text"], "max_tokens": 2},
            {"prompt": ["a text", "another"], "max_tokens": 2},
        ),
        ("tokenize", {"content": "a deadly text"}, {"content": "a text"}),
    ][:: 1 if TEST_LONG else 2],
)
def test_it_is_refused_after_the_second_death(
    tmp_path: Path, path: str, deadly: dict[str, Any], harmless: dict[str, Any]
) -> None:
    """The gateway repeats the request only if grpc.aio loses the news that the backend has it."""
    gateway = GatewayProcess({"tiny": tiny(backend=script(tmp_path, DEADLY))})
    try:

        def post(body: dict[str, Any]) -> httpx.Response:
            while True:  # after two deaths there is a pause
                answer = gateway.client.post(f"/v1/{path}", json={"model": "tiny", **body})
                if answer.status_code != 503 or code(answer) != "model_backing_off":
                    return answer
                time.sleep(PAUSE)

        assert post(harmless).status_code == 200
        answer = post(deadly)
        if answer.status_code == 503:
            assert code(answer) == "backend_unavailable"
            assert starts(gateway, 1)
            answer = post(deadly)
        assert (answer.status_code, code(answer)) == (500, "backend_killed")
        assert answer.headers["x-should-retry"] == "false"
        assert starts(gateway, 2)
        assert code(post(deadly)) == "backend_killed"
        assert starts(gateway, 2)
        assert post(harmless).status_code == 200
        assert starts(gateway, 3)
    finally:
        gateway.close()

"""Long messages and large answers: how much memory they take, and that they are served."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.gateway.gateway_process import GatewayProcess, tiny
from tests.gateway.numbers_backend import NumbersBackend

LONG = 10 << 20
WORDS = "a word and another "
TEXTS = {"words": WORDS * (LONG // len(WORDS)), "code": 'if (x[1]) { y = "a\n"; }\n' * (LONG // 27)}


@pytest.fixture
def gateway() -> Iterator[GatewayProcess]:
    """One for each test: the heap that a long message leaves behind would count for the next."""
    backend = NumbersBackend()
    backend.release.set()
    numbers = {"parameters": {"model": "numbers"}, "address": backend.address}
    process = GatewayProcess({"tiny": tiny(), "numbers": numbers})
    yield process
    process.close()
    backend.close()


def own_process(gateway: GatewayProcess) -> psutil.Process:
    (found,) = [one for one in gateway.processes() if one.cmdline()[1:3] == ["-m", "gateway"]]
    return found


def peak(process: psutil.Process) -> int:
    """The most memory that it has held since the latest reset; bytes."""
    for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no VmHWM")


@pytest.mark.skipif(sys.platform != "linux", reason="peaks are read from /proc")
@pytest.mark.parametrize("kind", TEXTS)
@pytest.mark.parametrize("path", ["chat/completions", "messages", "responses"])
def test_a_long_message_takes_little_more_memory_than_its_length(
    gateway: GatewayProcess, path: str, kind: str
) -> None:
    def body(text: str) -> bytes:
        asked: dict[str, Any] = {"messages": [{"role": "user", "content": text}], "max_tokens": 2}
        if path == "responses":
            asked = {"input": text}
        return json.dumps({"model": "numbers", **asked}).encode()

    headers = {"content-type": "application/json"}
    post = gateway.client.post
    assert post(f"/v1/{path}", content=body("Hi"), headers=headers).status_code == 200
    process = own_process(gateway)
    long = body(TEXTS[kind])
    before = process.memory_info().rss
    Path(f"/proc/{process.pid}/clear_refs").write_text("5")
    assert post(f"/v1/{path}", content=long, headers=headers).status_code == 200
    assert peak(process) - before < 5 * len(long)


@pytest.mark.parametrize("dimensions", [None, 3])
def test_an_answer_of_very_many_vectors_is_whole(
    gateway: GatewayProcess, dimensions: int | None
) -> None:
    asked = {"model": "numbers", "input": ["abc"] * 2048, "dimensions": dimensions}
    told = gateway.client.post("/v1/embeddings", json=asked).json()
    assert [entry["index"] for entry in told["data"]] == list(range(2048))
    assert {len(entry["embedding"]) for entry in told["data"]} == {dimensions or 4}
    assert told["usage"]["prompt_tokens"] == 3 * 2048

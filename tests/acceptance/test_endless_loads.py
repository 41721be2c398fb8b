"""Loads that would never end, or exhaust the machine, are refused.

The old model stays in service.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.acceptance.backend import TINY_TEXT, Backend, chat, text_answer
from tests.rpc.client import failure_of
from wire import backend_pb2 as pb

GREETING = chat("Hello!", Tokens=12)
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
LEAP = "{% set x = 'a' * 10 ** 10 %}{{ x }}"
GROWTH = (
    "{% set ns = namespace(x='abc') %}{% for a in range(60) %}{% set ns.x = ns.x ~ ns.x %}"
    "{% endfor %}{{ ns.x }}"
)
WIDTH = "{{ '%9999999999d' % 1 }}"
OUTPUT = "{% for a in range(99999) %}" + "a" * 200_000 + "{% endfor %}"


def replaced(name: str, make: Callable[[Path], None]) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        (model / name).unlink()
        make(model / name)

    return change


def configured(name: str, **values: Any) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        config = json.loads((model / name).read_text())
        (model / name).write_text(json.dumps(config | values))

    return change


def templated(text: str) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        (model / "chat_template.jinja").write_text(text)

    return change


def of_kernel(path: Path) -> None:
    path.symlink_to("/proc/self/status")


def scattered(model: Path) -> None:
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["far"] = 10**9
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))


def padded(model: Path) -> None:
    """A weight file whose header consists mostly of spaces."""
    weights = (model / "model.safetensors").read_bytes()
    length = int.from_bytes(weights[:8], "little")
    header = weights[8 : 8 + length].ljust(110_000_000)
    start = len(header).to_bytes(8, "little") + header
    (model / "model.safetensors").write_bytes(start + weights[8 + length :])


def zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


NOT_A_FILE = "is not a regular file"
DAMAGES = {
    "fifo-config": (replaced("config.json", os.mkfifo), NOT_A_FILE),
    "fifo-tokenizer": (replaced("tokenizer.json", os.mkfifo), NOT_A_FILE),
    "fifo-weights": (replaced("model.safetensors", os.mkfifo), NOT_A_FILE),
    "zeros-config": (replaced("config.json", zeros), NOT_A_FILE),
    "zeros-tokenizer": (replaced("tokenizer.json", zeros), NOT_A_FILE),
    "zeros-weights": (replaced("model.safetensors", zeros), NOT_A_FILE),
    "huge-config": (replaced("config.json", huge), "is 1048576 MiB large"),
    "huge-tokenizer": (replaced("tokenizer.json", huge), "is 1048576 MiB large"),
    "header": (padded, "header of 110000000 bytes"),
    "token-id": (scattered, "one of them with the id 1000000000"),
    "wide": (configured("config.json", hidden_size=10**12), "hidden_size is 1000000000000"),
    "negative": (configured("config.json", head_dim=-4), "head_dim is -4"),
    "layers": (configured("config.json", num_hidden_layers=100_000), "100000"),
    "more-layers": (configured("config.json", num_hidden_layers=10**9), "1000000000"),
    "loop": (templated(LOOP), "chat template"),
    "leap": (templated(LEAP), "chat template"),
    "growth": (templated(GROWTH), "chat template"),
    "width": (templated(WIDTH), "chat template"),
    "output": (templated(OUTPUT), "chat template"),
}


if sys.platform == "linux":
    DAMAGES["kernel-config"] = (replaced("config.json", of_kernel), NOT_A_FILE)
    DAMAGES["kernel-template"] = (replaced("chat_template.jinja", of_kernel), NOT_A_FILE)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_load_that_would_never_end_is_refused(
    damage: str, served: Backend, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(TINY_TEXT, tmp_path / "model"))
    before = text_answer(served, GREETING)
    change, words = DAMAGES[damage]
    change(model)
    failure = failure_of(lambda: served.load(model))
    assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
    assert words in failure.sentence
    assert str(tmp_path) not in failure.sentence
    assert text_answer(served, GREETING) == before


def test_a_template_that_is_not_valid_refuses_only_chats(served: Backend, tmp_path: Path) -> None:
    model = Path(shutil.copytree(TINY_TEXT, tmp_path / "model"))
    templated("{{ messages }}\n{% if %}")(model)
    served.load(model)
    failure = failure_of(lambda: text_answer(served, GREETING))
    assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
    assert "line 2 of its chat template is not valid" in failure.sentence
    assert text_answer(served, pb.PredictOptions(Prompt="Hello!", Tokens=4, IgnoreEOS=True))
    served.load(TINY_TEXT)


def test_files_that_nothing_reads_may_be_of_any_kind_and_size(
    served: Backend, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(TINY_TEXT, tmp_path / "model"))
    for name in ("measurement.json", "train_log.txt", "dataset.jsonl"):
        huge(model / name)
    (model / ".git").mkdir()
    os.mkfifo(model / ".git" / "fsmonitor--daemon.ipc")
    os.mkfifo(model / "events")
    assert served.load(model).success


@pytest.mark.parametrize("make", [os.mkfifo, zeros, huge])
def test_an_endless_hostfile_is_refused(
    make: Callable[[Path], None], served: Backend, tmp_path: Path
) -> None:
    make(tmp_path / "hosts.json")
    failure = failure_of(lambda: served.load(Options=[f"hostfile:{tmp_path / 'hosts.json'}"]))
    assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
    assert "hostfile" in failure.sentence
    assert text_answer(served, GREETING)


def test_a_template_that_loops_for_one_request_fails_only_that_request(
    bare: Backend, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(TINY_TEXT, tmp_path / "model"))
    template = (model / "chat_template.jinja").read_text()
    condition = "{% if messages[0].content == 'loop' %}" + LOOP + "{% endif %}"
    (model / "chat_template.jinja").write_text(condition + template)
    bare.load(model)
    before = text_answer(bare, GREETING)
    loops = [bare.stub.Predict.future(chat("loop"), timeout=240) for _ in range(2)]
    assert text_answer(bare, GREETING) == before
    for loop in loops:
        failure = failure_of(loop.result)
        assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
        assert "takes more than 5 seconds" in failure.sentence

"""What a load has found is read by the next load of the same checkpoint, and by no other."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.engine.caching.cache_kind import CacheKind
from backend.engine.device import Device
from backend.engine.loading import findings, serving_trial, text_builder, traits
from backend.engine.loading.findings import Findings
from backend.engine.loading.serving_trial import ServingTrial, Verdict, family_verdict
from backend.engine.loading.stages import Stages
from tests.architectures.shapes import configuration
from tests.engine.experts.checkpoints import FORMS, write_experts
from tests.engine.loading_models import write_model
from tests.engine.vision.seeing import answer_to, asking, seeing

TEXT = Path(__file__).parents[1] / "models" / "tiny_text"
NONE = {"measured": 0, "tried": 0}
ALL = {"measured": 1, "tried": 1}


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts measurements and trials. The table of families is empty, and findings are kept."""
    done: Counter[str] = Counter()
    monkeypatch.setattr(findings, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(serving_trial, "TEXT_ON_CPU", {})
    for owner, name, what in ((traits, "FirstPass", "measured"), (ServingTrial, "run", "tried")):
        monkeypatch.setattr(owner, name, _counted(getattr(owner, name), done, what))
    monkeypatch.setattr(text_builder, "_later", _announced(text_builder._later))
    return done


_left = threading.Event()  # set when the remaining work of a load is done


def _announced(later: Callable[..., Stages[None]]) -> Callable[..., Stages[None]]:
    def announced(*arguments: Any) -> Stages[None]:
        yield from later(*arguments)
        _left.set()

    return announced


def _counted(function: Callable[..., Any], done: Counter[str], what: str) -> Callable[..., Any]:
    def counted(*arguments: Any, **named: Any) -> Any:
        done[what] += 1
        return function(*arguments, **named)

    return counted


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TEXT, tmp_path / "model"))


async def _loaded(path: Path, work: Counter[str], **settings: Any) -> tuple[dict[str, int], Any]:
    """The work that a load has done, and an answer. Then the load's remaining work is done."""
    work.clear()
    _left.clear()
    async with seeing(path, **settings) as engine:
        done = {what: work[what] for what in NONE}
        answer = await answer_to(engine, asking("What is your name?", max_tokens=12))
        assert await asyncio.to_thread(_left.wait, 60)
    return done, answer.tokens


async def test_a_second_load_neither_measures_nor_tries_and_answers_alike(
    work: Counter[str], model: Path
) -> None:
    first, answer = await _loaded(model, work)
    assert first == ALL
    assert await _loaded(model, work) == (NONE, answer)
    assert await _loaded(model, work, load_trial=True) == ({"measured": 0, "tried": 1}, answer)
    assert await _loaded(model, work, load_trial=False) == (NONE, answer)


def _edit_weights(path: Path, _: pytest.MonkeyPatch) -> None:
    (file,) = path.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def _edit_config(path: Path, _: pytest.MonkeyPatch) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"added": 1}))


def _upgrade(_: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "VERSION", "9.9.9")


def _change_code(_: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "_code", lambda: "other")


def _damage(path: Path, _: pytest.MonkeyPatch) -> None:
    (file,) = (path.parent / "cache" / "findings").iterdir()
    file.write_text(file.read_text().replace('"per_token": ', '"per_token": 1', 1))


@pytest.mark.parametrize("change", [_edit_weights, _edit_config, _upgrade, _change_code, _damage])
async def test_a_load_of_something_else_measures_and_tries_again(
    change: Callable[[Path, pytest.MonkeyPatch], None],
    work: Counter[str],
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await _loaded(model, work)
    change(model, monkeypatch)
    assert (await _loaded(model, work))[0] == ALL


async def test_a_verdict_counts_only_for_what_was_tried(work: Counter[str], model: Path) -> None:
    await _loaded(model, work, parallel=1)
    assert (await _loaded(model, work, parallel=4))[0] == {"measured": 0, "tried": 1}
    assert (await _loaded(model, work, parallel=1))[0] == NONE
    assert (await _loaded(model, work, parallel=4, prompt_lookup=True))[0]["tried"] == 1


async def test_what_passes_take_is_measured_for_each_number_of_slots(
    work: Counter[str], tmp_path: Path
) -> None:
    """With fewer slots, a pass computes its experts in groups."""
    path = write_experts(
        tmp_path / "experts", FORMS["Qwen3, one by one"], moe_intermediate_size=256
    )
    for wanted in (0, 2, 4):
        assert (await _loaded(path, work, expert_cache_mib=wanted))[0] == ALL
    assert (await _loaded(path, work, expert_cache_mib=2))[0] == NONE


async def test_a_folder_that_cannot_be_used_is_no_error(
    work: Counter[str], model: Path, tmp_path: Path
) -> None:
    (tmp_path / "cache").write_text("a file, not a folder")
    for _ in range(2):
        assert (await _loaded(model, work))[0] == ALL


async def test_a_checkpoint_that_cannot_be_identified_is_measured(
    work: Counter[str], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable() -> str:
        raise OSError("too many open files")

    monkeypatch.setattr(findings, "_code", unreadable)
    for _ in range(2):
        assert (await _loaded(model, work))[0] == ALL


async def test_a_stored_verdict_restricts_the_model(
    tmp_path: Path, work: Counter[str], caplog: pytest.LogCaptureFixture
) -> None:
    config = configuration("gpt_bigcode") | {"vocab_size": 259}
    path = write_model(tmp_path / "bigcode", dtype="float32", **config)
    for expected in (1, 0):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            done, _ = await _loaded(path, work)
        assert done["tried"] == expected
        assert "served one at a time" in caplog.text


async def test_a_family_in_the_table_is_not_tried(
    work: Counter[str], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = json.loads((model / "config.json").read_text())["model_type"]
    monkeypatch.setattr(serving_trial, "TEXT_ON_CPU", {family: "shared"})
    assert (await _loaded(model, work))[0] == {"measured": 1, "tried": 0}
    assert (await _loaded(model, work, kv_bits=8))[0]["tried"] == 1


@given(st.binary())
def test_any_other_content_is_a_miss(content: bytes) -> None:
    file = Findings(TEXT, "any")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "open", lambda *_: _Content(content))
        assert file.read() == {}


class _Content:
    def __init__(self, content: bytes) -> None:
        self._content = content

    def __enter__(self) -> _Content:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def read(self, most: int) -> bytes:
        return self._content[:most]


def test_a_file_of_another_checkpoint_is_a_miss(tmp_path: Path) -> None:
    Findings(tmp_path, "one").write({"figures": 1})
    assert Findings(tmp_path, "one").read() == {"figures": 1}
    shutil.copy(tmp_path / "one.json", tmp_path / "other.json")
    assert Findings(tmp_path, "other").read() == {}


def test_the_number_of_files_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "_MOST_FILES", 3)
    for at in range(6):
        Findings(tmp_path, f"{at}").write({"at": at})
        os.utime(tmp_path / f"{at}.json", (1e9 + at, 1e9 + at))
    assert Findings(tmp_path, "5").read() == {"at": 5}
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize(
    ("changes", "way"),
    [
        ({}, "shared"),
        ({"config": {"model_type": "mistral"}}, "shared"),  # mlx-lm builds it as llama
        ({"config": {"model_type": "gpt_bigcode"}}, "in turn"),
        ({"config": {"model_type": "llama4_text"}}, "shared"),
        ({"config": {"model_type": "llama4_text", "moe_layers": [1]}}, "in turn"),  # as llama4
        ({"config": {"model_type": "llama", "model_file": "own.py"}}, None),
        ({"config": {"model_type": "unheard_of"}}, None),
        ({"of_vlm": True}, None),
        ({"of_vlm": True, "media": True, "config": {"model_type": "qwen2_5_vl"}}, "shared"),
        ({"of_vlm": True, "media": True, "config": {"model_type": "jvlm"}}, "in turn"),
        ({"of_vlm": True, "media": True, "config": {"model_type": "unheard_of"}}, None),
        ({"bits": 8}, None),
        ({"ranks": object()}, None),
        ({"drafts": True}, None),
        ({"device": "metal"}, None),
    ],
)
def test_the_tables_cover_plain_loads_on_a_cpu(changes: dict[str, Any], way: str | None) -> None:
    values: dict[str, Any] = {"config": {"model_type": "llama"}, "of_vlm": False, **changes}
    order: Any = SimpleNamespace(
        checkpoint=SimpleNamespace(
            config=values["config"],
            of_vlm=values["of_vlm"],
            media=values.get("media", False),
        ),
        cache_kind=CacheKind(values.get("bits", 0)),
        ranks=values.get("ranks"),
    )
    device = Device(values.get("device", "cpu"), "", 0, 0)
    found = family_verdict(order, device, drafts=values.get("drafts", False))
    assert found == (None if way is None else Verdict(way))

"""Requests get the tokens of the resident model, whatever is in the slots and whatever fails."""

from __future__ import annotations

import errno
import gc
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import cache, partial
from itertools import count
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.engine.drafting.draft_loading import Drafting
from backend.engine.drafting.drafter import LookupDrafter
from backend.engine.errors import ExpertsUnreadable
from backend.engine.experts.layer_cache import LayerCache
from backend.engine.model import EngineModel
from backend.engine.planning.draft_width import DraftWidth
from backend.engine.request import Sampling
from tests.engine.experts.checkpoints import (
    EXPERTS,
    FORMS,
    opened,
    prompt,
    same,
    with_slots,
    write_experts,
)
from tests.engine.rounds import Rounds, alone, engine_model
from tests.long import examples
from tests.polling import until

pytestmark = pytest.mark.usefixtures("each_order_for_module")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_experts(tmp_path_factory.mktemp("experts") / "qwen", FORMS["Qwen3, one by one"])


@cache
def _resident(folder: Path) -> EngineModel:
    return engine_model(opened(folder))


@cache
def _cached(folder: Path, slots: int) -> EngineModel:
    model, experts = with_slots(folder, slots)
    return engine_model(model, experts=experts)


@cache
def _expected(folder: Path, ticket: int, length: int, limit: int) -> str:
    return alone(_resident(folder), _prompt(length, ticket), limit, **_wishes(ticket)).text


def _prompt(length: int, seed: int) -> list[int]:
    """A text that repeats itself, so that prompt lookup has guesses."""
    return (prompt(11, seed) * 9)[:length]


def _wishes(ticket: int) -> dict[str, Any]:
    drawn = Sampling(temperature=0.8, seed=ticket, top_k=20) if ticket % 2 else Sampling()
    return {"sampling": drawn, "ignore_eos": True}


ARRIVALS = st.lists(
    st.tuples(st.integers(0, 12), st.integers(0, 5), st.integers(1, 90), st.integers(1, 8)),
    min_size=1,
    max_size=6,
)


@pytest.fixture(scope="module", autouse=True)
def _guesses_always() -> Iterator[None]:
    with patch.object(DraftWidth, "choose", lambda _self, _rows, _longest, most: most):
        yield


@settings(max_examples=examples(60), deadline=None)
@given(
    arrivals=ARRIVALS,
    slots=st.integers(1, EXPERTS),
    cancelled=st.integers(0, 20),
    drafts=st.booleans(),
    dice=st.randoms(use_true_random=False),
)
def test_tokens_depend_neither_on_slots_nor_on_who_shares_them(
    folder: Path,
    arrivals: Sequence[tuple[int, int, int, int]],
    slots: int,
    cancelled: int,
    drafts: bool,
    dice: Random,
) -> None:
    """arrivals: the step, the number of the prompt, its length, and the tokens of its answer.

    dice: decide which layers read ahead.
    """
    drafting = Drafting(3, lambda: [LookupDrafter()]) if drafts else None
    rounds = Rounds(replace(_cached(folder, slots), drafting=drafting))
    waiting, expected = sorted(arrivals), dict[int, str]()
    with _reading_ahead(lambda: dice.random() < 0.7):
        _play(rounds, waiting, expected, folder, cancelled)
    assert not rounds.faults
    assert {ticket: rounds.received[ticket].text for ticket in expected} == expected


def _play(
    rounds: Rounds,
    waiting: list[tuple[int, int, int, int]],
    expected: dict[int, str],
    folder: Path,
    cancelled: int,
) -> None:
    for step in range(13):
        while waiting and waiting[0][0] == step:
            _, seed, length, limit = waiting.pop(0)
            ticket = len(rounds.received)
            rounds.submit(ticket, _prompt(length, seed), limit, **_wishes(seed))
            expected[ticket] = _expected(folder, seed, length, limit)
        if step == cancelled and 0 in expected:
            rounds.scheduler.cancel(0)
            del expected[0]
        rounds.step()
    rounds.drain()


def _reading_ahead(decide: Callable[[], bool]) -> AbstractContextManager[Any]:
    likely = LayerCache._likely

    def chosen(cache: LayerCache, x: mx.array, indices: mx.array) -> mx.array | None:
        return likely(cache, x, indices) if decide() else None

    return patch.object(LayerCache, "_likely", chosen)


_PASSES = st.lists(
    st.tuples(st.integers(1, 3), st.integers(1, 30), st.integers(0, 9), st.integers(0, 12)),
    min_size=1,
    max_size=6,
)


@settings(max_examples=examples(30), deadline=None)
@given(
    passes=_PASSES,
    slots=st.integers(1, 5),
    portion=st.integers(1, 3),
    order=st.randoms(use_true_random=False),
)
def test_a_pass_may_be_computed_after_its_slots_hold_other_experts(
    folder: Path,
    passes: Sequence[tuple[int, int, int, int]],
    slots: int,
    portion: int,
    order: Random,
) -> None:
    """passes: rows, tokens, the number of the first prompt, and the read that fails; 0 if none.

    portion: the experts that are read at a time.
    """
    resident, cached = (made.model for made in (_resident(folder), _cached(folder, slots)))
    for layer in cached.layers:
        layer.mlp.switch_mlp.cache._step = portion
    launched: list[tuple[mx.array, mx.array]] = []
    for rows, length, seed, failing in passes:
        tokens = mx.array([_prompt(length, seed + row) for row in range(rows)])
        broken = patch.object(os, "preadv", _failing_at(failing))
        decided = _reading_ahead(lambda: order.random() < 0.7)
        with broken, decided, suppress(ExpertsUnreadable):
            launched.append((tokens, cached(tokens)))
    order.shuffle(launched)
    for tokens, result in launched:
        assert same(result, resident(tokens))


def _failing_at(call: int) -> Callable[..., int]:
    read, calls = os.preadv, count(1)

    def fail(*arguments: Any) -> int:
        if next(calls) == call:
            raise OSError(errno.EIO, "Input/output error")
        return read(*arguments)

    return fail


@pytest.fixture
def own(folder: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint that a test may damage."""
    return shutil.copytree(folder, tmp_path / "qwen")


def _served(folder: Path, slots: int = 3) -> Rounds:
    """A model that has answered one request, so that some experts are in memory."""
    model, experts = with_slots(folder, slots)
    rounds = Rounds(engine_model(model, experts=experts))
    _ask(rounds, 0)
    assert rounds.received[0].error is None
    return rounds


def _ask(rounds: Rounds, ticket: int) -> None:
    rounds.submit(ticket, _prompt(40, ticket), 6, **_wishes(ticket))
    rounds.drain()


def _truncate(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        os.truncate(file, 4096)


def _overwrite(folder: Path) -> None:
    """As a program does that writes other weights of the same size to the same file."""
    for file in folder.glob("*.safetensors"):
        content = bytearray(file.read_bytes())
        content[-1000:] = bytes(1000)
        file.write_bytes(content)


@pytest.mark.parametrize("damage", [_truncate, _overwrite])
def test_a_file_that_has_changed_ends_the_requests_that_need_it(
    own: Path, damage: Callable[[Path], None]
) -> None:
    rounds = _served(own)
    damage(own)
    for ticket in (1, 2):
        _ask(rounds, ticket)
        error = rounds.received[ticket].error
        assert isinstance(error, ExpertsUnreadable)
        assert str(error).startswith("the weight file model-0000")
        assert str(error).endswith("has changed since the model was loaded: load the model again")
        assert str(own) not in str(error)
    assert not rounds.faults


@pytest.mark.parametrize("leaves", ["deleted", "replaced"])
def test_a_file_that_is_deleted_or_replaced_is_still_read(
    folder: Path, own: Path, leaves: str
) -> None:
    rounds = _served(own, slots=1)
    for file in own.glob("*.safetensors"):
        file.unlink()
        if leaves == "replaced":
            file.write_bytes(bytes(1 << 20))
    _ask(rounds, 3)
    assert rounds.received[3].text == _expected(folder, 3, 40, 6)


def test_a_fault_of_the_disk_ends_only_the_requests_of_its_pass(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = _served(folder)

    def fail(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(os, "preadv", fail)
        _ask(rounds, 1)
    error = rounds.received[1].error
    assert isinstance(error, ExpertsUnreadable)
    assert "cannot be read (Input/output error): check the disk" in str(error)
    _ask(rounds, 2)
    assert rounds.received[2].text == _expected(folder, 2, 40, 6)


def test_experts_are_read_again_after_a_failed_allocation(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = _served(folder)
    evaluate: Any = mx.async_eval
    calls = 0

    def fail_once(*arrays: Any) -> None:
        nonlocal calls
        if arrays and isinstance(arrays[0], list) and len(arrays[0]) == 3 and not calls:
            calls += 1
            raise RuntimeError("[malloc] Unable to allocate 7 bytes.")
        evaluate(*arrays)

    monkeypatch.setattr(mx, "async_eval", fail_once)
    _ask(rounds, 1)
    assert calls
    assert rounds.received[1].text == _expected(folder, 1, 40, 6)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose experts outweigh what else a pass holds."""
    folder = tmp_path_factory.mktemp("experts") / "wide"
    return write_experts(folder, FORMS["Qwen3, one by one"], moe_intermediate_size=512)


@pytest.mark.usefixtures("exact_buffers")
@pytest.mark.parametrize("ahead", [False, True])
def test_new_experts_are_written_in_place(wide: Path, ahead: bool) -> None:
    """A pass holds little more than with all experts in memory, and never a copy of the slots."""
    rounds = _served(wide, slots=4)
    experts = rounds.model.experts
    assert experts is not None
    with _reading_ahead(lambda: ahead):
        peaks = [_peak(partial(_ask, served, 5)) for served in (_answered(wide), rounds)]
    expert = experts.nbytes // experts.counts.layers // 4
    assert peaks[1] - peaks[0] < 2 * expert <= experts.working_bytes


def _answered(folder: Path) -> Rounds:
    rounds = Rounds(_resident(folder))
    _ask(rounds, 0)
    return rounds


@pytest.mark.usefixtures("exact_buffers")
def test_a_pass_that_waits_to_be_computed_does_not_hold_the_slots(wide: Path) -> None:
    model, experts = with_slots(wide, 4)

    def run_in_turn() -> None:
        passes = [model(mx.array([_prompt(1, seed)])) for seed in range(8)]
        mx.eval(passes)

    assert _peak(run_in_turn) < experts.working_bytes


def _peak(run: Callable[[], None]) -> int:
    mx.synchronize()
    gc.collect()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    run()
    return mx.get_peak_memory() - before


def test_files_are_closed_with_the_model(own: Path) -> None:
    def opened_files() -> list[str]:
        links = map(os.path.realpath, Path("/proc/self/fd").iterdir())
        return [link for link in links if link.startswith(str(own))]

    if not Path("/proc/self/fd").exists():
        pytest.skip("this system does not list the files of a process")
    rounds = _served(own)
    assert opened_files()
    del rounds
    gc.collect()
    until(lambda: not opened_files())  # a thread can still be leaving its last read

"""Experts are read before their layer needs them; no result changes."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from backend.engine.errors import ExpertsUnreadable
from backend.engine.experts.layer_cache import LayerCache
from backend.engine.experts.offload import expert_bytes, offload
from backend.engine.experts.read_ahead import MOST_TOKENS, Router
from backend.engine.experts.weight_files import Reading, WeightFiles
from backend.engine.units import MIB
from tests.architectures.shapes import tiny_model
from tests.engine.experts.checkpoints import EXPERTS, FORMS, opened, prompt, same, with_slots
from tests.engine.experts.checkpoints import write_experts as written
from tests.engine.loading_models import write_weights
from tests.engine.loads import at_once

QWEN = "Qwen3, one by one"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("ahead") / "qwen", FORMS[QWEN], num_hidden_layers=4)


@contextmanager
def _always(ahead: bool = True) -> Iterator[None]:
    with patch("backend.engine.experts.layer_cache.MOST_TOKENS", MOST_TOKENS if ahead else 0):
        yield


def _caches(model: Any) -> list[LayerCache]:
    """The caches of a model, in the order of its layers."""
    found = [part.cache for _, part in model.named_modules() if hasattr(part, "cache")]
    return sorted(found, key=lambda cache: _depth(cache, 0))[::-1]


def _depth(cache: LayerCache, so_far: int) -> int:
    return so_far if cache.following is None else _depth(cache.following[0], so_far + 1)


def _one_by_one(model: Any, tokens: int = 24) -> list[mx.array]:
    passes = [model(mx.array([[token]])) for token in prompt(tokens)]
    mx.eval(passes)
    return passes


@pytest.mark.parametrize("form", FORMS)
def test_every_family_reads_ahead_and_computes_the_same(form: str, tmp_path: Path) -> None:
    """Gemma 4's router is beside the module around the experts, and DeepSeek's chooses itself."""
    checkpoint = written(tmp_path / "model", FORMS[form])
    model, found = with_slots(checkpoint, 3)
    with _always():
        results = _one_by_one(model)
    resident = opened(checkpoint)
    for token, result in zip(prompt(24), results, strict=True):
        assert same(result, resident(mx.array([[token]])))
    *linked, last = [cache.following for cache in _caches(model)]
    assert last is None
    assert all(following and following[1]._usable for following in linked)
    counts = found.counts
    assert 0 < counts.ahead_hits <= counts.misses
    assert counts.wasted_bytes < counts.read_bytes


@pytest.mark.parametrize("ended", [True, False])
def test_bytes_that_are_not_used_are_counted(folder: Path, ended: bool) -> None:
    """What was read is what the misses needed, and what was read in vain.

    ended: whether wrong reads have ended when they are abandoned. Otherwise the threads decide how
        many of them have begun, which may be none.
    """
    model, found = with_slots(folder, 3)
    expert = found.nbytes // 2 // 3 // found.counts.layers  # in bfloat16; float32 in memory
    abandon = WeightFiles.abandon

    def late(files: WeightFiles, reading: Reading) -> None:
        wait_for(reading.parts)
        abandon(files, reading)

    with _always(), patch.object(WeightFiles, "abandon", late if ended else abandon):
        _one_by_one(model)
    counts = found.counts
    assert counts.wasted_bytes > 0 or not ended
    assert counts.read_bytes - counts.wasted_bytes == counts.misses * expert


def test_a_right_prediction_leaves_nothing_to_wait_for(folder: Path) -> None:
    """With routers that know the next layer's choice, only the first layer's experts are late."""
    chosen: list[mx.array] = []
    call = LayerCache.__call__

    def record(cache: LayerCache, x: mx.array, indices: mx.array) -> mx.array:
        if cache is not first:
            chosen.append(indices)
        return call(cache, x, indices)

    for replay in (False, True):
        model, found = with_slots(folder, 3)
        first, *_ = caches = _caches(model)
        for cache in caches:
            cache._step = EXPERTS
        recording = patch.object(LayerCache, "__call__", call if replay else record)
        foretelling = patch.object(Router, "choose", lambda *_: chosen.pop(0))
        late = []
        with recording, foretelling, _always(replay):
            for token in prompt(24):
                before = found.counts.misses - found.counts.ahead_hits
                mx.eval(model(mx.array([[token]])))
                late.append(found.counts.misses - found.counts.ahead_hits - before)
        assert (max(late) <= 3) == replay
        assert found.counts.wasted_bytes == 0


@pytest.mark.parametrize("slots", [2, 5, EXPERTS])
def test_reading_ahead_adds_no_wait_for_the_device(folder: Path, slots: int) -> None:
    def waits(ahead: bool) -> int:
        model, _ = with_slots(folder, slots)
        for cache in _caches(model):
            cache._step = EXPERTS
        seen = 0
        evaluate = mx.eval

        def count(*arrays: Any) -> None:
            nonlocal seen
            seen += bool(arrays)
            evaluate(*arrays)

        with patch.object(mx, "eval", count), _always(ahead):
            for token in prompt(6):
                model(mx.array([[token]]))
        return seen

    assert waits(ahead=True) == waits(ahead=False) > 0


def test_a_fault_of_a_read_ahead_ends_only_passes_that_need_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = with_slots(folder, EXPERTS - 1)
    _, second, *_ = _caches(model)
    missing = [expert for expert in range(EXPERTS) if second._slot[expert] < 0]
    with monkeypatch.context() as broken:
        broken.setattr(os, "preadv", _broken)
        second.read_ahead(np.array(missing[:2]))
        for reading in second._ahead.values():
            for part in reading.parts:
                assert part.exception() is not None
    x = mx.ones((1, 1, 64))
    wanted = mx.array([[[missing[0], missing[2]]]])
    with pytest.raises(ExpertsUnreadable):
        second(x, wanted)
    assert second(x, wanted).shape[-2] == 2  # read again
    with monkeypatch.context() as broken:
        broken.setattr(os, "preadv", _broken)
        second.read_ahead(np.array(missing[1:2]))
    assert second(x, wanted).shape[-2] == 2
    assert not second._ahead


def _broken(*_: Any) -> int:
    raise OSError(errno.EIO, "Input/output error")


def test_buffers_of_abandoned_reads_count_until_they_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next reads ahead begin fewer, so all buffers together fit into one portion."""
    model, found = with_slots(folder, 1)
    first, second, *_ = _caches(model)
    first._step = second._step = 3
    go, began, read = threading.Event(), threading.Semaphore(0), os.preadv

    def wait(*call: Any) -> int:
        began.release()
        go.wait(60)
        return read(*call)

    monkeypatch.setattr(os, "preadv", wait)
    first.read_ahead(np.array([0, 1, 1]))
    assert list(first._ahead) == [1, 0]  # the likeliest first
    for _ in range(6):
        assert began.acquire(timeout=60)
    running = [part for reading in first._ahead.values() for part in reading.parts]
    first.read_ahead(np.array([2, 3, 4]))
    assert len(first._ahead) == 1
    second.read_ahead(np.array([5, 6, 7]))
    assert len(second._ahead) == 1
    running += second._ahead[5].parts
    go.set()
    wait_for(running)
    second.read_ahead(np.array([5, 6, 7]))
    assert len(second._ahead) == 3
    assert found.counts.wasted_bytes > 0


def test_choices_beyond_the_experts_are_not_read(tmp_path: Path) -> None:
    """Longcat's router chooses among the experts and numbers that stand for none."""
    resident = tiny_model("longcat_flash")
    write_weights(tmp_path, dict(tree_flatten(resident.parameters())))
    cached = tiny_model.__wrapped__("longcat_flash")
    at_once(offload(cached, "longcat", tmp_path, expert_bytes(cached) + MIB))
    tokens = mx.array([prompt(16)]) % 64
    with _always():
        assert same(cached(tokens), resident(tokens))


def test_a_router_that_needs_more_than_the_state_is_not_used() -> None:
    def choose(_x: mx.array, _other: mx.array) -> mx.array:
        raise AssertionError

    router = Router([{"gate": choose}], EXPERTS)
    assert router.choose(mx.ones((1, 1, 64)), 3) is None
    assert router.choose(mx.ones((1, 1, 64)), 3) is None
    assert Router([{}, ()], EXPERTS).choose(mx.ones((1, 1, 64)), 3) is None
    assert Router([{"gate": lambda x: x}], EXPERTS).choose(mx.ones((1, 1, 64)), 3) is None


@pytest.mark.parametrize("more", [0, 1])
def test_a_pass_over_many_tokens_never_reads_ahead(folder: Path, more: int) -> None:
    model, found = with_slots(folder, 3)
    for cache in _caches(model):
        cache._step = EXPERTS
    for start in range(4):
        mx.eval(model(mx.array([prompt(MOST_TOKENS + more + start)[start:]])))
    assert (found.counts.ahead_hits + found.counts.wasted_bytes > 0) == (not more)

"""Adapters that are loaded and removed while sequences run."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.engine.errors import ModelRejected, Overloaded
from backend.engine.loading import row_adapters
from backend.engine.loading.adapters import Adapter
from backend.engine.loading.row_adapters import RowAdapters, choose_among
from backend.engine.loading.stages import Stages, at_once
from backend.engine.model import EngineModel
from tests.engine.kv_models import words
from tests.engine.random_models import random_model
from tests.engine.rounds import MIB, Rounds, alone, engine_model
from tests.engine.test_row_adapters import write_choices
from tests.long import examples

NAMES = ("one", "two", "three")


@pytest.fixture(autouse=True, scope="module")
def short_stages() -> Iterator[None]:
    """Let a step run after each layer."""
    with patch.object(row_adapters, "_STAGE_BYTES", 1):
        yield


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Adapter]:
    return write_choices(tmp_path_factory.mktemp("adapters"), random_model("full"))


def new_model(**changes: Any) -> EngineModel:
    network = random_model("full")
    return engine_model(network, adapters=RowAdapters(mx.float32), **changes)


def stages(rounds: Rounds, wanted: Mapping[str, Adapter]) -> Stages[None]:
    model = rounds.model
    assert model.adapters is not None
    count = rounds.scheduler.count_adapters
    yield from choose_among(wanted, model.model, model.adapters, count)
    rounds.scheduler.remove_adapters()


def held(model: EngineModel) -> int:
    """The bytes of all stacks, counted in the network."""
    return sum(
        array.nbytes
        for _, module in model.model.named_modules()
        if isinstance(module, row_adapters.ChoosingLinear)
        for array in (module.lora_a, module.lora_b, module.gain)
    )


@cache
def prompt(number: int) -> tuple[int, ...]:
    return tuple(token % 90 + 1 for token in words(300, number))


@pytest.fixture(scope="module")
def expected(files: dict[str, Adapter]) -> dict[tuple[str, int], list[int]]:
    """What each adapter answers to each prompt, alone."""
    model = new_model()
    at_once(stages(Rounds(model), files))
    return {
        (name, number): alone(model, prompt(number), 12, adapter=name).tokens
        for name in ("", *NAMES)
        for number in range(2)
    }


@pytest.mark.usefixtures("each_order")
@settings(max_examples=examples(30), deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_any_order_of_changes_leaves_answers_as_they_are_alone(
    files: dict[str, Adapter], expected: dict[tuple[str, int], list[int]], seed: int
) -> None:
    dice = random.Random(seed)
    model = new_model()
    rounds = Rounds(model)
    assert model.adapters is not None
    free = model.memory_limit - model.weights_bytes
    asked: dict[int, tuple[str, int]] = {}
    cancelled: set[int] = set()
    change: Stages[None] | None = None
    abandoned = None
    for _ in range(60):
        match dice.randrange(6):
            case 0 if change is None:
                names = [name for name in NAMES if dice.random() < 0.5]
                # A name may get the contents of another.
                contents = [files[dice.choice([name, "three"])] for name in names]
                wanted = dict(zip(names, contents, strict=True))
                change, abandoned = stages(rounds, wanted), dice.choice([None, None, 1, 2])
            case 1 | 2:
                name, number = dice.choice(["", *model.adapters.numbers]), dice.randrange(2)
                content = _content(model, name, files)
                asked[len(asked)] = content, number
                rounds.submit(len(asked) - 1, prompt(number), 12, adapter=name)
            case 3 if asked:
                victim = dice.choice(list(asked))
                rounds.scheduler.cancel(victim)
                cancelled.add(victim)
        if change is not None:
            if abandoned == 0:
                change.close()
                change = None
            elif next(change, None) is None:
                change = None
            elif abandoned:
                abandoned -= 1
        if change is None:
            assert model.weights_bytes == held(model) == model.adapters.nbytes
        rounds.step()
        assert model.memory_limit - model.weights_bytes == rounds.scheduler.planner.limits.budget
    if change is not None:
        at_once(change)
    at_once(stages(rounds, {}))
    rounds.drain()
    assert not rounds.faults
    for ticket, wanted_of in asked.items():
        if ticket not in cancelled:
            assert rounds.received[ticket].tokens == expected[wanted_of], (ticket, wanted_of)
    assert model.adapters.loaded == set()
    assert held(model) == 0
    assert rounds.scheduler.planner.limits.budget == free
    assert "ChoosingLinear" not in {type(part).__name__ for part in model.model.modules()}


def _content(model: EngineModel, name: str, files: Mapping[str, Adapter]) -> str:
    """The adapter in the files that this name means now."""
    if not name:
        return ""
    assert model.adapters is not None
    number = model.adapters.numbers[name]
    return next(file for file in NAMES if model.adapters.number(files[file].fingerprint) == number)


@pytest.mark.usefixtures("each_order")
def test_a_removed_adapter_serves_running_requests_and_no_others(
    files: dict[str, Adapter], expected: dict[tuple[str, int], list[int]]
) -> None:
    model = new_model()
    rounds = Rounds(model)
    at_once(stages(rounds, {"one": files["one"]}))
    before = model.weights_bytes
    rounds.submit(1, prompt(0), 12, adapter="one")
    rounds.step()
    assert model.adapters is not None
    number = model.adapters.numbers["one"]
    at_once(stages(rounds, {}))
    assert model.adapters.numbers == {}
    assert model.weights_bytes == before
    rounds.drain()
    assert rounds.received[1].tokens == expected["one", 0]
    assert model.weights_bytes == 0
    model.adapters.numbers = {"one": number}  # as a request that was validated before the removal
    rounds.submit(2, prompt(0), 12, adapter="one")
    rounds.drain()
    assert "'one', which was removed" in str(rounds.received[2].error)


def test_the_same_name_with_other_weights_does_not_use_stored_kv(
    files: dict[str, Adapter], expected: dict[tuple[str, int], list[int]]
) -> None:
    model = new_model()
    rounds = Rounds(model)
    cached = []
    for ticket, content in enumerate(["one", "two", "one"]):
        at_once(stages(rounds, {"name": files[content]}))
        rounds.submit(ticket, prompt(0), 12, adapter="name")
        rounds.drain()
        finished = rounds.received[ticket].finished
        assert finished is not None
        cached.append(finished.usage.cached_tokens > 250)
        assert rounds.received[ticket].tokens == expected[content, 0]
    assert cached == [False, False, True]  # the same weights again use the KV that they computed


def test_adapters_that_running_requests_leave_no_memory_for_are_refused(
    files: dict[str, Adapter], expected: dict[tuple[str, int], list[int]]
) -> None:
    network = random_model("full")
    model = engine_model(network, adapters=RowAdapters(mx.float32), memory_limit=MIB)
    rounds = Rounds(model)
    rounds.submit(1, prompt(0), 12)
    rounds.step()
    planner = rounds.scheduler.planner
    assert planner.reserve(planner.unused - 1000)
    with pytest.raises(Overloaded, match="which running requests use"):
        at_once(stages(rounds, files))
    assert model.weights_bytes == held(model) == 0
    rounds.drain()
    assert rounds.received[1].tokens == expected["", 0]
    with pytest.raises(ModelRejected, match="name fewer adapters"):
        rounds.scheduler.count_adapters(512 * MIB)


@pytest.mark.parametrize("at", [0, 5])
def test_a_failed_read_leaves_all_as_it_was(
    at: int,
    files: dict[str, Adapter],
    expected: dict[tuple[str, int], list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = new_model()
    rounds = Rounds(model)
    at_once(stages(rounds, {"one": files["one"]}))
    assert model.adapters is not None
    before, bytes_before = dict(model.adapters.numbers), model.weights_bytes
    calls = iter(range(1000))

    def broken(*arrays: Any) -> None:
        if next(calls) == at:
            raise RuntimeError("[read] Unable to read")
        return evaluate(*arrays)

    evaluate = mx.eval
    rounds.submit(1, prompt(0), 12, adapter="one")
    rounds.step()
    with monkeypatch.context() as patched:
        patched.setattr("backend.engine.loading.row_adapters.mx.eval", broken)
        with pytest.raises(RuntimeError, match="Unable to read"):
            at_once(stages(rounds, {"one": files["two"], "three": files["three"]}))
    assert model.adapters.numbers == before
    assert model.weights_bytes == bytes_before == held(model)
    rounds.drain()
    assert rounds.received[1].tokens == expected["one", 0]


def test_an_adapter_that_cannot_be_removed_stays_until_it_can(
    files: dict[str, Adapter],
    expected: dict[tuple[str, int], list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rounds = Rounds(model := new_model())
    at_once(stages(rounds, {"one": files["one"]}))

    def broken(*_: Any) -> None:
        raise RuntimeError("[malloc] Unable to allocate")

    with monkeypatch.context() as patched:
        patched.setattr(row_adapters, "remove", broken)
        at_once(stages(rounds, {}))
        assert len(rounds.faults) == 1
        assert model.weights_bytes == held(model) > 0
    rounds.submit(1, prompt(0), 12)
    rounds.drain()
    assert rounds.received[1].tokens == expected["", 0]
    assert model.weights_bytes == held(model) == 0

"""The memory that Status reports equals what MLX holds, at the end of every step."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_reduce

from backend.engine.caching import kv
from backend.engine.caching.cache_kind import CacheKind
from backend.engine.drafting.batch_drafter import DraftModel, ModelDrafter
from backend.engine.drafting.draft_loading import Drafting
from backend.engine.drafting.drafter import DraftRequest, LookupDrafter
from backend.engine.executing.score_plan import Continuation, ScorePlan
from backend.engine.loading.row_adapters import RowAdapters, choose_among
from backend.engine.loading.row_masks import fit_row_masks
from backend.engine.loading.stages import at_once
from backend.engine.model import EngineModel
from backend.engine.planning.pace import Pace
from backend.engine.planning.plan import PassCost, PlannerEvent, StepPlan
from backend.engine.planning.planner import Planner
from backend.engine.request import Sampling
from backend.engine.sampling.logits_head import LogitsHead
from tests.engine.caching.test_quantized_kv import HYBRID, model_of
from tests.engine.kv_models import kv_model, words
from tests.engine.random_models import CONFIGS, VOCABULARY, random_model
from tests.engine.rounds import HOUR, Rounds, engine_model
from tests.engine.steady_cost import steady_cost, stored_cost
from tests.engine.test_row_adapters import add_dora, write_choices

pytestmark = pytest.mark.usefixtures("each_order")
CostOf = Callable[[str], PassCost]

# So wide that MLX's rounding to whole pages hardly matters.
WIDE: dict[str, dict[str, Any]] = {
    "attention": {"num_key_value_heads": 4, "head_dim": 128},
    "window": {"num_key_value_heads": 4, "head_dim": 256, "sliding_window": 60},
    "state space": {
        "hidden_size": 512,
        "num_heads": 32,
        "head_dim": 64,
        "state_size": 64,
        "ssm_state_size": 64,
    },
    "latent": {"kv_lora_rank": 512, "qk_rope_head_dim": 64},
}
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.8, seed=3),
    Sampling(temperature=0.8, top_p=0.9, frequency=0.5, seed=5),
    Sampling(logit_bias=((3, -4.0), (5, 2.0)), repetition=1.2, window=20),
]


@pytest.mark.usefixtures("exact_buffers")
@pytest.mark.parametrize("kind", WIDE)
def test_the_parts_of_status_equal_what_mlx_holds(kind: str) -> None:
    model = kv_model(kind, **WIDE[kind])
    engine = engine_model(model, slots=16, prefill_chunk=128)
    gc.collect()
    mx.synchronize()
    before = mx.get_active_memory()
    weights = tree_reduce(lambda total, array: total + array.nbytes, model.parameters(), 0)
    rounds = Rounds(engine)
    for ticket in range(16):
        prompt = words(20 + 29 * ticket, ticket)
        wishes: dict[str, Any] = {"prompt_logprobs": 2} if ticket == 7 else {}
        sampling = SAMPLINGS[ticket % len(SAMPLINGS)]
        rounds.submit(ticket, prompt, 4 + 3 * ticket, sampling=sampling, **wishes)
    rounds.score(16, _scores())
    looks = 0
    while rounds.scheduler.busy:
        rounds.step()
        mx.synchronize()
        held = mx.get_active_memory() - before + weights
        parts = rounds.scheduler.memory()
        counted = weights + sum(parts.values())
        # Until the next write, a window and its latest snapshot may share a buffer.
        least = counted - _latest_windows(rounds)
        assert 0.95 * least <= held <= 1.05 * counted, parts
        looks += 1
    assert looks > 50
    assert parts["kv_cache"] == 0
    assert parts["prompt_cache"] == rounds.scheduler.planner.entries.index.nbytes > 0
    assert not rounds.faults


@pytest.mark.usefixtures("exact_buffers")
def test_a_snapshot_counts_once_its_row_has_joined_others() -> None:
    """Prompts that share their passes end together, so their snapshots no longer share arrays."""
    model = kv_model("state space", **WIDE["state space"])
    mx.eval(model.parameters())
    gc.collect()
    mx.synchronize()
    before = mx.get_active_memory()
    rounds = Rounds(engine_model(model))
    for ticket in range(4):
        rounds.submit(ticket, words(40, ticket), 20, ignore_eos=True)
    most = 0
    while rounds.scheduler.busy:
        rounds.step()
        mx.synchronize()
        counted = sum(rounds.scheduler.memory().values())
        assert mx.get_active_memory() - before <= 1.05 * counted
        most = max(most, counted)
    assert most >= 4 * kv.cost(model).of(40)


def _latest_windows(rounds: Rounds) -> int:
    return sum(
        kv.snapshot_bytes(kept, shared=True)
        for one in rounds.scheduler.executor.sequences.values()
        for at, kept in one.snapshots.items()
        if at == len(one.history)
    )


@pytest.mark.usefixtures("guesses_always")
def test_the_kv_of_a_draft_model_is_a_part_of_status() -> None:
    model, draft = kv_model("attention", **WIDE["attention"]), _draft_model()
    # Both sequences decode together: each prompt takes a pass or two, and the first answer is long
    # enough for them. With shorter passes, it might end before the second answer begins.
    pace, cost = Pace(512, HOUR), kv.cost(draft.model)
    drafting = Drafting(4, lambda: [ModelDrafter(draft, pace, least_probability=0.0)], cost=cost)
    gc.collect()
    mx.synchronize()
    before = mx.get_active_memory()
    rounds = Rounds(engine_model(model, drafting=drafting, prefill_chunk=512))
    rounds.submit(1, words(300, 1), 500, ignore_eos=True)
    rounds.submit(2, words(280, 2), 500, ignore_eos=True)
    most = 0
    while rounds.scheduler.busy:
        rounds.step()
        mx.synchronize()
        parts = rounds.scheduler.memory()
        held = mx.get_active_memory() - before
        assert held == pytest.approx(sum(parts.values()), rel=0.05), parts
        most = max(most, parts["draft_kv_cache"])
    assert most >= 2 * cost.of(300)
    assert parts["draft_kv_cache"] == 0


@pytest.mark.usefixtures("exact_buffers")
def test_kv_of_a_draft_model_moves_array_by_array(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a sequence leaves, the others are copied, and no array is copied before it must be."""
    draft = _draft_model(num_hidden_layers=8)
    drafter = ModelDrafter(draft, Pace(512, HOUR), least_probability=0.0)
    requests = [DraftRequest(number, words(700, number), 2) for number in range(4)]
    while None in drafter.propose(requests):  # one sequence catches up at a time
        pass
    drafter.forget([0])
    mx.synchronize()
    before = mx.get_active_memory()
    monkeypatch.setattr(mx, "get_memory_limit", lambda: before)
    mx.reset_peak_memory()
    assert None not in drafter.propose(requests[1:])
    mx.synchronize()
    assert mx.get_active_memory() < before
    array = 4 * drafter.nbytes // (3 * 8 * 2)  # of all four sequences
    assert mx.get_peak_memory() - before < 1.2 * array


def _draft_model(**changes: int) -> DraftModel:
    model = kv_model("attention", **WIDE["attention"], **changes)
    mx.eval(model.parameters())
    return DraftModel(model, VOCABULARY, VOCABULARY, 1000)


_CONSTANTS = 1 << 18  # bytes of small arrays that a model makes in its first passes
FORMS: dict[str, tuple[tuple[int, int], str]] = {
    "float": ((0, 0), "full"),
    "float window": ((0, 0), "window"),
    "8 bits": ((8, 8), "full"),
    "8 and 4 bits": ((8, 4), "full"),
    "4 and 8 bits": ((4, 8), "full"),
    "8 and 4 bits in a window": ((8, 4), "window"),
    "float hybrid": ((0, 0), "hybrid"),
    "8 and 4 bits in a hybrid": ((8, 4), "hybrid"),
    "dequantised": ((8, 4), "cap"),
    "recurrent": ((0, 0), "state space"),
    "recurrent hybrid": ((0, 0), "gated delta"),
}
_RECURRENT: dict[str, dict[str, Any]] = {
    "state space": WIDE["state space"],
    "gated delta": {
        "head_dim": 64,
        "linear_num_value_heads": 8,
        "linear_num_key_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    },
}


def _limit_to_the_charges(planner: Planner, before: int, patch: pytest.MonkeyPatch) -> None:
    """Let the engine copy rows as if what the planner charges were all memory.

    before: bytes that the charges do not include.
    """
    plan, limits = planner.plan, [0, 0]

    def planned(now: float, events: Iterable[PlannerEvent]) -> StepPlan:
        found = plan(now, events)
        limits[:] = limits[1], before + planner.limits.budget - planner.free_for_texts
        return found

    patch.setattr(planner, "plan", planned)
    patch.setattr(mx, "get_memory_limit", lambda: max(limits))


@pytest.mark.usefixtures("exact_buffers", "guesses_always", "counted_clock")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("drafts", [False, True])
def test_no_step_takes_more_than_the_planner_charges(
    form: str, rows: int, monkeypatch: pytest.MonkeyPatch, drafts: bool, memory_cost: CostOf
) -> None:
    model = memory_model(form)
    rest: dict[str, Any] = {"drafting": Drafting(8, lambda: [LookupDrafter()])} if drafts else {}
    engine = engine_model(
        model, passes=memory_cost(form), prompt_cache_bytes=0, prefill_chunk=256, **rest
    )
    rounds, before = _limited(engine, monkeypatch)
    for ticket in range(rows):
        prompt = words(300 + 60 * ticket, ticket) if not drafts else [3, 5, 7, 9] * (75 + ticket)
        rounds.submit(ticket, prompt, 12 + 6 * ticket, ignore_eos=True)
    _check_charges(rounds, before)


def _limited(engine: EngineModel, monkeypatch: pytest.MonkeyPatch) -> tuple[Rounds, int]:
    """Rounds whose memory is limited to the charges, and the bytes that these do not include."""
    gc.collect()
    mx.synchronize()
    before = mx.get_active_memory()
    rounds = Rounds(engine)
    _limit_to_the_charges(rounds.scheduler.planner, before, monkeypatch)
    return rounds, before


def _check_charges(rounds: Rounds, before: int) -> None:
    """Run all steps, none of which may take more memory than the planner has charged.

    before: bytes that the charges do not include.
    """
    planner, charged = rounds.scheduler.planner, 0
    while rounds.scheduler.busy:
        mx.synchronize()
        mx.reset_peak_memory()
        rounds.step()
        mx.synchronize()
        peak = mx.get_peak_memory() - before
        charges = charged, planner.limits.budget - planner.free_for_texts
        charged = charges[1]
        assert peak <= max(charges) + _CONSTANTS, planner._latest
    assert not rounds.faults


@pytest.mark.usefixtures("exact_buffers", "guesses_always", "counted_clock")
@pytest.mark.parametrize("rows", [1, 4])
def test_the_passes_of_a_draft_model_are_charged(
    rows: int, monkeypatch: pytest.MonkeyPatch, memory_cost: CostOf
) -> None:
    """It computes with more memory than the model: while it catches up, and for each token."""
    model = memory_model("float")
    network = kv_model("attention", **WIDE["attention"], intermediate_size=4096)
    passes, cost = steady_cost(network, VOCABULARY), kv.cost(network)
    draft = DraftModel(network, VOCABULARY, VOCABULARY, 1000, LogitsHead(network, VOCABULARY))
    pace = Pace(512, HOUR)
    drafting = Drafting(4, lambda: [ModelDrafter(draft, pace, 0.0)], cost=cost, passes=passes)
    engine = engine_model(
        model, passes=memory_cost("float"), prompt_cache_bytes=0, drafting=drafting
    )
    rounds, before = _limited(engine, monkeypatch)
    for ticket in range(rows):
        rounds.submit(ticket, words(300 + 60 * ticket, ticket), 12 + 6 * ticket, ignore_eos=True)
    _check_charges(rounds, before)


@pytest.mark.usefixtures("exact_buffers", "counted_clock")
def test_passes_of_adapters_of_wide_layers_are_charged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = {"intermediate_size": 8192}
    monkeypatch.setitem(CONFIGS, "full", CONFIGS["full"] | wide)
    model = random_model("full")
    passes = steady_cost(model, VOCABULARY)
    choices = write_choices(tmp_path, model, one=8, two=64)
    add_dora(tmp_path, choices)
    pace = Pace(256, HOUR)
    pace.measured(256, 0.1)  # so that the first pass is as long as the others
    engine = engine_model(model, passes=passes, prompt_cache_bytes=0, prefill_chunk=256, pace=pace)
    engine.adapters = RowAdapters(mx.float32)
    rounds, before = _limited(engine, monkeypatch)
    at_once(choose_among(choices, model, engine.adapters, rounds.scheduler.count_adapters))
    before += engine.adapters.nbytes
    for ticket in range(4):
        prompt, name = words(360 + 60 * ticket, ticket), ["dora", "two"][ticket % 2]
        rounds.submit(ticket, prompt, 12 + 6 * ticket, ignore_eos=True, adapter=name)
    _check_charges(rounds, before)


def test_a_drafter_without_memory_for_its_passes_does_not_draft() -> None:
    model, network = memory_model("float"), kv_model("attention")
    draft = DraftModel(network, VOCABULARY, VOCABULARY, 1000)
    asked: list[int] = []

    class Watched(ModelDrafter):
        def propose(self, requests: Sequence[DraftRequest]) -> list[list[int] | None]:
            asked.append(len(requests))
            return super().propose(requests)

    for nbytes in (1 << 30, 0):
        drafting = Drafting(
            4,
            lambda: [Watched(draft, Pace(512, HOUR))],
            cost=kv.cost(network),
            passes=PassCost(per_row=nbytes),
        )
        rounds = Rounds(engine_model(model, drafting=drafting))
        rounds.submit(1, words(30, 1), 40, ignore_eos=True)
        rounds.drain()
        assert bool(asked) is not bool(nbytes)
        assert rounds.received[1].error is None


def memory_model(form: str) -> Any:
    bits, config = FORMS[form]
    if config in _RECURRENT:
        return kv_model(config, **_RECURRENT[config], num_hidden_layers=4)
    heads: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128}
    changes: dict[str, Any] = {
        "full": heads,
        "window": heads | {"sliding_window": 60},
        "hybrid": HYBRID,
        "cap": heads | {"model_type": "gemma2", "query_pre_attn_scalar": 8},
    }[config]
    kind = CacheKind(*bits, 32 if any(bits) else 0)
    model = model_of(
        kind, "full" if config == "cap" else config, "memory", **changes, num_hidden_layers=4
    )
    fit_row_masks(model)
    return model


@pytest.fixture(scope="session")
def memory_cost(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> CostOf:
    """The cost of a pass of `memory_model`, by its form; all workers of a run share it."""
    own = tmp_path_factory.getbasetemp()
    folder = own if worker_id == "master" else own.parent

    @cache
    def cost_of(form: str) -> PassCost:
        file = folder / f"{form.replace(' ', '-')}.cost.json"
        return stored_cost(file, lambda: steady_cost(memory_model(form), VOCABULARY))

    return cost_of


def _scores() -> ScorePlan:
    prefix = words(150, 40)
    tails = tuple(Continuation(tuple(words(9, salt))) for salt in range(5))
    return ScorePlan(prefix, tails, stable=0)


def test_texts_to_embed_may_take_the_memory_of_stored_prompts() -> None:
    model = engine_model(kv_model("attention"), prompt_cache_bytes=1 << 19, memory_limit=1 << 20)
    rounds = Rounds(model)
    for ticket in range(4):
        rounds.submit(ticket, words(900, ticket), 2)
        rounds.drain()
    stored = rounds.scheduler.executor.entry_bytes
    needed = (1 << 20) - stored // 2
    assert stored > 400_000
    assert rounds.scheduler.lend(needed) < needed
    rounds.drain()
    assert rounds.scheduler.lend(needed) >= needed
    assert rounds.scheduler.executor.entry_bytes <= stored // 2

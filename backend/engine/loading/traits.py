"""Measures, on a model's first tokens, the figures on which scheduling depends.

A later load of the same checkpoint uses the same figures (`findings`).

Ranks that divide a model measure together, because each forward pass needs all ranks. They agree on
one set of figures, because rank 0 plans for all ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from backend.engine.blas_threads import one_blas_thread
from backend.engine.caching import kv
from backend.engine.caching.cache_form import use_cache_kind
from backend.engine.caching.cache_kind import CacheKind
from backend.engine.errors import EngineError, NotFinite, Unusable
from backend.engine.executing.pass_cost import FirstPass, pass_cost
from backend.engine.loading.stages import Stages, at_once
from backend.engine.loading.weights import LoadedModel, reason_of
from backend.engine.planning.plan import CacheCost, PassCost
from backend.engine.ranks.member import Member, Value
from backend.engine.sampling.logits_head import LogitsHead
from backend.engine.units import GIB
from common.wording import shown

_log = logging.getLogger(__name__)

_SMALL_BYTES = 2 * GIB  # weights that one thread reads in a fifth of a second


@dataclass(frozen=True, slots=True)
class Traits:
    """The fields of `EngineModel` with these names.

    room: bytes of MLX's memory limit that the weights leave, on the rank that has the least left.
    shards: for each rank, the fields of its `Shard`, and the size of its weights as `bytes`.
    bounded: whether `passes` is an upper bound, which `measure_passes` replaces.
    """

    vocabulary: int
    head: LogitsHead
    cost: CacheCost
    passes: PassCost
    batches: bool
    trims: bool
    together: bool
    room: int = 0
    shards: tuple[Value, ...] = ()
    bounded: bool = False

    @property
    def figures(self) -> Value:
        """The figures that forward passes have shown, for later loads of the same checkpoint."""
        return {
            "vocabulary": self.vocabulary,
            "head": self.head.path,
            "cost": asdict(self.cost),
            "passes": asdict(self.passes),
            "together": self.together,
        }


@dataclass(frozen=True, slots=True)
class _Form:
    """How a model stores KV."""

    batches: bool  # whether rows can be batched
    trims: bool  # whether KV can always be cut to a shorter prefix
    stateless: bool  # whether no layer has a recurrent state
    known: bool  # whether the size of every layer's KV can be measured with one token


def measure_passes(model: Any, traits: Traits) -> None:
    """Measure the cost of passes in place of an upper bound. No sequence may be running."""
    traits.passes.become(pass_cost(model, traits.vocabulary, all_logits=not traits.head.found))


def measure(
    loaded: LoadedModel,
    kind: CacheKind,
    limit: int,
    member: Member | None = None,
    known: Value | None = None,
) -> Stages[Traits]:
    """Measure a loaded model, in several stages; ends on `engine`.

    limit: bytes that MLX may use.
    member: this rank, if ranks divide the model.
    known: the `figures` of an earlier load, with which no pass is run; None if there are none.

    Raises Unusable, InvalidRequest, and NotFinite if the logits of the first token are not
    finite.
    """
    model = loaded.model
    try:
        yield "engine"
        use_cache_kind(model, kind)
        row = kv.new_row(model)
        form = _Form(
            kv.can_batch(row), kv.always_trims(row), not kv.keeps_states(row), kv.known_sizes(row)
        )
        if member is not None:
            forms = member.agree(asdict(form))
            form = _Form(**{name: all(form[name] for form in forms) for name in forms[0]})
            if not form.known:
                raise Unusable(
                    f"a model of type {loaded.model_type} stores its KV in a form that is not"
                    " divided among ranks: serve it with one rank",
                )
        figures = (
            _known_figures(model, known)
            if known is not None
            else _figures(model, form, hurried=member is None)
        )
        if loaded.weights_bytes < _SMALL_BYTES:
            figures = _on_one_thread(figures)
        # With several ranks, all stages run at once: if the load ended between two stages on one
        # rank, the others would wait in a collective for ever.
        cost, together, vocabulary, head, passes, bounded = (
            at_once(figures) if member is not None else (yield from figures)
        )
        room, shards = limit - loaded.weights_bytes, ()
        if member is not None:
            assert loaded.shard is not None
            report = {
                "together": together,
                "cost": asdict(cost),
                "passes": asdict(passes),
                "room": room,
                "shard": asdict(loaded.shard) | {"bytes": loaded.weights_bytes},
            }
            reports = member.agree(report)
            room = min(report["room"] for report in reports)
            shards = tuple(report["shard"] for report in reports)
            together = all(report["together"] for report in reports)
            cost = _largest_cost([_cost_of(report["cost"]) for report in reports])
            passes = _largest_pass([PassCost(**report["passes"]) for report in reports])
        return Traits(
            vocabulary,
            head,
            cost,
            passes,
            form.batches,
            form.trims,
            together,
            room,
            shards,
            bounded,
        )
    except EngineError:
        raise
    except Exception as fault:
        _log.warning("model %s: the first token failed", shown(loaded.name), exc_info=True)
        raise Unusable(f"it failed on its first token: {reason_of(fault)}") from None


def _on_one_thread(stages: Stages[_Figures]) -> Stages[_Figures]:
    """Run each stage on one BLAS thread, because its passes are too short to notice busy cores."""
    while True:
        with one_blas_thread():
            try:
                thread = next(stages)
            except StopIteration as end:
                figures: _Figures = end.value
                return figures
        yield thread


_Figures = tuple[CacheCost, bool, int, LogitsHead, PassCost, bool]


def _known_figures(model: Any, known: Value) -> Stages[_Figures]:
    """Return the figures of an earlier load."""
    yield "engine"
    head = LogitsHead(model, known["vocabulary"], known["head"])
    cost, passes = _cost_of(known["cost"]), PassCost(**known["passes"])
    return cost, known["together"], known["vocabulary"], head, passes, False


def _figures(model: Any, form: _Form, *, hurried: bool) -> Stages[_Figures]:
    """Measure the figures that need forward passes.

    hurried: whether an upper bound of the cost of passes is enough for now.
    """
    yield "engine"
    first = FirstPass(model)
    vocabulary = first.logits.shape[-1]
    cost = kv.cost(model, first.row)
    yield "engine"
    together = form.batches and kv.can_prefill_together(model, tried=not form.stateless)
    yield "engine"
    head = LogitsHead(model, vocabulary, first=first.logits)
    if not head.finite:
        raise NotFinite
    yield "engine"
    bounded = hurried and first.ordinary
    passes = pass_cost(model, vocabulary, first, all_logits=not head.found, bounded=bounded)
    return cost, together, vocabulary, head, passes, bounded


def _cost_of(value: Value) -> CacheCost:
    windowed = tuple((size, most) for size, most in value["windowed"])
    return CacheCost(**{**value, "windowed": windowed})


def _largest_cost(costs: Sequence[CacheCost]) -> CacheCost:
    """Return a cost that is at least the cost of a row on any rank."""
    windowed = max((cost.windowed for cost in costs), key=lambda all_: sum(s * m for s, m in all_))
    figures = [asdict(cost) | {"windowed": ()} for cost in costs]
    largest = {name: max(figure[name] for figure in figures) for name in figures[0]}
    return CacheCost(**{**largest, "windowed": windowed})


def _largest_pass(passes: Sequence[PassCost]) -> PassCost:
    figures = [asdict(cost) for cost in passes]
    return PassCost(**{name: max(row[name] for row in figures) for name in figures[0]})

"""Measures, on a model's first tokens, the figures on which scheduling depends.

A later load of the same checkpoint uses the same figures (`findings`).

Ranks that divide a model measure together, because each forward pass needs all ranks. They agree on
one set of figures, because rank 0 plans for all ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from backend.engine.blas_threads import one_blas_thread
from backend.engine.caching import kv
from backend.engine.caching.cache_form import use_cache_kind
from backend.engine.caching.cache_kind import CacheKind
from backend.engine.errors import EngineError, NotFinite, Unusable
from backend.engine.loading.pass_cost import FirstPass, pass_cost
from backend.engine.loading.stages import Stages, at_once
from backend.engine.loading.weights import LoadedModel, reason_of
from backend.engine.planning.plan import CacheCost, PassCost
from backend.engine.ranks.rank_info import Member, Value
from backend.engine.sampling.logits_head import LogitsHead
from backend.engine.units import GIB
from common.wording import shown

_log = logging.getLogger(__name__)

_SMALL_BYTES = 2 * GIB  # weights that one thread reads in a fifth of a second


@dataclass(frozen=True, slots=True)
class Traits:
    """The fields of `EngineModel` with these names.

    budget: bytes of MLX's memory limit that the weights leave, on the rank with the fewest.
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
    budget: int = 0
    shards: tuple[Value, ...] = ()
    bounded: bool = False

    @property
    def figures(self) -> Value:
        """The figures that forward passes have shown, for later loads of the same checkpoint."""
        return {
            "vocabulary": self.vocabulary,
            "head": self.head.path,
            "cost": asdict(self.cost),
            "passes": asdict(self.passes) | {"adapted": 0},
            "together": self.together,
        }


def measure_passes(model: Any, traits: Traits) -> None:
    """Measure the cost of passes in place of an upper bound. No sequence may be running."""
    measured = pass_cost(model, traits.vocabulary, all_logits=not traits.head.found)
    traits.passes.become(replace(measured, adapted=traits.passes.adapted))


def measure(
    loaded: LoadedModel,
    kind: CacheKind,
    limit: int,
    member: Member | None = None,
    known: Value | None = None,
) -> Stages[Traits]:
    """Measure a loaded model, in several stages; ends on `engine`.

    known: the `figures` of an earlier load, with which no pass is run; None if there are none.

    Raises Unusable, InvalidRequest, and NotFinite if the logits of the first token are not
    finite.
    """
    model = loaded.model
    try:
        yield "engine"
        use_cache_kind(model, kind)
        form = _form(kv.new_row(model))
        if member is not None:
            forms = member.agree(form)
            form = {name: all(form[name] for form in forms) for name in form}
            if not form["known"]:
                raise Unusable(
                    f"a model of type {loaded.model_type} stores its KV in a form that is not"
                    " divided among ranks: serve it with one rank",
                )
        stages = (
            _measured(model, form, hurried=member is None)
            if known is None
            else _known(model, form, known)
        )
        if loaded.weights_bytes < _SMALL_BYTES:
            stages = _on_one_thread(stages)
        # With several ranks, all stages run at once: if the load ended between two stages on one
        # rank, the others would wait in a collective for ever.
        traits = at_once(stages) if member is not None else (yield from stages)
        traits = replace(traits, budget=limit - loaded.weights_bytes)
        return traits if member is None else _agreed(traits, loaded, member)
    except EngineError:
        raise
    except Exception as fault:
        _log.warning("model %s: the first token failed", shown(loaded.name), exc_info=True)
        raise Unusable(f"it failed on its first token: {reason_of(fault)}") from None


def _form(row: list[Any]) -> dict[str, bool]:
    """Return how a model stores KV.

    batches: whether rows can be batched.
    trims: whether KV can always be cut to a shorter prefix.
    stateless: whether no layer has a recurrent state.
    known: whether the size of every layer's KV can be measured with one token.
    """
    return {
        "batches": kv.can_batch(row),
        "trims": kv.always_trims(row),
        "stateless": not kv.keeps_states(row),
        "known": kv.known_sizes(row),
    }


def _on_one_thread(stages: Stages[Traits]) -> Stages[Traits]:
    """Run each stage on one BLAS thread, because its passes are too short to notice busy cores."""
    while True:
        with one_blas_thread():
            try:
                thread = next(stages)
            except StopIteration as end:
                traits: Traits = end.value
                return traits
        yield thread


def _known(model: Any, form: Mapping[str, bool], known: Value) -> Stages[Traits]:
    yield "engine"
    head = LogitsHead(model, known["vocabulary"], known["head"])
    cost, passes = _cost_of(known["cost"]), PassCost(**known["passes"])
    batches, trims = form["batches"], form["trims"]
    return Traits(known["vocabulary"], head, cost, passes, batches, trims, known["together"])


def _measured(model: Any, form: Mapping[str, bool], *, hurried: bool) -> Stages[Traits]:
    """Measure the figures that need forward passes.

    hurried: whether an upper bound of the cost of passes is enough for now.
    """
    yield "engine"
    first = FirstPass(model)
    vocabulary = first.logits.shape[-1]
    cost = kv.cost(model, first.row)
    yield "engine"
    together = form["batches"] and kv.can_prefill_together(model, tried=not form["stateless"])
    yield "engine"
    head = LogitsHead(model, vocabulary, first=first.logits)
    if not head.finite:
        raise NotFinite
    yield "engine"
    bounded = hurried and first.ordinary
    passes = pass_cost(model, vocabulary, first, all_logits=not head.found, bounded=bounded)
    batches, trims = form["batches"], form["trims"]
    return Traits(
        vocabulary, head, cost, passes, batches, trims, together=together, bounded=bounded
    )


def _agreed(traits: Traits, loaded: LoadedModel, member: Member) -> Traits:
    """Return the traits of the divided model, on which all ranks agree."""
    assert loaded.shard is not None
    shard = asdict(loaded.shard) | {"bytes": loaded.weights_bytes}
    reports = member.agree(traits.figures | {"budget": traits.budget, "shard": shard})
    return replace(
        traits,
        together=all(report["together"] for report in reports),
        cost=_cost_of(_largest([report["cost"] for report in reports])),
        passes=PassCost(**_largest([report["passes"] for report in reports])),
        budget=min(report["budget"] for report in reports),
        shards=tuple(report["shard"] for report in reports),
    )


def _cost_of(value: Value) -> CacheCost:
    windowed = tuple((size, most) for size, most in value["windowed"])
    return CacheCost(**{**value, "windowed": windowed})


def _largest(costs: Sequence[Value]) -> Value:
    """Return a cost that is at least the cost on any rank."""

    def size(value: Any) -> float:
        return float(sum(s * m for s, m in value) if isinstance(value, list | tuple) else value)

    return {name: max((cost[name] for cost in costs), key=size) for name in costs[0]}

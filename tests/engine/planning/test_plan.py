"""Plans are plain data: they survive serialisation, and need no MLX."""

from __future__ import annotations

import dataclasses
import json
import random
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from backend.engine.planning.plan import Source, StepPlan
from tests.engine.planning.test_planner import random_course
from tests.long import TEST_LONG


def rebuilt(kind: Any, data: Any) -> Any:
    """Plain data as the type that a field of a plan has."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        kinds = typing.get_type_hints(kind)
        return kind(**{name: rebuilt(kinds[name], value) for name, value in data.items()})
    if origin in (typing.Union, types.UnionType):
        (only,) = [one for one in arguments if one is not type(None)]
        return None if data is None else rebuilt(only, data)
    if origin in (tuple, Sequence):
        return tuple(rebuilt(arguments[0], one) for one in data)
    if origin is Mapping:
        return {arguments[0](key): rebuilt(arguments[1], one) for key, one in data.items()}
    if origin is typing.Literal:
        assert data in arguments
        return data
    assert kind in (int, float, bool, str)
    assert type(data) is kind, f"{data!r} is no {kind.__name__}"
    return data


def test_a_plan_survives_json() -> None:
    seen: set[str] = set()
    for seed in random.Random(1).sample(range(100_000), 40 if TEST_LONG else 12):
        for _, _, plan in random_course(seed).course:
            wire = json.dumps(dataclasses.asdict(plan))
            assert rebuilt(StepPlan, json.loads(wire)) == plan
            seen |= {name for name in StepPlan.__dataclass_fields__ if getattr(plan, name)}
            for start in plan.start:
                seen.add(start.source.kind if start.source else "anew")
    assert seen >= set(StepPlan.__dataclass_fields__)
    assert seen >= {"anew", *typing.get_args(typing.get_type_hints(Source)["kind"])}

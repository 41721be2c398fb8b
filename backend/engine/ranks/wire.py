"""Defines and serialises the messages between rank 0 and the other ranks.

A message is encoded as its name, a space, and a JSON object of its fields. Fields with default
values are left out. In messages about a load, `number` is the number of the load.
"""

from __future__ import annotations

import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from typing import Any

from pydantic import TypeAdapter

from backend.engine.executing.score_plan import ScorePlan
from backend.engine.planning.plan import StepPlan


class WireError(Exception):
    """The bytes are not a message of this version of the backend."""


class Signal(Enum):
    """A message without fields."""

    BEAT = "beat"  # a heartbeat, from either side
    JOIN = "join"  # join the group of mx.distributed now, at the same time as all other ranks
    OPEN = "open"  # create a new executor for the following plans
    CLEAR = "clear"  # drop all sequences and cached prefixes
    DROP = "drop"  # drop the model
    STOP = "stop"  # exit, because rank 0 is shutting down


# Messages from rank 0.


@dataclass(frozen=True, slots=True)
class LoadShard:
    """Load this rank's part of a model."""

    number: int
    request: dict[str, Any]  # the fields of the LoadRequest
    timeout: float  # seconds of silence after which a rank counts as lost from now on


@dataclass(frozen=True, slots=True)
class Agreed:
    """All ranks have reported their values, by rank."""

    number: int
    values: tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Abandon:
    """End a load that was cancelled, or that has failed on another rank."""

    number: int


@dataclass(frozen=True, slots=True)
class Add:
    """Add a sequence that a later plan starts, with everything that affects its forward passes."""

    number: int
    prompt: Sequence[int]
    limit: int  # maximum number of tokens to generate
    prompt_logprobs: bool = False
    # The continuations to score; None for a sequence that generates tokens.
    scores: ScorePlan | None = None
    side_by_side: bool = False  # whether several continuations may be scored in one pass


@dataclass(frozen=True, slots=True)
class Step:
    """Carry out a plan."""

    plan: StepPlan


@dataclass(frozen=True, slots=True)
class Plain:
    """Run the reference forward pass over tokens, with an empty cache."""

    tokens: tuple[int, ...]


# Messages from the other ranks.


@dataclass(frozen=True, slots=True)
class Join:
    """The first message of a rank, with its packages (`fingerprint.versions`)."""

    rank: int
    size: int
    versions: dict[str, str]


@dataclass(frozen=True, slots=True)
class LoadReport:
    """A rank's report at a point of a load where all ranks wait for each other."""

    number: int
    value: dict[str, Any] = field(default_factory=dict)
    refusal: str = ""  # why the load has failed on this rank; "" if it has not failed


@dataclass(frozen=True, slots=True)
class Failed:
    """The rank has failed, and its process ends."""

    why: str


Message = (
    Signal | LoadShard | Agreed | Abandon | Add | Step | Plain | Join | LoadReport | Failed
)  # fmt: skip
_MESSAGES: dict[str, Any] = {kind.__name__: kind for kind in typing.get_args(Message)}


def name_of(message: Message) -> str:
    """Return the name of a message, for errors."""
    return message.name if isinstance(message, Signal) else type(message).__name__


def encode(message: Message) -> bytes:
    """Return the bytes of a message, without their length."""
    name = type(message).__name__
    return name.encode() + b" " + _adapter(name).dump_json(message, exclude_defaults=True)


def decode(data: bytes) -> Message:
    """Return the message that `encode` has encoded. Raises WireError."""
    name, _, fields = data.partition(b" ")
    try:
        message: Message = _adapter(name.decode()).validate_json(
            fields, strict=True, extra="forbid"
        )
    except (ValueError, KeyError) as fault:
        raise WireError(f"a frame is not a message ({type(fault).__name__})") from None
    return message


@cache
def _adapter(name: str) -> TypeAdapter[Any]:
    return TypeAdapter(_MESSAGES[name])

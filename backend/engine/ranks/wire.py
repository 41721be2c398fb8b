"""The messages between rank 0 and the others, and how they are serialised.

Each is a JSON array of its name and its fields; fields with their default value are left out.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, cast

from backend.engine.executing.score_plan import ScorePlan
from backend.engine.planning.plan import StepPlan

VERSION = 7


class WireError(Exception):
    """These bytes are not a message of this version."""


# From either side.


@dataclass(frozen=True, slots=True)
class Beat:
    """A heartbeat: the sender is alive."""


# From rank 0.


@dataclass(frozen=True, slots=True)
class Form:
    """Answer Ready, so that the group of mx.distributed can be formed.

    timeout: seconds of silence after which a rank counts as lost until the group is formed.
    """

    timeout: float


@dataclass(frozen=True, slots=True)
class Join:
    """Join the group of mx.distributed now, as every other rank does."""


@dataclass(frozen=True, slots=True)
class LoadShard:
    """Load this rank's part of a model. request: the fields of the LoadRequest.

    number: of the load. timeout: seconds of silence after which a rank counts as lost from now on.
    """

    number: int
    request: dict[str, Any]
    timeout: float


@dataclass(frozen=True, slots=True)
class Agreed:
    """The values that all ranks reported, by rank."""

    number: int
    values: tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Abandon:
    """The load was cancelled, or has failed on another rank."""

    number: int


@dataclass(frozen=True, slots=True)
class Open:
    """Create a new executor for the following plans."""


@dataclass(frozen=True, slots=True)
class Add:
    """A sequence that a later plan starts, with everything that affects its forward passes."""

    number: int
    prompt: Sequence[int]
    limit: int
    prompt_logprobs: bool = False
    scores: ScorePlan | None = None
    side_by_side: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """Carry out a plan."""

    plan: StepPlan


@dataclass(frozen=True, slots=True)
class Plain:
    """Run the model's own forward pass over the tokens, with an empty cache."""

    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Clear:
    """Drop all sequences and entries."""


@dataclass(frozen=True, slots=True)
class Drop:
    """Drop the model."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Exit, because rank 0 is shutting down."""


# From the others.


@dataclass(frozen=True, slots=True)
class Software:
    """The first message of a rank. versions: of the packages that must be the same everywhere."""

    versions: dict[str, str]


@dataclass(frozen=True, slots=True)
class Ready:
    """This rank waits for the order to join the group, and does nothing else."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """A report at a point of a load at which all ranks wait for each other.

    refusal: why the load failed on this rank; "" if it did not.
    """

    number: int
    value: dict[str, Any] = field(default_factory=dict)
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class Failed:
    """The rank has failed, and exits."""

    why: str


Message = (
    Beat | Form | Join | LoadShard | Agreed | Abandon | Open | Add | Step | Plain | Clear | Drop
    | Stop | Software | Ready | LoadReport | Failed
)  # fmt: skip
_MESSAGES: dict[str, Any] = {kind.__name__: kind for kind in typing.get_args(Message)}


def encode(message: Message) -> bytes:
    """The bytes of a message, without their length."""
    wire = [type(message).__name__, _fields(message)]
    return json.dumps(wire, separators=(",", ":")).encode()


def decode(data: bytes) -> Message:
    """The message. Raises WireError."""
    try:
        name, fields = json.loads(data)
        message: Message = _reader(_MESSAGES[name])(fields)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as fault:
        raise WireError(f"a frame is not a message ({type(fault).__name__})") from None
    return message


def _fields(value: Any) -> dict[str, Any]:
    found = {}
    for name, default in _defaults(cast(Any, type(value))):
        own = getattr(value, name)
        if default is dataclasses.MISSING or own != default:
            found[name] = _plain(own)
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        if value and type(value[0]) in (int, float, str):
            return value
        return [_plain(one) for one in value]
    if dataclasses.is_dataclass(value):
        return _fields(value)
    return value


@cache
def _defaults(kind: Any) -> tuple[tuple[str, Any], ...]:
    """Default values of a dataclass's fields."""
    return tuple(
        (one.name, one.default_factory())
        if one.default_factory is not dataclasses.MISSING
        else (one.name, one.default)
        for one in dataclasses.fields(kind)
    )


@cache
def _reader(kind: Any) -> Callable[[Any], Any]:
    """A function that converts plain data to a field's type."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        hints = typing.get_type_hints(kind)
        readers = {one.name: _reader(hints[one.name]) for one in dataclasses.fields(kind)}
        return lambda data: kind(**{name: readers[name](value) for name, value in data.items()})
    if kind is Any or origin is dict:
        return lambda data: data
    if origin in (typing.Union, types.UnionType):
        (only,) = [one for one in arguments if one is not type(None)]
        read = _reader(only)
        return lambda data: None if data is None else read(data)
    if origin in (tuple, list, Sequence):
        if arguments[0] is int:
            return list if origin is list else tuple
        if origin is tuple and arguments[-1] is not Ellipsis:
            readers_of = [_reader(one) for one in arguments]
            return lambda data: tuple(read(one) for read, one in zip(readers_of, data, strict=True))
        read_one = _reader(arguments[0])
        whole = list if origin is list else tuple
        return lambda data: whole(read_one(one) for one in data)
    if origin is Mapping:
        key, value = arguments[0], _reader(arguments[1])
        return lambda data: {key(name): value(one) for name, one in data.items()}
    if origin is typing.Literal:
        return lambda data: arguments[arguments.index(data)]
    return _scalar(kind)


def _scalar(kind: Any) -> Callable[[Any], Any]:
    def read(data: Any) -> Any:
        if type(data) is not kind and not (kind is float and type(data) is int):
            raise TypeError(f"{kind.__name__} expected")
        return data

    return read

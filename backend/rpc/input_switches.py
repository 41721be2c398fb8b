"""Metadata of an Embedding or Rerank call: what the protocol has no field for.

It is gRPC's own metadata, because Rerank has no map of the kind that PredictOptions has.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from backend.engine.errors import InvalidRequest
from common.field_names import named
from common.wording import shown

TRUNCATE = "mlx-truncate"
PROMPT_NAME = "mlx-prompt-name-bin"
_FLAGS = {"true": True, "false": False}


@dataclass(frozen=True, slots=True)
class InputSwitches:
    """What a call says about its inputs.

    truncate: whether one that is too long loses its end. prompt_name: the prompt to put in front of
    a text. None: as the model's options say.
    """

    truncate: bool | None = None
    prompt_name: str | None = None


def input_switches(metadata: Iterable[tuple[str, str | bytes]] | None) -> InputSwitches:
    """Read the metadata of a call. Raises InvalidRequest."""
    given = dict(metadata or ())
    truncate, name = given.get(TRUNCATE), given.get(PROMPT_NAME)
    if truncate is not None and truncate not in _FLAGS:
        raise InvalidRequest(f"{named(TRUNCATE)} is {shown(truncate)}: send true or false")
    try:
        prompt = name.decode() if isinstance(name, bytes) else name
    except UnicodeDecodeError:
        raise InvalidRequest(f"{PROMPT_NAME} is not UTF-8: send the name of a prompt") from None
    return InputSwitches(None if truncate is None else _FLAGS[str(truncate)], prompt)

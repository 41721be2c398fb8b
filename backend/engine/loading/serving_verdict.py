"""Decides how a model may be served, so that batches and stored KV do not change its answers.

Most models give the same answers with this project's batched caches as with mlx-lm's caches. The
others raise no error but answer wrongly, for example because they use one position for all rows of
a batch.

`family_verdicts.json` has the verdicts that `make test-models` has found on a CPU. A model that has
no verdict there is tried once (`serving_trial`), during the load, and the verdict is stored with
the findings of the checkpoint. What could not be tried is not allowed.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backend.engine.device import Device
from backend.engine.loading.architectures import aliases
from backend.engine.loading.earlier_fields import in_mlx_lm
from backend.engine.ranks.rank_info import Value
from common.wording import shown

if TYPE_CHECKING:
    from backend.engine.loading.load_order import LoadOrder
    from backend.engine.model import EngineModel

_log = logging.getLogger(__name__)

_ALONE: Mapping[str, Any] = {"slots": 1, "batches": False}
_NO_STORE: Mapping[str, Any] = {"prompt_cache_bytes": 0}
_MESSAGES = {
    "own passes": (
        "prompts that share a prefill pass get other answers than alone%s, so each prompt is"
        " computed by itself"
    ),
    "not stored": (
        "answers that start from stored KV are wrong%s, so every prompt is computed from its"
        " beginning"
    ),
    "in turn": (
        "requests in one batch get other answers than alone%s, so they are served one at a time"
    ),
    "in turn, not stored": (
        "requests in one batch, or from stored KV, get other answers than alone%s, so they are"
        " served one at a time, and every prompt is computed from its beginning"
    ),
}
# Restrictions, from the weakest to the strongest: fields of `EngineModel`.
WAYS: Mapping[str, Mapping[str, Any]] = {
    "shared": {},
    "own passes": {"together": False},
    "not stored": _NO_STORE,
    "in turn": _ALONE,
    "in turn, not stored": {**_ALONE, **_NO_STORE},
}
_TABLES = json.loads(Path(__file__).with_name("family_verdicts.json").read_text())
TEXT_ON_CPU: Mapping[str, str] = _TABLES["text"]  # model type → key of `WAYS`
SEEING_ON_CPU: Mapping[str, str] = _TABLES["seeing"]
_UNTRIED = " or could not be tried"
_NOT_DRAFTING = (
    "its answers with draft tokens differ from those without%s, so it is served without drafting"
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a trial."""

    way: str = "shared"  # a key of `WAYS`
    right: bool = True  # whether a request alone gets the answer of the reference forward pass
    drafts: bool = True  # whether answers with draft tokens are right
    # Whether everything was tried; False if memory was short or the trial failed.
    complete: bool = True

    @property
    def value(self) -> Value:
        return asdict(self)


def family_verdict(order: LoadOrder, device: Device, *, drafts: bool) -> Verdict | None:
    """Return the verdict on the family of a model; None if the tables do not cover this load.

    The tables were made on a CPU, with unquantised KV and without drafting.
    """
    checkpoint = order.checkpoint
    model_type = in_mlx_lm(checkpoint.config)["model_type"]
    package, table = "mlx_lm", TEXT_ON_CPU
    if checkpoint.media:
        package, table, model_type = "mlx_vlm", SEEING_ON_CPU, model_type.lower()
    elif checkpoint.of_vlm or "model_file" in checkpoint.config:
        return None
    if device.kind != "cpu" or drafts or order.ranks or order.cache_kind.quantised:
        return None
    way = table.get(aliases(package).get(model_type, model_type))
    return None if way is None else Verdict(way)


def stored_verdict(stored: object) -> Verdict | None:
    """Return the verdict of an earlier load from its `value`; None if that is no verdict."""
    if not isinstance(stored, dict) or stored.keys() != {field.name for field in fields(Verdict)}:
        return None
    return Verdict(**stored) if stored["way"] in WAYS else None


def restrict(model: EngineModel, verdict: Verdict, name: str, reason: str = "") -> None:
    """Restrict a model to what its verdict allows, and log each restriction.

    reason: a clause for the log message; '' if there is none.
    """
    reason = reason or ("" if verdict.complete else _UNTRIED)
    changes = WAYS[verdict.way]
    if any(getattr(model, field) != value for field, value in changes.items()):
        _log.warning("model %s: " + _MESSAGES[verdict.way], shown(name), reason)
        for field, value in changes.items():
            setattr(model, field, value)
    if model.drafting is not None and not verdict.drafts:
        _log.warning("model %s: " + _NOT_DRAFTING, shown(name), reason)
        model.weights_bytes -= model.drafting.weights_bytes
        model.drafting = None

"""Finds the draft model of a load request. Needs no MLX; runs on the file thread."""

from __future__ import annotations

import logging
import os
import re
import threading
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from backend.engine.errors import Converting, InvalidRequest, ModelNotFound, ModelRejected
from backend.engine.loading.checkpoint import Checkpoint, inspect
from backend.engine.loading.model_reference import HubModel, LocalModel, resolve
from backend.engine.settings import SPECIAL_TOKENS, Settings
from common.drafter_kind import DrafterKind
from common.field_names import named

_log = logging.getLogger(__name__)

_CUT_SCHEME = re.compile(r"^(https?|hf|huggingface|file):/(?!/)", re.IGNORECASE)


def find_draft(
    draft: str, model_path: str, settings: Settings, cancelled: threading.Event
) -> Checkpoint | None:
    """Download and check the draft model; return its checkpoint, or None if DraftModel is blank.

    Raises ModelNotFound, ModelRejected, InvalidRequest, Cancelled.
    """
    if not draft.strip():
        return None
    own = own_settings(settings)
    with naming_draft_model():
        reference = resolve_draft(draft, model_path)
        if isinstance(reference, LocalModel):
            path = reference.path
        else:
            from backend.engine.loading.download import download

            path = download(reference, own, cancelled, drafts=True)
        return inspect(path, reference.name, own, drafts=True)


def find_head(path: Path, settings: Settings) -> Checkpoint | None:
    """Return the checkpoint of a model's prediction head; None if it has no checkpoint of its own.

    The folder is `mtp` in the model's folder or, as mlx-vlm's `convert --mtp` writes it, beside the
    model's folder and named like it with `-mtp`. Raises ModelRejected if the head is broken and mtp
    is set.
    """
    if settings.mtp is False:
        return None
    for folder in (path / "mtp", path.parent / f"{path.name}-mtp"):
        if not (folder / "config.json").is_file():
            continue
        try:
            found = inspect(folder, folder.name, own_settings(settings), drafts=True)
        except ModelRejected as fault:
            if settings.mtp:
                raise
            _log.warning("%s: it does not draft", fault)
            continue
        if found.drafter is DrafterKind.HEAD:
            return found
    return None


def resolve_draft(draft: str, model_path: str) -> LocalModel | HubModel:
    """Resolve DraftModel like any model reference.

    LocalAI joins the value with its models folder, even if the value is a hub id, and joining turns
    `https://` into `https:/`. So the part below that folder is the reference that the user wrote.
    """
    written = draft.strip()
    if not Path(written).is_absolute():
        return resolve(_with_scheme(written), "", model_path)
    relative = os.path.relpath(written, model_path) if model_path else os.pardir
    if Path(relative).parts[:1] in ((), (os.pardir,)):
        return resolve("", written)
    return resolve(_with_scheme(relative), written, model_path)


def _with_scheme(reference: str) -> str:
    return _CUT_SCHEME.sub(r"\1://", reference)


def own_settings(settings: Settings) -> Settings:
    """Return the settings of the main model that also apply to the draft model."""
    unset: dict[str, Any] = dict.fromkeys(SPECIAL_TOKENS, "")
    return replace(settings, revision="", expert_cache_mib=0, **unset)


def naming_draft_model() -> AbstractContextManager[None]:
    """Name DraftModel in errors in the context, which would seem to be about the main model."""
    return Converting(
        lambda refusal: type(refusal)(f"{named('DraftModel')}: {refusal}"),
        ModelNotFound,
        ModelRejected,
        InvalidRequest,
    )

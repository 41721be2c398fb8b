"""Converts ModelOptions, with the settings in Options and EngineArgs, to a LoadRequest.

A value that cannot work makes the load fail with an explanation, not every later request.
docs/fields.md lists how each field is treated.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from backend.engine.errors import InvalidRequest
from backend.engine.load_request import AdapterRequest, LoadRequest
from backend.engine.settings import RULES, checked, unknown_setting
from backend.rpc.checks import json_value, require_least
from backend.rpc.fields import MODEL_OPTIONS, require_neutral
from common.field_names import named
from common.field_table import FieldTable, Refused, each
from common.wording import shown
from wire import backend_pb2 as pb

_ADAPTER_NAME = re.compile(r"[A-Za-z0-9._/-]{1,100}")
_MOST_CHOICES = 64

OPTIONS = FieldTable(
    neutral=each(
        {
            "the host sends this value with every request": "temperature temp top_p min_p top_k"
            " seed repetition_penalty presence_penalty frequency_penalty",
            "the KV cache is quantised from its first token": "quantized_kv_start",
        }
    ),
    refused={
        "max_kv_size": Refused(
            "set context_size to limit memory",
            why="a rotating KV cache silently drops the start of the prompt",
        )
    },
)


def load_request(options: pb.ModelOptions) -> tuple[LoadRequest, list[str]]:
    """Return the validated request, and warnings for the log. Raises InvalidRequest."""
    require_neutral(MODEL_OPTIONS, options)
    settings, warnings = parse_settings(list(options.Options), options.EngineArgs)
    trusted: bool = settings.get("trust_remote_code", options.TrustRemoteCode)
    request = LoadRequest(
        model=_reference("Model", options.Model),
        model_file=_reference("ModelFile", options.ModelFile),
        model_path=_reference("ModelPath", options.ModelPath),
        context_size=_context_size(
            0 if settings.get("context") == "max" else options.ContextSize, options.MaxModelLen
        ),
        dtype=options.DType,
        trust_remote_code=trusted,
        cache_type_key=options.CacheTypeKey,
        cache_type_value=options.CacheTypeValue,
        adapters=_adapters(options),
        choices=_choices(settings.get("adapters", "")),
        draft_model=_reference("DraftModel", options.DraftModel),
        embeddings=options.Embeddings,
        reranking=options.Reranking,
        most_images=options.LimitImagePerPrompt,
        most_audios=options.LimitAudioPerPrompt,
        most_videos=options.LimitVideoPerPrompt,
        settings=settings,
    )
    if not request.model and not request.model_file:
        raise InvalidRequest(
            f"{named('Model')} is empty: name a hub repository or a model directory"
        )
    return request, warnings


def parse_settings(options: Sequence[str], engine_args: str) -> tuple[dict[str, Any], list[str]]:
    """Return the given settings, converted and checked, and warnings for the log.

    An unknown option is only a warning, because hosts add options of their own; an unknown key in
    EngineArgs, or a wrong value in either, raises InvalidRequest. EngineArgs takes precedence.
    """
    given, warnings = split_options(options)
    values: dict[str, Any] = {}
    for name, text in given.items():
        if name in RULES:
            values[name] = checked("option", name, RULES[name].parse(text))
        elif name in OPTIONS.neutral:
            warnings.append(f"option {name} has no effect here: {OPTIONS.neutral[name]}")
        elif name in OPTIONS.refused:
            raise InvalidRequest(_unsupported("option", name))
        else:
            warnings.append(unknown_setting("option", name))
    arguments = json_value(dict, "EngineArgs", engine_args, "a JSON object of settings")
    for name, value in arguments.items():
        if name in OPTIONS.refused:
            raise InvalidRequest(f"{_unsupported('EngineArgs key', name)}; remove it")
        if why := OPTIONS.neutral.get(name):
            raise InvalidRequest(f"EngineArgs key {name} has no effect here: {why}; remove it")
        values[name] = checked("EngineArgs key", name, value)
    return values, warnings


def _unsupported(kind: str, name: str) -> str:
    row = OPTIONS.refused[name]
    return f"{kind} {name} is not supported, because {row.why}; {row.instead}"


def split_options(entries: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the values by key, and a warning for each option without the form `key:value`.

    An option is split at its first colon; the last option with a key applies.
    """
    given: dict[str, str] = {}
    warnings: list[str] = []
    for entry in entries:
        key, colon, text = (part.strip() for part in entry.partition(":"))
        if key and colon:
            given[key] = text
        else:
            missing = "key" if colon else "colon"
            warnings.append(f"option {shown(entry)} has no {missing}: write it as key:value")
    return given, warnings


def _reference(name: str, value: str) -> str:
    if "\0" in value:
        raise InvalidRequest(f"{named(name)} contains a NUL character: remove it")
    return value


def _adapters(options: pb.ModelOptions) -> tuple[AdapterRequest, ...]:
    """Return LoraAdapter with its LoraScale, then LoraAdapters with their LoraScales.

    In the protocol an unset scale is 0, so 0 means 1: the adapter's own scale.
    """
    names, scales = list(options.LoraAdapters), list(options.LoraScales)
    if len(scales) > len(names):
        raise InvalidRequest(
            f"{named('LoraScales')} has {len(scales)} entries, but {named('LoraAdapters')} has"
            f" {len(names)}: send at most one scale for each adapter"
        )
    scales += [0.0] * (len(names) - len(scales))
    adapters = [_adapter("LoraAdapters", *pair) for pair in zip(names, scales, strict=True)]
    if options.LoraAdapter:
        adapters.insert(0, _adapter("LoraAdapter", options.LoraAdapter, options.LoraScale))
    elif options.LoraScale not in (0, 1):
        raise InvalidRequest(
            f"{named('LoraScale')} is {options.LoraScale:g}, but {named('LoraAdapter')} is empty:"
            f" name the adapter, or use {named('LoraScales')} for {named('LoraAdapters')}"
        )
    return tuple(adapters)


def _adapter(field: str, reference: str, scale: float) -> AdapterRequest:
    if not reference.strip():
        raise InvalidRequest(f"{named(field)} names an empty adapter: remove it")
    if not math.isfinite(scale) or scale < 0:
        raise InvalidRequest(
            f"{named(field)} has an adapter with the scale {scale:g}: send a number above 0, or 0"
            " for 1"
        )
    return AdapterRequest(_reference(field, reference), scale or 1.0)


def _choices(text: str) -> tuple[tuple[str, AdapterRequest], ...]:
    """Return the adapters that requests may choose, by their names."""
    choices: dict[str, AdapterRequest] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, _, reference = (part.strip() for part in entry.partition("="))
        if not (_ADAPTER_NAME.fullmatch(name) and reference) or name in choices:
            raise InvalidRequest(
                f"option adapters has the entry {shown(entry)}: write name=reference, with each"
                " name once, and only letters, digits and . _ - / in it"
            )
        choices[name] = _adapter("adapters", reference, 1.0)
    if len(choices) > _MOST_CHOICES:
        raise InvalidRequest(
            f"option adapters names {len(choices)} adapters: name at most {_MOST_CHOICES}"
        )
    return tuple(choices.items())


def _context_size(context_size: int, max_model_len: int) -> int:
    """Return the smaller limit on prompt plus output of those that are set; 0 if none is."""
    for name, value in (("ContextSize", context_size), ("MaxModelLen", max_model_len)):
        require_least(name, value, 0, "a count of tokens, or 0 for the model's own maximum")
    return min((size for size in (context_size, max_model_len) if size), default=0)

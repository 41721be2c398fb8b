"""Settings as a host gives them: `options:` entries and EngineArgs, parsed and checked.

A value that cannot work fails the load at once, with a sentence, instead of every request after
it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from backend.engine.errors import InvalidRequest
from backend.engine.setting_rules import Rule, checked
from backend.engine.settings import RULES, unknown_setting
from common.options import Option, parse_options, shown

_PER_REQUEST = "has no effect here: the host sends this value with every request"
NOT_HONOURED: dict[str, str] = dict.fromkeys(
    (
        "temperature",
        "temp",
        "top_p",
        "min_p",
        "top_k",
        "seed",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
    ),
    _PER_REQUEST,
) | {"quantized_kv_start": "has no effect here: the KV cache is quantised from its first token"}
REFUSED: dict[str, str] = {
    "max_kv_size": "is not supported: a rotating context forgets the start of the prompt without"
    " saying so; set context_size to bound memory"
}


def parse_settings(options: Sequence[str], engine_args: str) -> tuple[dict[str, Any], list[str]]:
    """The settings that were given, typed and checked, and warnings for the log.

    An unknown option is a warning, since hosts add options of their own; an unknown key in
    EngineArgs, and a wrong value in either, raises InvalidRequest.
    """
    parsed = parse_options(options)
    values: dict[str, Any] = {}
    warnings = list(parsed.warnings)
    for name, option in parsed.options.items():
        if name in RULES:
            values[name] = checked(RULES[name], "option", name, _of_option(RULES[name], option))
        elif name in REFUSED:
            raise InvalidRequest(f"option {name} {REFUSED[name]}")
        elif name in NOT_HONOURED:
            warnings.append(f"option {name} {NOT_HONOURED[name]}")
        else:
            warnings.append(unknown_setting("option", name))
    values.update(_parse_engine_args(engine_args))
    return values, warnings


def _of_option(rule: Rule, option: Option) -> Any:
    """An option's value in the setting's own type, where its looks alone decided otherwise."""
    if rule.kind is str:
        return option.text
    if rule.auto and option.text.lower() == "auto":
        return None
    value = option.value
    if rule.kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _parse_engine_args(text: str) -> dict[str, Any]:
    if not text.strip():
        return {}
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"EngineArgs is not valid JSON: {error}") from None
    if not isinstance(given, dict):
        raise InvalidRequest(
            f"EngineArgs must be a JSON object of settings, but it is {shown(given)}"
        )
    values: dict[str, Any] = {}
    for name, value in given.items():
        source = "EngineArgs key"
        if name in RULES:
            automatic = RULES[name].auto and value == "auto"
            values[name] = checked(RULES[name], source, name, None if automatic else value)
        elif why := REFUSED.get(name) or NOT_HONOURED.get(name):
            raise InvalidRequest(f"{source} {name} {why}; remove it")
        else:
            raise InvalidRequest(unknown_setting(source, name))
    return values

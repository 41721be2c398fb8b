"""Writes the settings of thinking and of template variables for the backend.

They come from the request and from the model's file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from common.field_names import named
from gateway.errors import bad_field
from gateway.models.config import ModelConfig
from gateway.openai.chat_request import ChatCompletionRequest
from gateway.openai.sampling_to_wire import agreed
from gateway.openai.thinking_fields import BUDGETS
from wire import backend_pb2 as pb

_THINKING = "enable_thinking"
_EFFORT = "reasoning_effort"


def write_template_arguments(
    options: pb.PredictOptions, request: ChatCompletionRequest, config: ModelConfig
) -> None:
    """Set Metadata. Raises ApiError for contradictions, and for variables without a template."""
    if request.role_mapping is not None:
        _require_no_template(request)
        return
    variables = request.chat_template_kwargs or {}
    thinking = _thinking(request)
    _require_agreement(variables, thinking, request)
    thinks = _flag(variables.get(_THINKING)) if thinking is None else thinking
    effort = request.reasoning_effort or ("" if _EFFORT in variables else config.reasoning_effort)
    if effort == "none":
        if thinks:  # the effort is the model file's; the request overrides it
            effort = ""
        else:
            thinking = False
    arguments: dict[str, Any] = {**config.chat_template_kwargs, **variables}
    disabled = config.reasoning.disable
    if thinking is None and _THINKING not in arguments and disabled is not None:
        thinking = not disabled
    budget = agreed(*((name, getattr(request, name)) for name in BUDGETS))
    if budget is not None:
        options.Metadata["mlx.thinking_budget"] = str(budget)
    if effort:
        options.Metadata[_EFFORT] = effort
    if thinking is not None:
        options.Metadata[_THINKING] = json.dumps(thinking)
    if arguments:
        options.Metadata["chat_template_kwargs"] = json.dumps(arguments)


def _thinking(request: ChatCompletionRequest) -> bool | None:
    """Return whether the request's own fields turn thinking on or off."""
    if request.reasoning_effort != "none":
        return request.enable_thinking
    if request.enable_thinking:
        raise bad_field(f"{named(_EFFORT)} is 'none' and enable_thinking is true: send one of them")
    return False


def _require_agreement(
    variables: Mapping[str, Any], thinking: bool | None, request: ChatCompletionRequest
) -> None:
    """Refuse contradictions, because the backend would ignore the variable."""
    for name, value in ((_THINKING, thinking), (_EFFORT, request.reasoning_effort)):
        given = variables.get(name, value)
        if value is not None and (_flag(given) if name == _THINKING else given) != value:
            raise bad_field(
                f"{named('chat_template_kwargs')} has {name} {json.dumps(given)[:100]}, but by the"
                f" request's own fields it is {json.dumps(value)}: send one of them",
            )


def _flag(value: Any) -> bool | None:
    """Return a true or false variable as backends write it."""
    if isinstance(value, str):
        return {"true": True, "false": False}.get(value.strip().lower())
    return value if isinstance(value, bool) else None


def _require_no_template(request: ChatCompletionRequest) -> None:
    for name in ("chat_template_kwargs", _THINKING, _EFFORT, *BUDGETS):
        if getattr(request, name) not in (None, {}):
            raise bad_field(
                f"{named(name)} needs the model's chat template, which role_mapping replaces:"
                " leave out one of them",
            )
    if request.include_reasoning is False:
        raise bad_field(
            f"{named('include_reasoning')} is false, but reasoning is not separated from the"
            " answer with role_mapping: leave out one of them",
        )

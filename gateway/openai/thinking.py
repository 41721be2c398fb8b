"""Whether, how much and how visibly a model thinks, and other variables of its chat template.

Servers use different names for the fields, so there are several for each. The values come from the
request and from the model's file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import Field

from common.field_names import named
from gateway.described import about
from gateway.errors import bad_field
from gateway.fields import Strict
from gateway.models.config import ModelConfig
from gateway.openai.sampling import NAMES, given_as
from gateway.repairs import known
from wire import backend_pb2 as pb

if TYPE_CHECKING:
    from gateway.openai.chat_request import ChatCompletionRequest

_Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
ReasoningEffort = Annotated[_Effort, known(get_args(_Effort))]
Budget = Annotated[int | None, Field(ge=-1, le=100_000_000)]
_SWITCH = {"enabled": True, "disabled": False, "adaptive": None, "auto": None}
_THINKING = "enable_thinking"
_EFFORT = "reasoning_effort"
_BUDGET = "Metadata mlx.thinking_budget"


class Reasoning(Strict):
    """OpenRouter's object with the fields that other clients send one by one."""

    effort: ReasoningEffort | None = None
    max_tokens: Budget = about("Another name of thinking_budget.")
    enabled: bool | None = about("Another name of enable_thinking.")
    exclude: bool | None = about("true means include_reasoning false.")


class Thinking(Strict):
    """Anthropic's object, as LiteLLM, DeepSeek and GLM accept it for chats too."""

    type: Annotated[str, known(_SWITCH)] | None = about("Sets enable_thinking.")
    budget_tokens: Budget = about("Another name of thinking_budget.")


class ThinkingFields(Strict):
    """All fields of a chat request about reasoning."""

    reasoning_effort: ReasoningEffort | None = about(
        "Given to the chat template; bounds the reasoning if the template does not"
        " use it. `none` also turns thinking off."
    )
    include_reasoning: bool | None = about(
        "false leaves reasoning out of the answer (it is still generated);"
        " not with log-probabilities, which are sent for every token."
    )
    enable_thinking: bool | None = about("Given to the chat template.")
    thinking_budget: Budget = about("Maximum tokens of reasoning; 0: none, -1: no limit.")
    reasoning_budget: Budget = about("llama.cpp's name of thinking_budget.")
    thinking_budget_tokens: Budget = about("Another name of thinking_budget.")
    thinking_token_budget: Budget = about("vLLM's name of thinking_budget.")
    reasoning: Reasoning | None = about("OpenRouter's object; the request's own fields win.")
    thinking: Thinking | None = about("Anthropic's object; the request's own fields win.")

    def thinking_values(self) -> dict[str, Any]:
        """Return the values of `reasoning` and `thinking` under the names of the request."""
        values: dict[str, Any] = {}
        if self.thinking is not None:
            values["enable_thinking"] = _SWITCH.get(self.thinking.type or "auto")
            values["thinking_budget"] = self.thinking.budget_tokens
        if self.reasoning is not None:
            named = {
                "reasoning_effort": self.reasoning.effort,
                "enable_thinking": self.reasoning.enabled,
                "include_reasoning": False if self.reasoning.exclude else None,
                "thinking_budget": self.reasoning.max_tokens,
            }
            values |= {name: value for name, value in named.items() if value is not None}
        return values


def write_template_arguments(
    options: pb.PredictOptions, request: ChatCompletionRequest, config: ModelConfig
) -> None:
    """Write thinking and template variables into Metadata. Raises ApiError for contradictions."""
    if request.role_mapping is not None:
        _require_no_template(request)
        return
    variables = request.chat_template_kwargs or {}
    thinking = request.enable_thinking
    if request.reasoning_effort == "none":
        if thinking:
            raise bad_field(
                f"{named(_EFFORT)} is 'none' and enable_thinking is true: send one of them"
            )
        thinking = False
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
    budget = given_as(request, _BUDGET)
    if budget is not None:
        options.Metadata["mlx.thinking_budget"] = str(budget)
    if effort:
        options.Metadata[_EFFORT] = effort
    if thinking is not None:
        options.Metadata[_THINKING] = json.dumps(thinking)
    if arguments:
        options.Metadata["chat_template_kwargs"] = json.dumps(arguments)


def _require_agreement(
    variables: Mapping[str, Any], thinking: bool | None, request: ChatCompletionRequest
) -> None:
    """Refuse contradictions, because the backend would ignore the variable."""
    for name, value in ((_THINKING, thinking), (_EFFORT, request.reasoning_effort)):
        given = variables.get(name, value)
        if value is not None and (_flag(given) if name == _THINKING else given) != value:
            raise bad_field(
                f"{named('chat_template_kwargs')} has {name} {json.dumps(given)[:100]}, but by the"
                f" request's own fields it is {json.dumps(value)}: send one of them"
            )


def _flag(value: Any) -> bool | None:
    """Return the value of a boolean variable, which may be a string; None for other values."""
    if isinstance(value, str):
        return {"true": True, "false": False}.get(value.strip().lower())
    return value if isinstance(value, bool) else None


def _require_no_template(request: ChatCompletionRequest) -> None:
    for name in ("chat_template_kwargs", _THINKING, _EFFORT, *NAMES[_BUDGET]):
        if getattr(request, name) not in (None, {}):
            raise bad_field(
                f"{named(name)} needs the model's chat template, which role_mapping replaces:"
                " leave out one of them"
            )
    if request.include_reasoning is False:
        raise bad_field(
            f"{named('include_reasoning')} is false, but reasoning is not separated from the"
            " answer with role_mapping: leave out one of them"
        )

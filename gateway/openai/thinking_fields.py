"""The fields of a chat request that set whether, how much and how visibly a model thinks.

Servers use different names, so there are several for each.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import Field

from gateway.described import about
from gateway.openai.base import Strict
from gateway.tolerance import known

_Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
ReasoningEffort = Annotated[_Effort, known(get_args(_Effort))]
Budget = Annotated[int | None, Field(ge=-1, le=100_000_000)]
_SWITCH = {"enabled": True, "disabled": False, "adaptive": None, "auto": None}
BUDGETS = ("thinking_budget", "reasoning_budget", "thinking_budget_tokens", "thinking_token_budget")


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
        if any(getattr(self, name) is not None for name in BUDGETS):
            values.pop("thinking_budget", None)
        return values

"""The fields of a chat request that say whether, how much and how visibly a model thinks.

Servers have names of their own for the same thing, so there are several for each.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from gateway.openai.base import Strict
from gateway.tolerance import tolerable

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Budget = Annotated[int | None, Field(ge=-1, le=100_000_000)]
_SWITCH = {"enabled": True, "disabled": False, "adaptive": None, "auto": None}
BUDGETS = ("thinking_budget", "reasoning_budget", "thinking_budget_tokens", "thinking_token_budget")


def _known_switch(word: str) -> str:
    if word not in _SWITCH:
        raise tolerable(f"{word[:64]} is not served: send one of {', '.join(_SWITCH)}")
    return word


class Reasoning(Strict):
    """OpenRouter's object of what other clients send as fields."""

    effort: ReasoningEffort | None = None
    max_tokens: Budget = Field(None, description="Another place of thinking_budget.")
    enabled: bool | None = Field(None, description="Another place of enable_thinking.")
    exclude: bool | None = Field(None, description="true: include_reasoning false.")


class Thinking(Strict):
    """Anthropic's object, as LiteLLM, DeepSeek and GLM take it for chats too."""

    type: Annotated[str, AfterValidator(_known_switch)] | None = Field(
        None, description="`enabled` or `disabled`: enable_thinking."
    )
    budget_tokens: Budget = Field(None, description="Another place of thinking_budget.")


class ThinkingFields(Strict):
    """Everything about reasoning that a chat request may say."""

    reasoning_effort: ReasoningEffort | None = Field(
        None,
        description="Reaches the chat template, or bounds the reasoning where the template does not"
        " know it; `none` turns thinking off as well.",
    )
    include_reasoning: bool | None = Field(
        None,
        description="false leaves reasoning out of the answer (it is still generated);"
        " not with log-probabilities, which are sent for every token.",
    )
    enable_thinking: bool | None = Field(None, description="Reaches the chat template.")
    thinking_budget: Budget = Field(
        None,
        description="Most tokens of reasoning, after which its end is forced; 0: none, -1: no"
        " bound.",
    )
    reasoning_budget: Budget = Field(None, description="The same, by llama.cpp's name.")
    thinking_budget_tokens: Budget = Field(None, description="Another of llama.cpp's.")
    thinking_token_budget: Budget = Field(None, description="The same, by vLLM's name.")
    reasoning: Reasoning | None = Field(
        None, description="OpenRouter: reasoning fields; those beside it win."
    )
    thinking: Thinking | None = Field(
        None, description="Anthropic's object; the fields beside it win."
    )

    def thinking_values(self) -> dict[str, Any]:
        """The fields that the two objects stand for, where the request has none itself."""
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

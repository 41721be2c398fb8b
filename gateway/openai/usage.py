"""Token counts in OpenAI's form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gateway.generation import Usage


def usage_of(answers: Sequence[Usage], per_prompt: int = 1) -> dict[str, Any]:
    """Usage of a request: every prompt counts once, however many of the answers are to it.

    per_prompt: how many answers in a row have the same prompt.
    """
    prompts = answers[::per_prompt]
    asked = sum(usage.prompt_tokens for usage in prompts)
    generated = sum(usage.completion_tokens for usage in answers)
    return {
        "prompt_tokens": asked,
        "completion_tokens": generated,
        "total_tokens": asked + generated,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in prompts)},
        "completion_tokens_details": {
            "reasoning_tokens": sum(usage.reasoning_tokens for usage in answers)
        },
    }

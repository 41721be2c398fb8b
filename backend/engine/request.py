"""What one generation asks for: plain, validated, frozen data.

The servicer builds these from the wire; the engine reads them. All ranges are checked by whoever
builds the request (`backend.rpc.requests`), so the engine never meets a value that a sampler
cannot take.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class RawPrompt:
    """Text that goes to the model as it is; a BOS is added only where the text has none."""

    text: str


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages for the model's own chat template (contract 3.3).

    `messages` are template dicts (role, content, …); `tools` is the decoded JSON list or None;
    `template_arguments` are extra keyword arguments for the template (enable_thinking, …).
    """

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] | None = None
    template_arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen.

    temperature: 0 is greedy, and then the other fields have no effect.
    top_p: in (0, 1]; 1 is off. top_k: 0 is off. min_p: in [0, 1]; 0 is off.
    seed: 64-bit; the row's random stream depends on it alone.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One generation. `max_tokens` None means: up to the end of the context.

    `stop` holds non-empty strings; the first one that appears ends the text before it.
    """

    request_id: str
    prompt: RawPrompt | ChatPrompt
    sampling: Sampling = Sampling()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

"""What Anthropic's endpoints answer, for the OpenAPI document alone: no answer is built of it."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel


class ContentBlock(BaseModel):
    """A block of the answer; which further fields it has depends on its type."""

    type: Literal["text", "thinking", "tool_use"]


class Usage(BaseModel):
    """Tokens of the request: the prompt has those of the first three fields together."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: dict[str, int]
    cache_creation: dict[str, int]
    server_tool_use: None
    service_tier: Literal["standard"]
    inference_geo: None


class AnthropicMessage(BaseModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: Literal[
        "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
    ]
    stop_sequence: str | None
    stop_details: None
    container: None
    usage: Usage


class TokenCount(BaseModel):
    """Tokens of the rendered prompt."""

    input_tokens: int

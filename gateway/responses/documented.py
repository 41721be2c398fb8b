"""What `/responses` answers, for the OpenAPI document alone: answers are not built of it."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel


class OutputItem(BaseModel):
    """An item; which further fields it has depends on its type."""

    id: str
    type: Literal[
        "reasoning",
        "message",
        "function_call",
        "function_call_output",
        "custom_tool_call",
        "custom_tool_call_output",
    ]
    status: Literal["in_progress", "completed", "incomplete"]


class InputTokenDetails(BaseModel):
    """What of the prompt came from the prefix cache."""

    cached_tokens: int


class OutputTokenDetails(BaseModel):
    """What of the answer was reasoning."""

    reasoning_tokens: int


class ResponseUsage(BaseModel):
    input_tokens: int
    input_tokens_details: InputTokenDetails
    output_tokens: int
    output_tokens_details: OutputTokenDetails
    total_tokens: int


class ResponseObject(BaseModel):
    """A response, with the fields of its request besides."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["completed", "incomplete"]
    model: str
    output: list[OutputItem]
    usage: ResponseUsage


class InputTokens(BaseModel):
    """Tokens of the rendered prompt."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class DeletedResponse(BaseModel):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItems(BaseModel):
    object: Literal["list"]
    data: list[OutputItem]
    first_id: str | None
    last_id: str | None
    has_more: bool

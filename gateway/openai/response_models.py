"""The schemas of answers in the OpenAPI document. The answers themselves are plain dicts."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

FinishReason = Literal["stop", "length", "tool_calls", "function_call"]


class CachedTokens(BaseModel):
    """How much of the prompt was cached."""

    cached_tokens: int


class ReasoningTokens(BaseModel):
    """How much of the answer was reasoning."""

    reasoning_tokens: int


class UsageObject(BaseModel):
    """Token counts; `prompt_tokens` counts each prompt once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens


class TopLogprob(BaseModel):
    """An alternative to the chosen token."""

    token: str
    bytes: list[int]
    logprob: float


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob]
    refusal: None = None


class FunctionOfCall(BaseModel):
    """The called function, with arguments as JSON text."""

    name: str
    arguments: str


class ToolCallObject(BaseModel):
    id: str
    type: Literal["function"]
    function: FunctionOfCall


class AnswerMessage(BaseModel):
    """The message; absent members do not apply."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    annotations: list[dict[str, Any]]
    reasoning_content: str = Field("", description="What the model thought.")
    tool_calls: list[ToolCallObject] = []
    function_call: FunctionOfCall = Field(
        default=FunctionOfCall(name="", arguments=""), description="Legacy: the call."
    )


class ChatChoice(BaseModel):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: UsageObject


class CompletionLogprobs(BaseModel):
    """The legacy form: four lists of one length. The first token of a prompt has no probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """One of `n` answers to one of the prompts: index is prompt · n + answer."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]


class Completion(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: UsageObject

"""The request of `/responses`, as OpenAI's API defines it.

gateway/responses/to_chat honours every field, or the response repeats it; gateway/tolerance handles
all others.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from common.field_names import named
from gateway.described import about
from gateway.errors import bad_field
from gateway.openai.base import Request, Strict
from gateway.openai.other_fields import RESPONSES
from gateway.openai.sampling import MOST_ALTERNATIVES, MOST_TOKENS, CommonSampling
from gateway.openai.thinking import Budget, ReasoningEffort
from gateway.openai.tools import MOST_TOOLS
from gateway.responses.items import Input
from gateway.responses.tools import Tool, flat
from gateway.tagged import OneOf, drop, rather
from gateway.tolerance import known


class ChooseFunction(Strict):
    """The model must, or may, call this tool."""

    type: Literal["function", "custom"]
    name: str

    _nested = rather(flat, "name is missing: send it beside the type")


class ChooseAmong(Strict):
    """The model may, or must, call one of these."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[Annotated[ChooseFunction, OneOf("an allowed tool", otherwise=drop)]] = Field(
        min_length=1, max_length=MOST_TOOLS
    )


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | ChooseFunction | ChooseAmong,
    OneOf(
        "a tool_choice",
        otherwise=lambda choice: "required" if choice == "any" else None,
        lossless=True,
    ),
]


class PlainFormat(Strict):
    type: Literal["text", "json_object"] = "text"


class JsonSchemaFormat(Strict):
    """JSON that matches a schema, whether `strict` or not."""

    type: Literal["json_schema"]
    name: str = Field("answer", min_length=1, max_length=64)
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


Format = Annotated[PlainFormat | JsonSchemaFormat, OneOf("a format")]


class TextConfig(Strict):
    format: Format | None = None
    verbosity: str | None = about("No effect; repeated in the response.")


class ReasoningConfig(Strict):
    effort: ReasoningEffort | None = None
    max_tokens: Budget = about("Maximum tokens of reasoning; not OpenAI's.")
    summary: str | None = about("If it is set, the whole reasoning is sent as its summary.")


_INCLUDED = "message.output_text.logprobs reasoning.encrypted_content message.input_image.image_url"
Includable = Annotated[str, known(_INCLUDED.split())]
_TOLD = "No effect; repeated in the response."
_Key = Annotated[str, Field(max_length=64)]
_Value = Annotated[str, Field(max_length=512)]


class PromptRequest(Request):
    """The fields that make up the prompt."""

    others = RESPONSES

    input: Input = Field(default_factory=list, description="Optional after previous_response_id.")
    instructions: str | None = about("A system message; the next response does not inherit it.")
    previous_response_id: str | None = about("The stored response to continue.")
    tools: list[Tool] | None = Field(None, max_length=MOST_TOOLS)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    truncation: Annotated[Literal["disabled"] | None, known(("disabled",))] = None

    @model_validator(mode="after")
    def _asks(self) -> Self:
        if not self.input and not self.previous_response_id:
            message = f"{named('input')} is missing or empty: send it, or previous_response_id"
            raise bad_field(message, "missing_required_parameter")
        return self


class ResponsesRequest(CommonSampling, PromptRequest):
    """OpenAI's request, with sampling fields for local models."""

    stream: bool | None = None
    store: bool | None = about("Keep it in memory for previous_response_id and GET; default true.")
    max_output_tokens: int | None = about("Default 0: no limit.", ge=-1, le=MOST_TOKENS)
    thinking_budget: Budget = about("As reasoning.max_tokens; not an OpenAI field.")
    top_logprobs: int | None = Field(None, ge=0, le=MOST_ALTERNATIVES)
    include: list[Includable] | None = Field(None, max_length=64)
    metadata: dict[_Key, _Value] | None = about("Returned with the response.", max_length=16)
    user: str | None = Field(None, description=_TOLD)
    safety_identifier: str | None = Field(None, description=_TOLD)
    prompt_cache_key: str | None = Field(None, description=_TOLD)
    max_tool_calls: int | None = Field(None, description=_TOLD)

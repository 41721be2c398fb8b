"""The request of `/responses`, as OpenAI's API defines it.

Every field is honoured by gateway/responses/to_chat or by the route, listed in
gateway/responses/neutral, or refused with a sentence by its type below.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from gateway.openai.base import MODEL, Strict
from gateway.openai.chat_request import ReasoningEffort
from gateway.openai.sampling_fields import MOST_ALTERNATIVES, MOST_TOKENS
from gateway.responses.items import Input
from gateway.responses.neutral import NeutralFields
from gateway.tagged import one_of, unserved

Off = Literal[False] | None
Summary = Literal["auto", "concise", "detailed"]


class FunctionTool(Strict):
    """A function that the client runs."""

    type: Literal["function"]
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: Annotated[
        Off, unserved("tools are always shown: leave defer_loading out", False)
    ] = None


def _unknown_tool(kind: str) -> str:
    return (
        f"a tool of type {kind} is not served: the gateway runs no tools of its own; send tools "
        "of type function"
    )


Tool = Annotated[
    FunctionTool, one_of({"function": FunctionTool}, schema=FunctionTool, unknown=_unknown_tool)
]


class ChooseFunction(Strict):
    """The model must call this function."""

    type: Literal["function"]
    name: str


class AllowedFunction(Strict):
    """A function by its name."""

    type: Literal["function"]
    name: str


class ChooseAmong(Strict):
    """The model may, or must, call one of these."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[AllowedFunction] = Field(min_length=1)


def _unknown_choice(kind: str) -> str:
    return (
        f"tool_choice {kind} is not served: send none, auto, required, or an object of type "
        "function or allowed_tools"
    )


_Word = Literal["none", "auto", "required"]
ToolChoice = Annotated[
    str | ChooseFunction | ChooseAmong,
    one_of(
        {"function": ChooseFunction, "allowed_tools": ChooseAmong},
        schema=_Word | ChooseFunction | ChooseAmong,
        unknown=_unknown_choice,
        words=("none", "auto", "required"),
    ),
]


class TextFormat(Strict):
    """Any text."""

    type: Literal["text"] = "text"


class JsonObjectFormat(Strict):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchemaFormat(Strict):
    """JSON that matches a schema, whether `strict` or not."""

    type: Literal["json_schema"]
    name: str = Field(min_length=1, max_length=64)
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


def _unknown_format(kind: str) -> str:
    return f"a format of type {kind} is unknown: send text, json_object or json_schema"


Format = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat,
    one_of(
        {"text": TextFormat, "json_object": JsonObjectFormat, "json_schema": JsonSchemaFormat},
        schema=TextFormat | JsonObjectFormat | JsonSchemaFormat,
        unknown=_unknown_format,
    ),
]


class TextConfig(Strict):
    """The form of the answer."""

    format: Format | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningConfig(Strict):
    """How much to think."""

    effort: ReasoningEffort | None = None
    summary: Summary | None = None
    generate_summary: Summary | None = None


Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "message.input_image.image_url",
]
_Key = Annotated[str, Field(max_length=64)]
_Value = Annotated[str, Field(max_length=512)]


class PromptRequest(Strict):
    """What makes up the prompt."""

    model: str | None = Field(None, min_length=1, description=MODEL)
    input: Input = Field(min_length=1)
    instructions: str | None = Field(
        None, description="A system message before all; not carried to the next response."
    )
    previous_response_id: str | None = Field(
        None, description="A stored response whose conversation goes on."
    )
    tools: list[Tool] | None = Field(None, max_length=1024)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    truncation: Annotated[
        Literal["disabled"] | None,
        unserved("prompts are not shortened: send disabled, and less input", "disabled"),
    ] = None
    conversation: Annotated[
        None, unserved("conversations are not kept: use previous_response_id")
    ] = None


class ResponsesRequest(PromptRequest, NeutralFields):
    """OpenAI's request, with the sampling fields that local models are used with."""

    stream: bool | None = None
    store: bool | None = Field(
        None, description="Kept in memory for previous_response_id and GET; true by default."
    )
    max_output_tokens: int | None = Field(None, ge=1, le=MOST_TOKENS)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=MOST_TOKENS, description="Not OpenAI's.")
    min_p: float | None = Field(None, ge=0, le=1, description="Not OpenAI's.")
    seed: int | None = Field(None, ge=-(2**63), le=2**64 - 1, description="Not OpenAI's.")
    presence_penalty: float | None = Field(None, ge=-100, le=100)
    frequency_penalty: float | None = Field(None, ge=-100, le=100)
    top_logprobs: int | None = Field(None, ge=0, le=MOST_ALTERNATIVES)
    include: list[Includable] | None = None
    metadata: dict[_Key, _Value] | None = Field(
        None, max_length=16, description="Given back with the response."
    )
    background: Annotated[
        Off, unserved("responses are given while the client waits: send false, and stream", False)
    ] = None
    prompt: Annotated[
        None, unserved("prompt templates are not kept: send instructions and input")
    ] = None
    context_management: Annotated[
        None, unserved("contexts are not edited: leave context_management out, and send less")
    ] = None
    moderation: Annotated[None, unserved("nothing is moderated: leave moderation out")] = None

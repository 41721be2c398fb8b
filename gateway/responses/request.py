"""The request of `/responses`, as OpenAI's API defines it, and its translation to a chat request.

Every field is honoured, or the response repeats it; gateway/fields handles all others. Consecutive
items of the model become one assistant message, as chat templates know it: reasoning, then text,
then calls. An item out of that order begins another message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from common.field_names import named
from gateway import exchange
from gateway.described import about
from gateway.errors import bad_field
from gateway.fields import RESPONSES, Request, Strict
from gateway.openai.answering import Conversation, Translation, translate
from gateway.openai.messages import SEAL
from gateway.openai.sampling import MOST_ALTERNATIVES, MOST_TOKENS, CommonSampling
from gateway.openai.thinking import Budget, ReasoningEffort
from gateway.openai.tools import MOST_TOOLS
from gateway.repairs import known
from gateway.responses.items import (
    AdditionalTools,
    AnyPart,
    Compaction,
    CustomCall,
    FunctionCall,
    FunctionCallOutput,
    Input,
    InputImage,
    InputVideo,
    Item,
    Medium,
    Message,
    Offered,
    Reasoning,
    Refusal,
    Tool,
    flat,
    full_name,
    offered,
)
from gateway.tagged import OneOf, drop, other_form

_INCLUDED = "message.output_text.logprobs reasoning.encrypted_content message.input_image.image_url"
Includable = Annotated[str, known(_INCLUDED.split())]
_REPEATED = "No effect; repeated in the response."
_Key = Annotated[str, Field(max_length=64)]
_Value = Annotated[str, Field(max_length=512)]
Json = dict[str, Any]
SUMMARY = "Summary of the conversation so far:"
_LOGPROBS = "message.output_text.logprobs"
# By field of a chat request, or the end of its path: the name in Responses.
_NAMES = {
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "reasoning_budget": "reasoning.max_tokens",
    "logprobs": "include",
    "messages": "input",
    "tool_choice.function.name": "tool_choice.name",
    "tool_choice.allowed_tools.tools": "tool_choice.tools",
    "[image_url]": "[input_image]",
    "[video_url]": "[input_video]",
}
_EARLIER = "previous_response_id"
_SAMPLING = (*CommonSampling.model_fields, "thinking_budget")


class ChooseFunction(Strict):
    """The model must, or may, call this tool."""

    type: Literal["function", "custom"]
    name: str

    _nested = other_form(flat, "name is missing: send it beside the type")


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
    """Any text, or any JSON object."""

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
    """The form of the answer."""

    format: Format | None = None
    verbosity: str | None = about(_REPEATED)


class ReasoningConfig(Strict):
    """How much the model thinks before it answers, and what is shown of it."""

    effort: ReasoningEffort | None = None
    max_tokens: Budget = about("Maximum tokens of reasoning; not OpenAI's.")
    summary: str | None = about("If it is set, the whole reasoning is sent as its summary.")


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
    user: str | None = Field(None, description=_REPEATED)
    safety_identifier: str | None = Field(None, description=_REPEATED)
    prompt_cache_key: str | None = Field(None, description=_REPEATED)
    max_tool_calls: int | None = Field(None, description=_REPEATED)


def chat_request(
    request: PromptRequest, given: Sequence[Item], earlier: Sequence[Item] = ()
) -> Translation:
    """Convert the items of earlier responses and of the input to a chat request.

    References must be resolved before. Raises ApiError for what cannot be translated.
    """
    conversation = _conversation(request, given, earlier)
    fields: Json = {"model": request.model, "messages": conversation.messages}
    places = _NAMES | conversation.places
    for path, place in conversation.places.items():
        if place.startswith(_EARLIER):
            places[path] = _EARLIER  # parts of stored items are not in this request
    tools = tools_of(request, given, earlier)
    if tools:
        fields["tools"] = []
        for index, each in enumerate(tools):
            fields["tools"].append(_tool(each))
            places[f"tools[{index}]"] = each.place
            places[f"tools[{index}].function.name"] = f"{each.place}.name"
            places[f"tools[{index}].function.parameters"] = f"{each.place}.parameters"
    if request.tool_choice is not None and (tools or request.tool_choice != "auto"):
        fields["tool_choice"] = _choice(request.tool_choice)
    if tools and request.parallel_tool_calls is not None:
        fields["parallel_tool_calls"] = request.parallel_tool_calls
    reasoning = request.reasoning or ReasoningConfig()
    fields |= {"reasoning_effort": reasoning.effort, "reasoning_budget": reasoning.max_tokens}
    if (fmt := (request.text or TextConfig()).format) is not None:
        form: Json = {"type": fmt.type}
        if isinstance(fmt, JsonSchemaFormat):
            form["json_schema"] = fmt.model_dump(by_alias=True, exclude_none=True, exclude={"type"})
        fields["response_format"] = form
    if isinstance(request, ResponsesRequest):
        fields["max_tokens"] = request.max_output_tokens
        fields |= {name: getattr(request, name) for name in _SAMPLING}
        if request.top_logprobs or _LOGPROBS in (request.include or ()):
            fields |= {"logprobs": True, "top_logprobs": request.top_logprobs}
    return translate(fields, places)


def tools_of(
    request: PromptRequest, given: Sequence[Item], earlier: Sequence[Item]
) -> list[Offered]:
    """Return the tools of the request, and those of items that have other names."""
    found = list(offered(request.tools))
    items = [(item, f"{_EARLIER}.") for item in earlier]
    items += [(item, f"input[{at}].") for at, item in enumerate(given)]
    names = {each.name for each in found}
    for item, place in items:
        if isinstance(item, AdditionalTools):
            for each in offered(item.tools, place):
                if each.name not in names:
                    names.add(each.name)
                    found.append(each)
    return found


def _conversation(
    request: PromptRequest, given: Sequence[Item], earlier: Sequence[Item]
) -> Conversation:
    conversation = Conversation()
    items = [(item, _EARLIER) for item in earlier]
    items += [(item, f"input[{index}]") for index, item in enumerate(given)]
    system = [] if request.instructions is None else [request.instructions]
    leading = 0
    for item, place in items:
        if not isinstance(item, Message) or item.role not in ("system", "developer"):
            break
        system.append(_text(item.content, place))
        leading += 1
    if system:
        conversation.system(system, items[0][1] if request.instructions is None else "instructions")
    for item, place in items[leading:]:
        _add(conversation, item, place)
    return conversation


def _add(conversation: Conversation, item: Item, place: str) -> None:
    if isinstance(item, FunctionCallOutput):
        result = {
            "role": "tool",
            "tool_call_id": item.call_id,
            "name": item.name,
            "content": [*map(_part, item.output)],
        }
        conversation.add(result, place, "output")
    elif isinstance(item, Message) and item.role == "user":
        conversation.add({"role": "user", "content": [*map(_part, item.content)]}, place)
    elif isinstance(item, Message) and item.role != "assistant":
        conversation.system([_text(item.content, place)], place)
    elif isinstance(item, Compaction):
        _, sealed, summary = (item.encrypted_content or "").partition(SEAL)
        if sealed:
            conversation.add({"role": "user", "content": f"{SUMMARY}\n\n{summary}"}, place)
        else:
            exchange.current().ignore("input[][compaction]")
    elif isinstance(item, Reasoning) and not _thought(item):
        if place != _EARLIER:  # encrypted by another provider, or not stored here
            exchange.current().ignore("input[][reasoning]")
    elif not isinstance(item, AdditionalTools):
        _assistant(conversation, item, place)


def _assistant(
    conversation: Conversation, item: Reasoning | FunctionCall | CustomCall | Message, place: str
) -> None:
    """Continue the assistant's message, or begin another if the order requires it."""
    last = conversation.messages[-1] if conversation.messages else {}
    going_on = last.get("role") == "assistant"
    if isinstance(item, Reasoning):
        going_on = False
    elif isinstance(item, Message):
        going_on = going_on and not last["content"] and "tool_calls" not in last
    if not going_on:
        last = {"role": "assistant", "content": ""}
        conversation.add(last, place)
    if isinstance(item, Reasoning):
        last["reasoning_content"] = _thought(item)
    elif isinstance(item, Message):
        last["content"] = _text(item.content, place)
    else:
        name = full_name(item.namespace or "", item.name)
        custom = isinstance(item, CustomCall)
        kind, field = ("custom", "input") if custom else ("function", "arguments")
        called = {"name": name, field: getattr(item, field)}
        call = {"id": item.call_id, "type": kind, kind: called}
        last.setdefault("tool_calls", []).append(call)


def _thought(item: Reasoning) -> str:
    shown = "".join(part.text for part in item.content or ())
    sealed = (item.encrypted_content or "").partition(SEAL)
    return shown or sealed[2] or "".join(part.text for part in item.summary)


def _part(part: AnyPart) -> Json:
    if isinstance(part, Medium):
        kind = {InputImage: "image_url", InputVideo: "video_url"}.get(type(part), part.type)
        return part.model_dump() | {"type": kind}
    return {"type": "text", "text": part.refusal if isinstance(part, Refusal) else part.text}


def _text(content: Sequence[AnyPart], place: str) -> str:
    texts = []
    for at, part in enumerate(content):
        if isinstance(part, Medium):
            where = f"{place}.content[{at}]"
            raise bad_field(f"{named(where)}: media and PDFs belong to user messages")
        texts.append(part.refusal if isinstance(part, Refusal) else part.text)
    return "".join(texts)


def _tool(each: Offered) -> Json:
    kind = each.tool.type
    definition = each.tool.model_dump(exclude_none=True, exclude={"type"})
    described = "\n\n".join(filter(None, (each.about, each.tool.description)))
    return {"type": kind, kind: definition | {"name": each.name, "description": described or None}}


def _choice(choice: str | ChooseFunction | ChooseAmong) -> str | Json:
    if isinstance(choice, str):
        return choice
    if isinstance(choice, ChooseFunction):
        return {"type": "function", "function": {"name": choice.name}}
    tools = [{"type": "function", "function": {"name": tool.name}} for tool in choice.tools]
    return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": tools}}

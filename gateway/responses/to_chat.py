"""Translates a Responses request to the equivalent chat request.

Consecutive items of the model become one assistant message, as chat templates know it: reasoning,
then text, then calls. An item out of that order begins another message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from common.field_names import named
from gateway import exchange
from gateway.errors import bad_field
from gateway.openai.parts import SEAL
from gateway.openai.sampling import CommonSampling
from gateway.openai.translation import Conversation, Translation, translate
from gateway.responses.items import (
    AdditionalTools,
    AnyPart,
    Compaction,
    CustomCall,
    FunctionCall,
    FunctionCallOutput,
    InputImage,
    InputVideo,
    Item,
    Medium,
    Message,
    Reasoning,
    Refusal,
)
from gateway.responses.request import (
    ChooseAmong,
    ChooseFunction,
    JsonSchemaFormat,
    PromptRequest,
    ResponsesRequest,
)
from gateway.responses.tools import Offered, full_name, offered

Json = dict[str, Any]
SUMMARY = "Summary of the conversation so far:"
LOGPROBS = "message.output_text.logprobs"
# Names of Responses' fields in chat requests.
_NAMES = {
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "reasoning_budget": "reasoning.max_tokens",
    "logprobs": "include",
    "messages": "input",
    "tool_choice.function.name": "tool_choice.name",
    "tool_choice.allowed_tools.tools": "tool_choice.tools",
}
_EARLIER = "previous_response_id"
_SAMPLING = (*CommonSampling.model_fields, "thinking_budget")


def chat_request(
    request: PromptRequest, given: Sequence[Item], earlier: Sequence[Item] = ()
) -> Translation:
    """Return the chat request of the items of earlier responses and of the input.

    References are resolved already. Raises ApiError for what cannot be translated.
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
    if request.reasoning is not None:
        fields["reasoning_effort"] = request.reasoning.effort
        fields["reasoning_budget"] = request.reasoning.max_tokens
    if request.text is not None and request.text.format is not None:
        fmt = request.text.format
        form: Json = {"type": fmt.type}
        if isinstance(fmt, JsonSchemaFormat):
            form["json_schema"] = fmt.model_dump(by_alias=True, exclude_none=True, exclude={"type"})
        fields["response_format"] = form
    if isinstance(request, ResponsesRequest):
        fields["max_tokens"] = request.max_output_tokens
        fields |= {name: getattr(request, name) for name in _SAMPLING}
        if wants_logprobs(request):
            fields["logprobs"] = True
            fields["top_logprobs"] = request.top_logprobs
    return translate(fields, places)


def tools_of(
    request: PromptRequest, given: Sequence[Item], earlier: Sequence[Item] = ()
) -> list[Offered]:
    """Return the request's tools, and those among the items whose names are not taken."""
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


def wants_logprobs(request: ResponsesRequest) -> bool:
    """Return whether log-probabilities are requested, if only by asking for alternatives."""
    return LOGPROBS in (request.include or ()) or bool(request.top_logprobs)


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
    elif not isinstance(item, AdditionalTools) and not (
        isinstance(item, Reasoning) and not _thought(item)
    ):
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

"""Translates an Anthropic request to the equivalent chat request.

Sampling, tools, images and formats are thus handled in one place, gateway/openai. These rules of
Anthropic's have no field in chat requests:

- A failed tool result (`is_error`) begins with "Error:", because chat templates show text only.
- `input_examples` of a tool become `examples` of its schema, which chat templates show.
- A system message after the beginning becomes a user message: many chat templates refuse it there,
and the model has to answer one at the end. The next turn's prompt then begins with this turn's.
- The answer continues the last message if it is the assistant's.
- `thinking: adaptive`, or none at all, leaves it to the model and its settings.
"""

from __future__ import annotations

import json
from typing import Any

from gateway.anthropic.blocks import (
    ImageBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    UrlSource,
    VideoBlock,
)
from gateway.anthropic.request import (
    ChooseNone,
    ChooseTool,
    CountTokensRequest,
    MessagesRequest,
    OutputConfig,
    Tool,
    Turn,
)
from gateway.errors import ApiError, bad_field
from gateway.openai.sampling_to_wire import agreed
from gateway.openai.translation import Conversation, Part, Translation, translate

Json = dict[str, Any]


# Names of Anthropic's fields in chat requests.
_NAMES = {
    "stop": "stop_sequences",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "enable_thinking": "thinking",
    "thinking_budget": "thinking.budget_tokens",
    "tool_choice.function.name": "tool_choice.name",
    "continue_final_message": "messages",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
}


def chat_request(request: CountTokensRequest) -> Translation:
    """The chat request. Raises ApiError for what cannot be translated."""
    conversation = _conversation(request)
    fields: Json = {"model": request.model, "messages": conversation.messages}
    places = _NAMES | conversation.places
    if request.tools:
        fields["tools"] = [_tool(tool) for tool in request.tools]
        fields |= _choice(request)
        for index in range(len(request.tools)):
            places[f"tools[{index}]"] = f"tools[{index}]"
            places[f"tools[{index}].function.name"] = f"tools[{index}].name"
            places[f"tools[{index}].function.parameters"] = f"tools[{index}].input_schema"
    elif request.tool_choice is not None and request.tool_choice.type in ("any", "tool"):
        raise bad_field("tool_choice", "tool_choice: there are no tools to choose from")
    if request.thinking is not None and request.thinking.type != "adaptive":
        fields["enable_thinking"] = request.thinking.type == "enabled"
        fields["thinking_budget"] = getattr(request.thinking, "budget_tokens", None)
    if request.messages[-1].role == "assistant":
        _require_begun(conversation.messages[-1], len(request.messages) - 1)
        fields["continue_final_message"] = True
    config = request.output_config or OutputConfig()
    fields["reasoning_effort"] = config.effort
    form = agreed(("output_config.format", config.format), ("output_format", request.output_format))
    if form is not None:
        schema = {"name": "answer", "schema": form.schema_, "strict": True}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    if isinstance(request, MessagesRequest):
        # With 0 nothing is generated, whatever the other limits are.
        fields["max_tokens"] = max(request.max_tokens, 1)
        fields["stop"] = request.stop_sequences or None
        for name in ("temperature", "top_p", "top_k"):
            fields[name] = getattr(request, name)
    return translate(fields, places)


def _require_begun(message: Json, index: int) -> None:
    if "tool_calls" in message or not message["content"]:
        last = f"messages[{index}]"
        raise bad_field(
            last,
            f"{last} cannot be continued: end messages with a user turn, or with an assistant's"
            " text to continue",
        )


def _conversation(request: CountTokensRequest) -> Conversation:
    conversation = Conversation()
    turns = request.messages
    last = len(turns) - 1
    leading = next((at for at, turn in enumerate(turns) if turn.role != "system"), last)
    system = [block.text for block in request.system or ()]
    for index in range(leading):
        system += _texts(turns[index], index)
    if system:
        conversation.system(system, "system" if request.system else "messages[0]")
    for index in range(leading, len(turns)):
        place = f"messages[{index}]"
        if turns[index].role == "assistant":
            conversation.add(_assistant(turns[index], index), place)
        else:
            _user(conversation, turns[index], place)
    return conversation


def _user(conversation: Conversation, turn: Turn, place: str) -> None:
    """Tool results become messages of their own; the parts between them stay together."""
    parts: list[Part] = []
    for at, block in enumerate(turn.content):
        origin = f"{place}.content[{at}]"
        if isinstance(block, TextBlock | ImageBlock | VideoBlock):
            parts.append((_part(block), origin))
        elif isinstance(block, ToolResultBlock):
            if parts:
                conversation.user(parts, place)
                parts = []
            inner = [(_part(one), f"{origin}.content[{i}]") for i, one in enumerate(block.content)]
            failed = "Error: " if block.is_error else ""
            conversation.result(block.tool_use_id, inner, origin, failed)
        else:
            raise _misplaced(block.type, "a user", origin)
    if parts or not turn.content:
        conversation.user(parts, place)


def _assistant(turn: Turn, index: int) -> Json:
    text, reasoning, calls = "", "", []
    for at, block in enumerate(turn.content):
        if isinstance(block, TextBlock):
            text += block.text
        elif isinstance(block, ThinkingBlock):
            reasoning += block.thinking
        elif isinstance(block, ToolUseBlock):
            arguments = json.dumps(block.input, ensure_ascii=False)
            function = {"name": block.name, "arguments": arguments}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif isinstance(block, ImageBlock | VideoBlock | ToolResultBlock):
            raise _misplaced(block.type, "an assistant", f"messages[{index}].content[{at}]")
    message: Json = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def _part(block: TextBlock | ImageBlock | VideoBlock) -> Json:
    if isinstance(block, TextBlock):
        return {"type": "text", "text": block.text}
    source = block.source
    url = (
        source.url
        if isinstance(source, UrlSource)
        else f"data:{source.media_type};base64,{source.data}"
    )
    kind = f"{block.type}_url"
    return {"type": kind, kind: {"url": url}}


def _texts(turn: Turn, index: int) -> list[str]:
    texts = []
    for at, block in enumerate(turn.content):
        if not isinstance(block, TextBlock):
            raise _misplaced(block.type, "a system", f"messages[{index}].content[{at}]")
        texts.append(block.text)
    return texts


def _misplaced(kind: str, role: str, place: str) -> ApiError:
    return bad_field(place, f"{place}: {kind} is not allowed in {role} message")


def _tool(tool: Tool) -> Json:
    parameters = tool.input_schema
    if tool.input_examples:
        parameters = parameters | {"examples": tool.input_examples}
    function = {
        "name": tool.name,
        "parameters": parameters,
        "description": tool.description,
        "strict": tool.strict,
    }
    return {"type": "function", "function": function}


def _choice(request: CountTokensRequest) -> Json:
    choice = request.tool_choice
    if choice is None:
        return {}
    if isinstance(choice, ChooseNone):
        return {"tool_choice": "none"}
    chosen: Json = {"tool_choice": "required" if choice.type == "any" else "auto"}
    if isinstance(choice, ChooseTool):
        chosen["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    if choice.disable_parallel_tool_use:
        chosen["parallel_tool_calls"] = False
    return chosen

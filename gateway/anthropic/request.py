"""The requests of `/messages` and `/messages/count_tokens`, and their translation to chat requests.

Sampling, tools, images and formats are handled only in gateway/openai, and fields that Anthropic's
API does not define in gateway/fields. These rules of the API have no field in chat requests:

- `input_examples` of a tool become `examples` of its schema, which chat templates show.
- A system message after the beginning becomes a user message: many chat templates refuse it there,
  and the model has to answer one at the end. So each prompt begins with the previous prompt.
- The answer continues the last message if that is the assistant's.
- If all tools are Anthropic's own, as for a web search of Claude Code, a message says so.
- `thinking: adaptive`, or no `thinking`, leaves the decision to the model and its settings.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from common.field_names import named
from gateway import exchange
from gateway.described import about
from gateway.errors import bad_field
from gateway.fields import MESSAGES, Request, Strict
from gateway.openai.answering import Conversation, Translation, translate
from gateway.openai.messages import (
    UNREAD,
    Base64Data,
    ImageSource,
    PdfPart,
    ThoughtPart,
    ToolUseBlock,
    UrlSource,
)
from gateway.openai.sampling import Seed, agreed
from gateway.openai.thinking import ReasoningEffort
from gateway.openai.tools import MOST_TOOLS
from gateway.repairs import DROPPED
from gateway.tagged import MOST_ENTRIES, OneOf, TextAs, as_text, drop, other_form

_text = as_text("text", UNREAD)
Json = dict[str, Any]
# By field of a chat request, or the end of its path: Anthropic's name.
_NAMES = {
    "stop": "stop_sequences",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "enable_thinking": "thinking",
    "thinking_budget": "thinking.budget_tokens",
    "tool_choice.function.name": "tool_choice.name",
    "continue_final_message": "messages",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "[image_url]": "[image]",
    "[video_url]": "[video]",
    "[file]": "[document]",
}


class TextBlock(Strict):
    """Text of a message, of the system prompt or of a result."""

    type: Literal["text"]
    text: str


class ImageBlock(Strict):
    """An image in base64, or as a URL if the gateway may fetch it."""

    type: Literal["image"]
    source: ImageSource


class Base64VideoSource(Base64Data):
    """The bytes of a video; `media_type` is the format of its file."""

    media_type: Literal[
        "video/mp4", "video/quicktime", "video/webm", "video/x-matroska", "video/x-msvideo"
    ]


class VideoBlock(Strict):
    """A video, as other servers with this API accept it; Anthropic's own models do not."""

    type: Literal["video"]
    source: Annotated[Base64VideoSource | UrlSource, OneOf("a video source")]


def _text_block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


_Result = Annotated[TextBlock | ImageBlock | PdfPart, OneOf("a tool result", "text", {}, _text)]


class ToolResultBlock(Strict):
    """The result of a call, in a turn of the user; an error is shown like any result."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[list[_Result], TextAs(_text_block)] = Field(default_factory=list)
    is_error: bool | None = None


Block = TextBlock | ImageBlock | VideoBlock | PdfPart | ToolUseBlock | ToolResultBlock | ThoughtPart
_Block = Annotated[Block, OneOf("a content block", "text", otherwise=_text)]
Content = Annotated[list[_Block], TextAs(_text_block)]
_SystemBlock = Annotated[TextBlock, OneOf("a system block", "text", otherwise=_text)]
SystemContent = Annotated[list[_SystemBlock], TextAs(_text_block)]


class Turn(Strict):
    """One message. One with the role system is shown where it stands in the conversation."""

    role: Literal["user", "assistant", "system"]
    content: Content

    _settings = other_form(
        lambda turn: None if "content" in turn or turn.get("role") != "system" else DROPPED,
        "content is missing: send it",
        lossless=False,
    )

    @model_validator(mode="after")
    def _with_caller(self) -> Self:
        if any(isinstance(block, ToolUseBlock) for block in self.content):
            self.role = "assistant"  # AgentKit sends calls in turns of the user
        return self


class Tool(Strict):
    """A tool that the client runs."""

    name: str = Field(min_length=1, max_length=128)
    input_schema: dict[str, Any] = Field(default_factory=dict)
    type: Literal["custom"] | None = None
    description: str | None = None
    strict: bool | None = None
    input_examples: list[dict[str, Any]] | None = Field(None, max_length=MOST_ENTRIES)


_Tool = Annotated[Tool, OneOf("a tool", default="custom", otherwise=drop)]


class ChooseFreely(Strict):
    """The model decides (auto), must call one of the tools (any), or calls none."""

    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool | None = None


class ChooseTool(Strict):
    """The model must call this tool."""

    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool | None = None


ToolChoice = Annotated[ChooseFreely | ChooseTool, OneOf("a tool_choice")]


class Thinking(Strict):
    """Whether the model thinks first; `adaptive` leaves the decision to the model."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = about("Maximum tokens of thinking.", ge=0, le=2**31 - 1)
    display: str | None = about("omitted: thinking is not shown.")


class OutputFormat(Strict):
    """JSON that matches a schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    """The effort, and the format of the answer."""

    effort: ReasoningEffort | None = None
    format: OutputFormat | None = None


class CountTokensRequest(Request):
    """The fields that make up the prompt."""

    others = MESSAGES

    messages: list[Turn] = Field(min_length=1, max_length=MOST_ENTRIES)
    system: SystemContent | None = None
    tools: list[_Tool] | None = Field(None, max_length=MOST_TOOLS)
    tool_choice: ToolChoice | None = None
    thinking: Annotated[Thinking, OneOf("thinking", otherwise=drop)] | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = about("Older name of output_config.format.")


class MessagesRequest(CountTokensRequest):
    """One message to generate; `max_tokens` 0 reads the prompt into the prefix cache."""

    max_tokens: int = Field(ge=0, le=2**31 - 1)
    stream: bool | None = None
    stop_sequences: list[str] | None = Field(None, max_length=MOST_ENTRIES)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1)
    seed: Seed | None = about("As in chats; not Anthropic's.")


def chat_request(request: CountTokensRequest) -> Translation:
    """Return the chat request. Raises ApiError for what cannot be translated."""
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
    elif getattr(request.tool_choice, "type", "") in ("any", "tool") and not _lacks_tools(request):
        raise bad_field(f"{named('tool_choice')}: there are no tools to choose from")
    if request.thinking is not None:
        fields["enable_thinking"] = {"enabled": True, "disabled": False}.get(request.thinking.type)
        fields["thinking_budget"] = request.thinking.budget_tokens
    if request.messages[-1].role == "assistant":
        _require_begun(request.messages[-1], f"messages[{len(request.messages) - 1}]")
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
        for name in ("temperature", "top_p", "top_k", "seed"):
            fields[name] = getattr(request, name)
    return translate(fields, places)


def _require_begun(turn: Turn, place: str) -> None:
    texts = [block.text for block in turn.content if isinstance(block, TextBlock)]
    if not any(texts) or any(isinstance(block, ToolUseBlock) for block in turn.content):
        raise bad_field(
            f"{named(place)} cannot be continued: end messages with a user turn, or with an"
            " assistant's text to continue"
        )


def _conversation(request: CountTokensRequest) -> Conversation:
    conversation = Conversation()
    turns = request.messages
    last = len(turns) - 1
    leading = next((at for at, turn in enumerate(turns) if turn.role != "system"), last)
    system = [block.text for block in request.system or ()]
    for index in range(leading):
        system += _texts(turns[index], index)
    if _lacks_tools(request):
        if request.tool_choice is not None and request.tool_choice.type != "auto":
            exchange.current().ignore("tool_choice")
        system.append("The requested tools are not available here: do not claim to have used them.")
    if system:
        conversation.system(system, "system" if request.system else "messages[0]")
    for index, turn in enumerate(turns[leading:], leading):
        role = "assistant" if turn.role == "assistant" else "user"
        message = {"role": role, "content": [*map(_part, turn.content)]}
        conversation.add(message, f"messages[{index}]")
    return conversation


def _part(block: Block) -> Json:
    if isinstance(block, ImageBlock | VideoBlock):
        kind = f"{block.type}_url"
        return {"type": kind, kind: {"url": block.source.url}}
    part = block.model_dump(exclude={"caller", "content"})
    if isinstance(block, ToolResultBlock):
        part["content"] = [_part(inner) for inner in block.content]
    return part


def _texts(turn: Turn, index: int) -> list[str]:
    texts = []
    for at, block in enumerate(turn.content):
        if not isinstance(block, TextBlock):
            place = f"messages[{index}].content[{at}]"
            raise bad_field(f"{named(place)}: {block.type} is not allowed in a system message")
        texts.append(block.text)
    return texts


def _tool(tool: Tool) -> Json:
    examples = {"examples": tool.input_examples} if tool.input_examples else {}
    function = tool.model_dump(include={"name", "description", "strict"})
    return {"type": "function", "function": function | {"parameters": tool.input_schema | examples}}


def _lacks_tools(request: CountTokensRequest) -> bool:
    """Return whether the chosen tool, or every tool, was left out because a server runs it."""
    choice, names = request.tool_choice, [tool.name for tool in request.tools or ()]
    missing = choice.name not in names if isinstance(choice, ChooseTool) else not names
    return missing and any(name.startswith("tools[][") for name in exchange.current().ignored)


def _choice(request: CountTokensRequest) -> Json:
    choice = request.tool_choice
    if choice is None or _lacks_tools(request):
        return {}
    chosen: Json = {"tool_choice": "required" if choice.type == "any" else choice.type}
    if isinstance(choice, ChooseTool):
        chosen["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    if choice.disable_parallel_tool_use:
        chosen["parallel_tool_calls"] = False
    return chosen

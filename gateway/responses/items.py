"""The items of a Responses conversation: messages, calls, their results, reasoning, and tools."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter
from pydantic_core import to_json

from common.part_text import text_of
from gateway.described import about
from gateway.fields import Strict
from gateway.openai.messages import InputAudio, MediaUrl, PdfPart
from gateway.openai.tools import MOST_TOOLS, CustomDefinition, FunctionDefinition
from gateway.repairs import DROPPED
from gateway.tagged import MOST_ENTRIES, OneOf, TextAs, as_text, drop, other_form


def flat(nested: dict[str, Any]) -> dict[str, Any] | None:
    """Convert a tool, or the choice of a tool, from the form of chats."""
    function = nested.get("function")
    return {**function, "type": "function"} if isinstance(function, dict) else None


class FunctionTool(FunctionDefinition):
    """A function that the client runs."""

    type: Literal["function"]

    _nested = other_form(flat, "name is missing: send the fields of function beside the type")


class CustomTool(CustomDefinition):
    """A tool that accepts plain text."""

    type: Literal["custom"]


_Own = FunctionTool | CustomTool
OwnTool = Annotated[_Own, OneOf("a tool", default="function", otherwise=drop)]


class NamespaceTool(Strict):
    """Tools under a name, as Codex offers those of an MCP server."""

    type: Literal["namespace"]
    name: str = Field(min_length=1, max_length=128)
    description: str | None = about("Shown to the model with the first tool.")
    tools: list[OwnTool] = Field(max_length=MOST_TOOLS)


Tool = Annotated[_Own | NamespaceTool, OneOf("a tool", default="function", otherwise=drop)]


@dataclass(frozen=True, slots=True)
class Offered:
    """One tool.

    place: its path in the request.
    namespace: "" if it is in none.
    about: the description of the namespace, for the first of its tools.
    """

    tool: _Own
    place: str
    namespace: str = ""
    about: str | None = None

    @property
    def name(self) -> str:
        """The tool's name for the model."""
        return full_name(self.namespace, self.tool.name)


def full_name(namespace: str, name: str) -> str:
    """Return one name for a namespace and a tool, because chat templates have no namespaces."""
    if not namespace or namespace.endswith("_"):
        return namespace + name
    return f"{namespace}__{name}"


def offered(tools: Sequence[_Own | NamespaceTool] | None, of: str = "") -> Iterator[Offered]:
    """Yield all tools, including those in namespaces.

    of: what precedes `tools` in their path, such as `input[2].`.
    """
    for index, tool in enumerate(tools or ()):
        place = f"{of}tools[{index}]"
        if isinstance(tool, NamespaceTool):
            for at, inner in enumerate(tool.tools):
                about = None if at else tool.description
                yield Offered(inner, f"{place}.tools[{at}]", tool.name, about)
        else:
            yield Offered(tool, place)


class Text(Strict):
    """Text. The annotations and log-probabilities of an earlier answer are ignored."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class Refusal(Strict):
    """A refusal of an earlier answer, which is text like any other."""

    type: Literal["refusal"]
    refusal: str


class InputImage(Strict):
    """An image as a data URI, or as a URL if the gateway may fetch it."""

    type: Literal["input_image", "image_url", "computer_screenshot"]
    image_url: MediaUrl | str


class InputVideo(Strict):
    """A video as a data URI, or as a URL if the gateway may fetch it."""

    type: Literal["input_video"]
    video_url: str


class Sound(Strict):
    """A recording."""

    type: Literal["input_audio"]
    input_audio: InputAudio


Medium = InputImage | InputVideo | Sound | PdfPart
AnyPart = Text | Refusal | Medium
_INSTEAD = {"input_file": "send its text; only files of text and PDFs are read"}
_read = as_text("input_text", media=True)
_Part = Annotated[AnyPart, OneOf("a part", "input_text", _INSTEAD, _read)]
_Content = Annotated[list[_Part], TextAs(lambda text: {"type": "input_text", "text": text})]


class _Item(Strict):
    id: str | None = None
    status: str | None = None


class Message(_Item):
    """A message of the conversation, or the text of an earlier answer."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: _Content = Field(default_factory=list)
    phase: str | None = None

    _bare = other_form(
        lambda item: {**item, "type": "item_reference"} if {*item} == {"type", "id"} else None,
        "role is missing: send it",
    )


class FunctionCall(_Item):
    """A call of a function in an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str = ""


class CustomCall(_Item):
    """A call of a tool that accepts plain text."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    namespace: str | None = None
    input: str


class FunctionCallOutput(_Item):
    """The result of a call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str = ""  # without one: the earliest call of this name that has no result
    output: _Content = Field(default_factory=list)
    name: str | None = None


class ReasoningText(Strict):
    """A piece of reasoning, or of its summary."""

    type: Literal["reasoning_text", "summary_text", "text"]
    text: str


class Reasoning(_Item):
    """Reasoning of an earlier answer: its content, else its encrypted content, else its summary."""

    type: Literal["reasoning"]
    summary: list[ReasoningText] = Field(default_factory=list, max_length=MOST_ENTRIES)
    content: list[ReasoningText] | None = Field(None, max_length=MOST_ENTRIES)
    encrypted_content: str | None = None


class AdditionalTools(_Item):
    """Tools that are offered from this item on, as Codex sends those that it found by a search."""

    type: Literal["additional_tools"]
    role: str | None = None
    tools: list[Tool] = Field(max_length=MOST_TOOLS)


class Compaction(_Item):
    """The summary of an earlier conversation, in the form in which `/responses/compact` seals it.

    What only its provider can read is left out of the prompt.
    """

    type: Literal["compaction"]
    encrypted_content: str | None = None


class ItemReference(Strict):
    """An item of a stored response, by its id."""

    type: Literal["item_reference"]
    id: str


_FRAME = frozenset({"type", "id", "call_id", "status", "name", "arguments"})
_RESULTS = ("output", "outputs", "results", "error")


def _readable(item: dict[str, Any]) -> Any:
    """Return an item of an unknown type as a function call, with the item's result if it has one.

    If it is not a call, its text becomes a user's message; an item without text is dropped.
    """
    kind = str(item["type"])
    identity = item.get("call_id") or item.get("id") or kind
    own = {name: value for name, value in item.items() if name not in _FRAME}
    found = next((own.pop(name) for name in _RESULTS if own.get(name)), None)
    shown = isinstance(found, dict) and found.get("image_url")
    output = [found] if shown else _written(found or item.get("status") or "")
    result = {"type": "function_call_output", "call_id": identity, "output": output}
    if kind.endswith("_call_output"):
        return result
    if kind.endswith("_call") and ("call_id" in item or found):
        call = {"type": "function_call", "call_id": identity}
        call["name"] = item.get("name") or kind.removesuffix("_call")
        call["arguments"] = _written(item.get("arguments") or own)
        return (call, result) if found else call
    if text_of(item) or kind.startswith("input_"):
        return {"type": "message", "role": "user", "content": [item]}
    return DROPPED


def _written(value: Any) -> str:
    return value if isinstance(value, str) else to_json(value).decode()


Item = (
    Message
    | FunctionCall
    | FunctionCallOutput
    | CustomCall
    | Reasoning
    | AdditionalTools
    | Compaction
)
Sent = Item | ItemReference
_Sent = Annotated[Sent, OneOf("an item", default="message", otherwise=_readable)]
_Stored = Annotated[Item, OneOf("an item", default="message")]


Input = Annotated[
    list[_Sent], TextAs(lambda text: {"type": "message", "role": "user", "content": text})
]
ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[_Stored], config=ConfigDict(defer_build=True))

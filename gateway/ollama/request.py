"""The requests of `/api/chat` and `/api/generate`, and their translation to chat requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AliasChoices, BeforeValidator, Field

from common.field_names import named
from common.part_text import text_of
from gateway import exchange
from gateway.described import about
from gateway.errors import bad_field
from gateway.fields import Request, Strict
from gateway.images import type_of
from gateway.openai.answering import Translation, client_paths, translate
from gateway.openai.completion import CompletionRequest
from gateway.openai.messages import ToolCall
from gateway.openai.sampling import Options
from gateway.openai.thinking import ReasoningEffort
from gateway.openai.tools import MOST_TOOLS, AnyTool, ToolChoice
from gateway.refusals import validated
from gateway.repairs import tolerable
from gateway.tagged import MOST_ENTRIES

Json = dict[str, Any]
ModelName = Annotated[str, AfterValidator(lambda name: name.removesuffix(":latest"))]
_Role = Literal["system", "developer", "user", "assistant", "tool"]
_ToolName = Annotated[str | None, Field(validation_alias=AliasChoices("tool_name", "name"))]
# By field of a chat request, or the end of its path: Ollama's name.
_NAMES = {
    **{name: f"options.{row.alias or name}" for name, row in Options.model_fields.items()},
    "response_format": "format",
    "enable_thinking": "think",
    "reasoning_effort": "think",
    ".reasoning_content": ".thinking",
    ".name": ".tool_name",
    "[image_url]": "",
    "[video_url]": "",
}
WITHOUT_TEMPLATE = _NAMES | {"logprobs": "top_logprobs"}  # of a completion request instead


def _require_served(role: Any) -> Any:
    if role == "thinking":
        raise tolerable("messages of the role thinking are not served: send thinking", up=1)
    return role


def _joined(content: Any) -> Any:
    """Join OpenAI's parts if all are text; the Vercel SDK sends an empty list beside images."""
    parts = content if isinstance(content, list) else [content]
    kinds = {part.get("type") if isinstance(part, dict) else "" for part in parts}
    return content if kinds - {"text"} else "".join(map(text_of, parts))


class Turn(Strict):
    """One message; images are in base64, and may include videos."""

    role: Annotated[_Role, BeforeValidator(_require_served)] = "assistant"
    content: Annotated[str, BeforeValidator(_joined)] = ""
    images: list[str] | None = Field(default=None, max_length=MOST_ENTRIES)
    thinking: str | None = None
    tool_calls: list[ToolCall] | None = Field(default=None, max_length=MOST_ENTRIES)
    tool_name: _ToolName = None
    tool_call_id: str | None = None


class OneAnswer(Options):
    """Ollama's options; its answers have one choice."""

    n: Literal[1] | None = None


class GenerationFields(Request):
    """The fields that both endpoints have."""

    model: ModelName = Field(min_length=1)
    stream: bool | None = about("The default is true.")
    format: Literal["json", ""] | Json | None = about("`json`, or a JSON schema.")
    options: OneAnswer | None = None
    think: bool | ReasoningEffort | None = None
    keep_alive: str | float | None = about("0 unloads the model after the answer.")
    logprobs: bool | None = None
    top_logprobs: int | None = about("Alternatives per token, if logprobs is true.", ge=0)


class ChatRequest(GenerationFields):
    """A conversation; without messages the model is only loaded."""

    messages: list[Turn] = Field(default_factory=list, max_length=MOST_ENTRIES)
    tools: list[AnyTool] | None = Field(None, max_length=MOST_TOOLS)
    tool_choice: ToolChoice | None = about("As in chats; not Ollama's.")

    def turns(self) -> list[Turn]:
        return self.messages


class GenerateRequest(GenerationFields):
    """One question; without a prompt the model is only loaded."""

    prompt: str = ""
    system: str = ""
    images: list[str] | None = Field(default=None, max_length=MOST_ENTRIES)
    raw: bool | None = about("Send the prompt as it is, without a template.")
    suffix: str = about("Text after the answer, for fill-in-the-middle.", "")
    template: str = about("Refused: the model's own template is used.", "")

    def turns(self) -> list[Turn]:
        if self.template:
            message = f"{named('template')} is not supported: leave it out"
            raise bad_field(message, "unsupported_parameter")
        if not self.prompt:
            return []
        system = [Turn(role="system", content=self.system)] if self.system else []
        return [*system, Turn(role="user", content=self.prompt, images=self.images)]


def chat_request(body: ChatRequest | GenerateRequest) -> Translation | None:
    """Return the chat request; None if the request only loads or unloads. Raises ApiError."""
    turns = body.turns()
    if not turns:
        return None
    fields: Json = {"model": body.model, "messages": [_message(turn) for turn in turns]}
    if body.logprobs:
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    elif body.top_logprobs:
        exchange.current().ignore("top_logprobs")
    if isinstance(body, ChatRequest) and body.tools:
        fields["tools"] = [tool.model_dump(exclude_none=True) for tool in body.tools]
    fields |= body.model_dump(include={"tool_choice"}, exclude_none=True)
    if isinstance(body.think, bool):
        fields["enable_thinking"] = body.think
    else:
        fields["reasoning_effort"] = body.think
    if isinstance(body.format, dict):
        form = {"name": "answer", "schema": body.format}
        fields["response_format"] = {"type": "json_schema", "json_schema": form}
    elif body.format:
        fields["response_format"] = {"type": "json_object"}
    if body.options is not None:
        fields["options"] = body.options.model_dump(exclude_none=True, by_alias=True)
    return translate(fields, _NAMES | _places(body, turns))


def without_template(body: GenerateRequest, translation: Translation) -> CompletionRequest:
    """Return the completion request for a raw prompt, or for the text between prompt and suffix.

    Raises ApiError for what only a chat template can show.
    """
    for name in ("system", "images"):
        if getattr(body, name):
            raise bad_field(
                f"{named(name)} needs the model's chat template, which raw and suffix replace:"
                " leave out one of them"
            )
    if body.think:
        exchange.current().ignore("think")
    given = body.options.model_dump(exclude_none=True) if body.options else {}
    given |= body.model_dump(include={"model", "prompt", "suffix"})
    given["logprobs"] = (body.top_logprobs or 0) if body.logprobs else None
    given["response_format"] = translation.chat.response_format
    with client_paths(WITHOUT_TEMPLATE):
        return validated(CompletionRequest, given)


def _places(body: ChatRequest | GenerateRequest, turns: Sequence[Turn]) -> dict[str, str]:
    """Return the paths in the body of the chat request's turns and images."""
    chats = isinstance(body, ChatRequest)
    places = {} if chats else {"messages": "prompt"}
    for at, turn in enumerate(turns):
        here = f"messages[{at}]"
        shown = "system" if turn.role == "system" else "prompt"
        places[here] = here if chats else shown
        images = f"{here}.images" if chats else "images"
        for index in range(len(turn.images or ())):
            places[f"{here}.content[{index}]"] = f"{images}[{index}]"
    return places


def _message(turn: Turn) -> Json:
    parts: list[Json] = []
    for image in turn.images or ():
        kind = "video_url" if type_of(image).startswith("video") else "image_url"
        parts.append({"type": kind, kind: {"url": image}})
    parts += [{"type": "text", "text": turn.content}] if turn.content else []
    return {
        "role": turn.role,
        "content": parts if turn.images else turn.content,
        "name": turn.tool_name,
        "tool_call_id": turn.tool_call_id,
        "reasoning_content": turn.thinking,
        "tool_calls": [call.model_dump(exclude_none=True) for call in turn.tool_calls or ()],
    }

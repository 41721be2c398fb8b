"""Chat messages → the protocol's Messages, Images, Videos and Audios.

In the protocol a message has only text, and all media of the conversation are in one list per kind.
So text parts are concatenated, and the message index of each item is sent along: if images keep
their positions, the next turn of the conversation can start from the prompt cache. Legacy function
calls become tool calls, because chat templates know only those.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from gateway import exchange, images
from gateway.errors import ApiError, bad_field
from gateway.openai.anthropic_parts import ThoughtPart
from gateway.openai.chat_request import RoleMapping
from gateway.openai.messages import ChatMessage, ContentPart, Part, ResultPart, ToolCall
from gateway.openai.turns import RESULTS, Turn, turns_of
from gateway.remote_images import Fetched
from gateway.settings import GatewaySettings
from wire import backend_pb2 as pb

# No chat template of a local model distinguishes the two: those that know `developer` (gpt-oss)
# render `system` the same way, and the others refuse unknown roles.
_ROLES = {"developer": "system", "function": "tool"}
_ASSISTANT = (
    "tool_calls function_call reasoning_content reasoning thinking_blocks reasoning_details \
refusal".split()
)
_OF_ROLE = dict.fromkeys(_ASSISTANT, "assistant") | {"tool_call_id": "tool"}
_AT_ONCE = 500  # messages between two pauses for other tasks
Kind = Literal["image", "video", "audio"]


@dataclass(slots=True)
class WireMessages:
    """A conversation for the backend.

    messages: the list inside the request's protobuf message; filling it directly saves a copy of
    long texts. media: for each kind the data URIs, each with the index of its message. results:
    the media of other roles' messages, which are attached to the next user message.
    """

    messages: MutableSequence[pb.Message]
    media: dict[Kind, list[tuple[int, str]]] = field(
        default_factory=lambda: {"image": [], "video": [], "audio": []}
    )
    results: list[tuple[Kind, str]] = field(default_factory=list)
    fetched: int = 0  # bytes of fetched images and videos

    def give_to_user(self) -> None:
        """Attach the media of other messages to the user message that comes next."""
        for kind, content in self.results:
            self.media[kind].append((len(self.messages), content))
        self.results.clear()

    def count_fetched(self, url: str, content: str, settings: GatewaySettings) -> None:
        """Add to the size of fetched media. Raises ApiError if they are too large together."""
        self.fetched += len(content) if images.is_remote(url) else 0
        if self.fetched > settings.max_body_bytes:
            sentence = (
                f"all fetched images and videos together exceed {settings.max_body_bytes} bytes"
            )
            raise ApiError(413, f"{sentence}: send fewer", code="request_too_large")


async def wire_messages(
    messages: Sequence[ChatMessage], settings: GatewaySettings, options: pb.PredictOptions
) -> WireMessages:
    """Write the messages one by one into `options`. Raises ApiError with the path at fault."""
    found = WireMessages(options.Messages)
    turns = list(turns_of(messages))
    _require_few_remote(turns)
    names: dict[str, str] = {}  # names of the called functions so far, by call id
    open_calls: dict[str, str] = {}  # those of the latest calls without a result yet
    for index, turn in enumerate(turns):
        if index % _AT_ONCE == _AT_ONCE - 1:
            await asyncio.sleep(0)  # let other tasks run, such as streams
        message = turn.message
        if message.role == "user":
            found.give_to_user()
        _require_fitting(message, turn.place)
        calls = _calls(message, index)
        if calls:
            open_calls = {call.id: call.function.name for call in calls}
            names |= open_calls
        answered = _answered_call(message, open_calls)
        content = await _content(turn, found, settings)
        options.Messages.add(
            role=_ROLES.get(message.role, message.role),
            content=content,
            name=message.name or names.get(answered, ""),
            tool_call_id=answered,
            reasoning_content=message.thought,
            tool_calls=json.dumps([_call(call) for call in calls]) if calls else "",
        )
    return found


def _require_few_remote(turns: Sequence[Turn]) -> None:
    remote = 0
    for path, part in (each for turn in turns for each in turn.parts):
        if not isinstance(part, ContentPart) or part.url is None:
            continue
        remote += images.is_remote(part.url)
        if remote > images.MOST_REMOTE:
            place = f"{path}.{part.field}"
            sentence = f"{place}: at most {images.MOST_REMOTE} images and videos are fetched"
            raise bad_field(place, f"{sentence}: send the others as data URIs")


def _require_fitting(message: ChatMessage, place: str) -> None:
    """Refuse fields that the role does not have."""
    for name, role in _OF_ROLE.items():
        if getattr(message, name) and message.role != role:
            raise bad_field(
                f"{place}.{name}",
                f"{place}.{name} belongs to the role {role}, not to {message.role}: leave it out",
            )
    if message.content is None and message.role in ("system", "developer", "user"):
        raise bad_field(
            f"{place}.content", f"{place}.content is missing: send a text or a list of parts"
        )


async def _content(turn: Turn, found: WireMessages, settings: GatewaySettings) -> str:
    message = turn.message
    if not isinstance(message.content, list):
        return turn.before + (message.content or message.refusal or "")
    texts = [await _part(message, part, path, found, settings) for path, part in turn.parts]
    between = "" if message.role in ("user", "assistant") else "\n"
    return turn.before + between.join(filter(None, texts))


async def _part(
    message: ChatMessage, part: Part, place: str, found: WireMessages, settings: GatewaySettings
) -> str:
    """The text of one part; its media are collected."""
    if not isinstance(part, ContentPart):
        owner = "user" if isinstance(part, ResultPart) else "assistant"
        here = exchange.current()
        if isinstance(part, ThoughtPart) and (message.role == owner or not here.strict):
            if message.role != owner:
                here.ignore(f"messages[].content[][{part.type}]")
            return ""
        sentence = f"{place} is not supported: {part.type} parts belong to messages of the role"
        raise bad_field(place, f"{sentence} {owner}", "unsupported_parameter")
    _require_one_kind(part, place)
    value = getattr(part, part.field)
    if value is None:
        raise bad_field(f"{place}.{part.field}", f"{place}.{part.field} is missing")
    if part.type in ("text", "refusal"):
        return str(value)
    try:
        kind, content = await _medium(part, found, settings)
        if message.role == "user":
            found.media[kind].append((len(found.messages), content))
        else:
            found.results.append((kind, content))
    except ApiError as error:
        where = f"{place}.{part.field}"
        raise replace(error, message=f"{where}: {error.message}", param=where) from None
    return ""


async def _medium(
    part: ContentPart, found: WireMessages, settings: GatewaySettings
) -> tuple[Kind, str]:
    if (sound := part.input_audio) is not None:
        return "audio", images.audio(sound.data, sound.format, settings)
    assert part.url is not None
    if part.audio_url is not None:
        return "audio", images.audio(part.url, "WAV or MP3", settings)
    what: Fetched = "image" if part.video_url is None else "video"
    content = await images.media(part.url, settings, what)
    found.count_fetched(part.url, content, settings)
    return what, content


def _require_one_kind(part: ContentPart, place: str) -> None:
    """Refuse a part with content of two types, because one of them would be ignored."""
    neutral = ("type", part.field)
    for name in ContentPart.model_fields:
        if name not in neutral and getattr(part, name):
            raise bad_field(
                place,
                f"{place} is of type {part.type} and has {name} as well: send a part for each",
            )


def _calls(message: ChatMessage, index: int) -> list[ToolCall]:
    legacy = [] if message.function_call is None else [ToolCall(function=message.function_call)]
    return [
        call if call.id else call.model_copy(update={"id": f"call_{index}_{place}"})
        for place, call in enumerate((*legacy, *(message.tool_calls or ())))
    ]


def _answered_call(message: ChatMessage, open_calls: dict[str, str]) -> str:
    """The id of the call that a result answers: without one, the first of its function, if any."""
    if message.role in RESULTS and not message.tool_call_id:
        fitting = (at for at, name in open_calls.items() if message.name in (None, "", name))
        found = next(fitting, "")
    else:
        found = message.tool_call_id or ""
    open_calls.pop(found, None)
    return found


def _call(call: ToolCall) -> dict[str, object]:
    given = call.function.arguments
    arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def prompt_of(mapping: RoleMapping, found: WireMessages, options: pb.PredictOptions) -> str:
    """The prompt of mlx_lm.server's `role_mapping`: texts around the messages, without a template.

    Raises ApiError for an empty one, and for what needs a chat template.
    """
    called = any(message.tool_calls for message in found.messages)
    if options.Tools or called or any(found.media.values()):
        sentence = "role_mapping cannot be combined with tools, images, videos and audio"
        raise bad_field(
            "role_mapping", f"{sentence}, which need the model's chat template: leave it out"
        )
    texts = [
        f"{getattr(mapping, message.role, '')}{message.content}{mapping.stop}"
        for message in found.messages
    ]
    prompt = ("".join(texts) + mapping.assistant).rstrip()
    if not prompt:
        sentence = "messages and role_mapping have no text between them: send a message to answer"
        raise bad_field("messages", sentence)
    return prompt

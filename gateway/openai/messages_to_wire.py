"""Chat messages → the protocol's Messages, Images, Videos and Audios.

In the protocol a message has only text, and all media of the conversation are in one list per kind.
So text parts are concatenated, and the position of each item is sent along: the model sees the
parts in their order, and the next turn of the conversation can start from the prompt cache. Legacy
function calls become tool calls, because chat templates know only those.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter, defaultdict, deque
from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from common.field_names import named
from gateway import exchange, images
from gateway.errors import ApiError, bad_field
from gateway.openai.messages import (
    RESULTS,
    SECONDS,
    UNREAD,
    ChatMessage,
    ContentPart,
    Part,
    PdfPart,
    ResultPart,
    RoleMapping,
    ThoughtPart,
    ToolCall,
    Turn,
    turns_of,
)
from gateway.remote_images import Fetched
from gateway.settings import GatewaySettings
from gateway.threads import offload
from wire import backend_pb2 as pb

# No chat template of a local model distinguishes the two: those that know `developer` (gpt-oss)
# render `system` the same way, and the others refuse unknown roles.
_ROLES = {"developer": "system", "function": "tool"}
_CALLS = ("tool_calls", "function_call")
_THOUGHTS = ("reasoning_content", "reasoning", "thinking_blocks", "reasoning_details")
_OF_ROLE = dict.fromkeys((*_CALLS, *_THOUGHTS, "refusal"), "assistant") | {"tool_call_id": "tool"}
_AT_ONCE = 500  # messages and parts between two pauses for other tasks
Kind = Literal["image", "video", "audio"]


@dataclass(slots=True)
class WireMessages:
    """A conversation for the backend.

    messages: the list inside the request's protobuf message; filling it directly saves a copy of
        long texts.
    media: for each kind the data URIs, each with its position, as in the backend's
        `mlx.image_messages`.
    kinds: how many media of each kind are in the message that is being written.
    results: the media of other roles' messages, which are attached to the next user message.
    """

    messages: MutableSequence[pb.Message]
    settings: GatewaySettings
    media: dict[Kind, list[tuple[int | tuple[int, ...], str]]] = field(
        default_factory=lambda: {"image": [], "video": [], "audio": []}
    )
    kinds: Counter[Kind] = field(default_factory=Counter)
    results: list[tuple[Kind, str]] = field(default_factory=list)
    fetched: int = 0  # bytes of fetched images and videos
    pdf_seconds: float = SECONDS  # left for reading PDFs
    steps: int = 0

    async def pause(self) -> None:
        """Let other tasks run, such as streams, if it is time."""
        self.steps += 1
        if self.steps % _AT_ONCE == 0:
            await asyncio.sleep(0)

    def show(self, kind: Kind, content: str, offset: int) -> None:
        """Add a medium to the message that is being written.

        offset: characters of text before the medium.
        """
        index = len(self.messages)
        leads = not offset and self.kinds.keys() <= {kind}
        place = index if leads else (index, offset, self.kinds.total())
        self.media[kind].append((place, content))
        self.kinds[kind] += 1

    async def content_of(self, turn: Turn) -> str:
        """Return the text of a message, and collect its media."""
        message = turn.message
        if not isinstance(message.content, list):
            return turn.before + (message.content or message.refusal or "")
        texts: list[str] = []
        length = 0  # of the parts' texts so far; those of a user are joined without a separator
        for path, part in turn.parts:
            texts.append(await self._part(message, part, path, length))
            length += len(texts[-1])
        between = "" if message.role in ("user", "assistant") else "\n"
        return turn.before + between.join(filter(None, texts))

    async def _part(self, message: ChatMessage, part: Part, place: str, offset: int) -> str:
        """Return the text of one part, and collect its media.

        offset: characters of text before the part.
        """
        await self.pause()
        if isinstance(part, PdfPart):
            text, self.pdf_seconds = await part.read(self.pdf_seconds)
            if not text:
                exchange.current().ignore(f"{place}[{part.type}]")
            return text or UNREAD
        if not isinstance(part, ContentPart):
            owner = "user" if isinstance(part, ResultPart) else "assistant"
            here = exchange.current()
            if isinstance(part, ThoughtPart) and (message.role == owner or not here.strict):
                if message.role != owner or not part.thought:  # encrypted by another provider
                    here.ignore(f"{place}[{part.type}]")
                return ""
            raise bad_field(
                f"{named(place)} is not supported: {part.type} parts belong to messages of the role"
                f" {owner}",
                "unsupported_parameter",
            )
        _require_one_kind(part, place)
        value = getattr(part, part.field)
        if value is None:
            raise bad_field(f"{named(f'{place}.{part.field}')} is missing")
        if not part.is_medium:
            return str(value)
        try:
            kind, content = await self._medium(part)
            if message.role == "user":
                self.show(kind, content, offset)
            else:
                self.results.append((kind, content))
        except ApiError as error:
            where = f"{place}.{part.field}"
            raise replace(error, marked=f"{named(where)}: {error.marked}", param=where) from None
        return ""

    async def _medium(self, part: ContentPart) -> tuple[Kind, str]:
        if (sound := part.input_audio) is not None:
            return "audio", await images.audio(sound.data, sound.format, self.settings)
        assert part.url is not None
        if part.audio_url is not None:
            return "audio", await images.audio(part.url, "WAV or MP3", self.settings)
        what: Fetched = "image" if part.video_url is None else "video"
        content = await images.media(part.url, self.settings, what)
        self.fetched += len(content) if images.is_remote(part.url) else 0
        if self.fetched > (limit := self.settings.max_body_bytes):
            message = f"all fetched images and videos together exceed {limit} bytes: send fewer"
            raise ApiError(413, message, code="request_too_large")
        return what, content


async def wire_messages(
    messages: Sequence[ChatMessage], settings: GatewaySettings, options: pb.PredictOptions
) -> WireMessages:
    """Write the messages one by one into `options`. Raises ApiError with the path at fault."""
    found = WireMessages(options.Messages, settings)
    for turn, fields in await offload(_turns, messages):
        await found.pause()
        found.kinds.clear()
        if turn.message.role == "user":
            for kind, shown in found.results:
                found.show(kind, shown, 0)
            found.results.clear()
        content = await found.content_of(turn)
        options.Messages.add(content=content, **fields)
    return found


def _turns(messages: Sequence[ChatMessage]) -> list[tuple[Turn, dict[str, str]]]:
    """Return the turns, each with the fields of its message but the content.

    Raises ApiError with the path at fault, also if there are more URLs than may be fetched.
    """
    found: list[tuple[Turn, dict[str, str]]] = []
    names: dict[str, str] = {}  # names of the called functions so far, by call id
    open_calls = _OpenCalls(())
    remote, last = 0, f"messages[{len(messages) - 1}]"
    for index, turn in enumerate(turns_of(messages)):
        message = _fitting(turn.message, turn.place)
        if message.prefix and turn.place != last:
            exchange.current().ignore(f"{turn.place}.prefix")
        calls = calls_of(message, index)
        if calls:
            open_calls = _OpenCalls(calls)
            names |= {call.id: call.function.name for call in calls}
        answered = open_calls.answered_by(message)
        fields = {
            "role": _ROLES.get(message.role, message.role),
            "name": message.name or names.get(answered, ""),
            "tool_call_id": answered,
            "reasoning_content": message.thought,
            "tool_calls": json.dumps([_call(call) for call in calls]) if calls else "",
        }
        found.append((turn, fields))
        for path, part in turn.parts:
            if not isinstance(part, ContentPart) or part.url is None:
                continue
            remote += images.is_remote(part.url)
            if remote > images.MOST_REMOTE:
                raise bad_field(
                    f"{named(f'{path}.{part.field}')}: at most {images.MOST_REMOTE} images and"
                    " videos are fetched: send the others as data URIs"
                )
    return found


def _fitting(message: ChatMessage, place: str) -> ChatMessage:
    """Return the message without fields that its role does not have, or that another replaces.

    Calls of other roles are refused.
    """
    here = exchange.current()
    for name, role in _OF_ROLE.items():
        if getattr(message, name) and message.role != role:
            if here.strict or name in _CALLS:
                raise bad_field(
                    f"{named(f'{place}.{name}')} belongs to the role {role}, not to {message.role}:"
                    " leave it out"
                )
            here.ignore(f"{place}.{name}")
            message = message.model_copy(update={name: None})
    for name, first in (("refusal", "content"), ("reasoning", "reasoning_content")):
        values = getattr(message, first), getattr(message, name)
        if all(values) and values[0] != values[1]:
            if here.strict:
                raise bad_field(
                    f"{named(f'{place}.{name}')} differs from {first}, which replaces it: leave"
                    " one of them out"
                )
            here.ignore(f"{place}.{name}")
    if message.content is None and message.role in ("system", "developer", "user"):
        raise bad_field(f"{named(f'{place}.content')} is missing: send a text or a list of parts")
    return message


def _require_one_kind(part: ContentPart, place: str) -> None:
    """Refuse a part with content of two types, because one of them would be ignored."""
    neutral = ("type", part.field)
    for name in ContentPart.model_fields:
        if name not in neutral and getattr(part, name):
            raise bad_field(
                f"{named(place)} is of type {part.type} and has {name} as well: send a part for"
                " each"
            )


def calls_of(message: ChatMessage, index: int) -> list[ToolCall]:
    legacy = [] if message.function_call is None else [ToolCall(function=message.function_call)]
    return [
        call
        if call.id
        else ToolCall.model_construct(id=f"call_{index}_{at}", function=call.function)
        for at, call in enumerate((*legacy, *(message.tool_calls or ())))
    ]


class _OpenCalls:
    """The latest calls that have no result yet."""

    def __init__(self, calls: Sequence[ToolCall]) -> None:
        self._open = {call.id for call in calls}
        # The ids of calls by function, and those of all calls under "".
        self._queues: dict[str, deque[str]] = defaultdict(deque)
        for call in calls:
            for name in {call.function.name, ""}:
                self._queues[name].append(call.id)

    def answered_by(self, message: ChatMessage) -> str:
        """Return the id of the call that a result answers.

        A result without an id answers the first open call of its function.
        """
        found = message.tool_call_id or ""
        if message.role in RESULTS and not found:
            queue = self._queues[message.name or ""]
            while queue and not found:
                found = queue[0] if queue[0] in self._open else ""
                queue.popleft()
        self._open.discard(found)
        return found


def _call(call: ToolCall) -> dict[str, object]:
    given = call.function.arguments
    arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def prompt_of(mapping: RoleMapping, found: WireMessages, options: pb.PredictOptions) -> str:
    """Return the prompt of mlx_lm.server's `role_mapping`: the messages without a template.

    Raises ApiError for an empty prompt, and for what needs a chat template.
    """
    called = any(message.tool_calls for message in found.messages)
    if options.Tools or called or any(found.media.values()):
        raise bad_field(
            f"{named('role_mapping')} cannot be combined with tools, images, videos and audio,"
            " which need the model's chat template: leave it out"
        )
    texts = [
        f"{getattr(mapping, message.role, '')}{message.content}{mapping.stop}"
        for message in found.messages
    ]
    prompt = ("".join(texts) + mapping.assistant).rstrip()
    if not prompt:
        raise bad_field(
            f"{named('messages')} and role_mapping have no text between them: send a message to"
            " answer"
        )
    return prompt

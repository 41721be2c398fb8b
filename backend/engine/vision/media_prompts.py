"""Puts the media of a request into its messages, and finds their markers in the prompt's tokens.

The protocol has flat lists of media without positions. All items go into the last user message
(images, videos, audio, then its text), unless the request states the position of each item
(`mlx.image_messages`, `mlx.video_messages`, `mlx.audio_messages`), or the user messages have as
many markers `<__media__>` as there are items. A model that accepts images but no videos receives
the frames of a video as images. This module runs on prompt threads.

Families also differ in how their chat templates mark media: some accept content as a list of parts
and write the marker, some need the marker in the text, and some cannot render content that is a
string. So the template is tested once, when the model is loaded (`learn`), by rendering messages
with and without an item. A marker contains a control token. Texts of users and tools cannot contain
control tokens (`engine.prompting.control_tokens`), so no text is mistaken for an image.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, ClassVar

from backend.engine.errors import InvalidRequest
from backend.engine.media.decoding import decode
from backend.engine.media.limits import MediaLimits
from backend.engine.prompting.control_tokens import ControlTokens
from backend.engine.request import Attachments
from backend.engine.vision.media_plan import AUDIO, IMAGE, VIDEO, MediaItem
from backend.engine.vision.processor import ItemProcessor
from common.field_names import named
from common.prefixes import common_prefix, position_of

_TEXT, _LATER = "Zyx wvu", "Tsr qpo"
_PARTS: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    "image": ({"type": "image"}, {"type": "image_url"}),
    "video": ({"type": "video"}, {"type": "video_url"}),
    "audio": ({"type": "audio"}, {"type": "input_audio"}),
}

Render = Callable[[Sequence[Mapping[str, Any]]], str]
# (kind, marker) → control strings to write instead of a marker without control tokens; '' if there
# are none.
Ends = Callable[[str, str], str]
# The marker that LocalAI writes into a Prompt that it has rendered. Clients may write the marker
# into a message, because LocalAI sends the texts of a message without the order of its parts.
PLACE = "<__media__>"
# Marks an item in a message's text until control strings in the text have been quoted. Unicode's
# noncharacters do not occur in text, and no client knows the random number.
_HERE = f"\ufdef{secrets.token_hex(16)}\ufdef"
_FIELDS = {IMAGE: "Images", VIDEO: "Videos", AUDIO: "Audios"}
_CANNOT = {
    IMAGE: "this model accepts no images: send none",
    VIDEO: "this model accepts neither videos nor images: send none",
    AUDIO: "this model accepts no audio: send none, or a transcript as text",
}
# Idefics 2's processor writes a space between an image and such text after the image.
_BARE = re.compile(r"[^\s<]")
Message = Mapping[str, Any]
Shown = Sequence[MediaItem]  # the items of one attachment: a video may become several images


@dataclass(frozen=True, slots=True)
class Marker:
    """How one kind of item is written into a prompt."""

    core: str  # the marker in the rendered prompt, from its first control token to its last
    expands: str  # the text that the processor expands to one item's tokens
    # The content part for which the template writes the marker; None if the message's text must
    # contain `text` instead.
    part: Mapping[str, Any] | None
    # What the template writes for `part`, or what must be written into the message's text.
    text: str
    several: bool  # whether a prompt may contain more than one item of this kind
    # Whether the item precedes the whole prompt, whichever message it belongs to. Then neither
    # template nor message has a marker for the item.
    in_front: bool = False
    # Whether the template writes all items of a message before its texts. For an item between two
    # texts, `text` is then written into the text instead of `part`.
    hoisted: bool = False


@dataclass(frozen=True, slots=True)
class TemplateForm:
    """How the template accepts content."""

    lists: bool  # whether content must be a list of parts even if it is only text
    # The marker of each kind of item. Items of a kind without a marker are refused.
    markers: Mapping[str, Marker]


def learn(
    render: Render,
    control: ControlTokens,
    kinds: Sequence[str],
    fallbacks: Mapping[str, Sequence[str]],
    ends: Ends,
) -> TemplateForm:
    """Test a template.

    render: renders messages; may raise any exception for messages that cannot be rendered.
    fallbacks: by kind, markers that the family's processor recognises in text.
    ends: returns what to write instead of a fallback marker that contains no control token.
    """
    lists = _TEXT not in _rendered(render, _TEXT)
    markers: dict[str, Marker] = {}
    for kind in kinds:
        marker = _of_parts(render, control, kind)
        for text in fallbacks.get(kind, ()):
            if marker is None:
                marker = _of_text(render, control, text, partial(ends, kind, text))
        if marker is not None:
            markers[kind] = marker
    return TemplateForm(lists, markers)


def _of_parts(render: Render, control: ControlTokens, kind: str) -> Marker | None:
    words = {"type": "text", "text": _TEXT}
    plain = _rendered(render, [words])
    for part in _PARTS[kind]:
        text = _inserted(plain, _rendered(render, [part, words]))
        core = _core(text, control)
        if core:
            several = _rendered(render, [part, part, words]).count(core) == 2
            later = {"type": "text", "text": _LATER}
            between = _rendered(render, [words, part, later]).partition(core)
            hoisted = not (_TEXT in between[0] and _LATER in between[2])
            return Marker(core, core, part, text, several=several, hoisted=hoisted)
    return None


def _of_text(
    render: Render, control: ControlTokens, expands: str, instead: Callable[[], str]
) -> Marker | None:
    marked = _core(expands, control)
    text = expands if marked else instead()
    core = _core(text, control)
    if not core or core not in _rendered(render, text + _TEXT):
        return None
    return Marker(core, marked or expands, None, text, several=True)


def _rendered(render: Render, content: Any) -> str:
    try:
        return render([{"role": "user", "content": content}])
    except Exception:
        return ""


def _inserted(plain: str, longer: str) -> str:
    """Return what one insertion into `plain` adds to make `longer`; '' if that is impossible."""
    if not plain or len(longer) <= len(plain):
        return ""
    start = common_prefix(plain, longer)
    stop = start + len(longer) - len(plain)
    return longer[start:stop] if longer[:start] + longer[stop:] == plain else ""


def _core(text: str, control: ControlTokens) -> str:
    """Return the text from its first control token to its last; '' if it has none."""
    ranges = [(text.find(token), text.rfind(token) + len(token)) for token in control.tokens]
    inside = [(start, stop) for start, stop in ranges if start >= 0]
    return text[min(inside)[0] : max(stop for _, stop in inside)] if inside else ""


@dataclass(eq=False)
class MediaPrompts:
    """Puts the media of requests into the prompts of one loaded model."""

    place: ClassVar[str] = PLACE  # the marker for an item in a raw prompt
    form: TemplateForm  # how the chat template accepts media
    processor: ItemProcessor
    # Returns the text that the processor writes before and after an item.
    around: Callable[[MediaItem], tuple[str, str]]
    token_markers: Mapping[str, Sequence[int]]  # the tokens of each kind's marker
    limits: MediaLimits

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of media that the model accepts. A video may be sent to the model as images."""
        return frozenset(self.form.markers) | ({VIDEO} if self._shows_frames else set())

    @property
    def _shows_frames(self) -> bool:
        image = self.form.markers.get(IMAGE)
        return VIDEO not in self.form.markers and image is not None and image.several

    @property
    def lists(self) -> bool:
        """Whether the content of every message must be a list of parts."""
        return self.form.lists

    @property
    def begins(self) -> bool:
        """Whether the BOS token of a prompt follows its image."""
        return self.processor.family.bos_after_image

    def items(self, attachments: Attachments) -> list[Shown]:
        """Return a request's media, decoded and prepared. Raises InvalidRequest."""
        for kind, sent, _ in _by_kind(attachments):
            self._require_accepted(kind, len(sent))
        media = decode(
            attachments.images,
            attachments.audios,
            self.limits,
            attachments.videos,
            lambda: self.processor.used_pixels,
        )
        frames = self._shows_frames
        images = len(media.images)
        if frames:
            images += sum(len(video.frames) for video in media.videos)
        return [
            [
                self.processor.prepare(part, named(f"{_FIELDS[kind]}[{index}]"), images)
                for part in parts
            ]
            for kind, sent in (
                (IMAGE, [[image] for image in media.images]),
                (VIDEO, [video.frames if frames else [video] for video in media.videos]),
                (AUDIO, [[audio] for audio in media.audios]),
            )
            for index, parts in enumerate(sent)
        ]

    def _require_accepted(self, kind: str, count: int) -> None:
        """Raise InvalidRequest if the model does not accept so many items of a kind."""
        marker = self.form.markers.get(kind)
        if not count or (kind == VIDEO and self._shows_frames):
            return
        if kind == VIDEO and not marker and IMAGE in self.form.markers:
            why = (
                "this model's chat template accepts only one image, and a video is sent as several"
                " images: send one frame of the video as an image"
            )
        elif not marker:
            why = _CANNOT[kind]
        elif count > 1 and not marker.several:
            why = "this model's chat template accepts only one item: send one"
        else:
            return
        raise InvalidRequest(f"{named(_FIELDS[kind])} has {count} items, but {why}")

    def placed(
        self, messages: Sequence[Message], attachments: Attachments, items: Sequence[Shown]
    ) -> tuple[tuple[Message, ...], list[MediaItem]]:
        """Return messages with a mark in the text for every item, and the items in this order.

        Raises InvalidRequest.
        """
        texts = [_text(message) for message in messages]
        users = [at for at, message in enumerate(messages) if message.get("role") == "user"]
        order = list(range(len(items)))
        marks = sum(texts[at].count(PLACE) for at in users)
        stated = any(positions is not None for *_, positions in _by_kind(attachments))
        if not stated and marks == len(items):
            rest = iter(items)
            for at in users:
                texts[at] = re.sub(PLACE, lambda _: _HERE * len(next(rest)), texts[at])
        else:
            positions = _positions(texts, users, attachments)
            order.sort(key=positions.__getitem__)
            for at in reversed(order):
                message, offset, *_ = (*positions[at], 0)
                text = texts[message]
                texts[message] = text[:offset] + _HERE * len(items[at]) + text[offset:]
        placed = (
            {**message, "content": text} if _HERE in text else message
            for message, text in zip(messages, texts, strict=True)
        )
        return tuple(placed), list(chain.from_iterable(items[at] for at in order))

    def attach(
        self, messages: Sequence[Message], items: Sequence[MediaItem]
    ) -> tuple[Message, ...]:
        """Replace the marks of `placed` by the parts or markers that the template needs."""
        rest = iter(items)
        return tuple(self._with(message, rest) for message in messages)

    def _with(self, message: Message, rest: Iterator[MediaItem]) -> Message:
        first, *texts = _text(message).split(_HERE)
        if not texts and not self.form.lists:
            return message
        markers = [self.form.markers[next(rest).kind] for _ in texts]
        leads = (
            not first and not any(texts[:-1]) and all(marker == markers[0] for marker in markers)
        )
        written = not leads and any(marker.hoisted for marker in markers)
        parts: list[Any] = [first]
        for marker, text in zip(markers, texts, strict=True):
            if marker.part is None or written:
                parts[-1] += marker.text + text
            else:
                parts += [dict(marker.part), text]
        if len(parts) == 1 and not self.form.lists:
            return {**message, "content": parts[0]}
        typed = (
            {"type": "text", "text": part} if isinstance(part, str) else part for part in parts
        )
        return {**message, "content": [part for part in typed if part.get("text") != ""]}

    def marked(self, text: str, items: Sequence[Shown]) -> str:
        """Replace every `PLACE` in a raw prompt by the model's markers. Raises InvalidRequest."""
        cores = sorted({marker.core for marker in self.form.markers.values()}, key=len)
        found = re.findall("|".join(map(re.escape, [PLACE, *reversed(cores)])), text)
        if len(found) != len(items):
            raise InvalidRequest(
                f"{named('Prompt')} has {len(found)} media markers, but {len(items)} items are"
                f" sent: write {PLACE} where each item belongs"
            )
        for parts in items:
            markers = (self.form.markers[part.kind] for part in parts)
            written = "".join("" if marker.in_front else marker.core for marker in markers)
            text = text.replace(PLACE, written, 1)
        return text

    def surrounded(self, text: str, items: Sequence[MediaItem]) -> str:
        """Add to a rendered prompt what the processor writes around items and at the end."""
        markers = [self.form.markers[item.kind] for item in items]
        text = "".join(marker.core for marker in markers if marker.in_front) + text
        ending = "\n" if items and self.processor.family.bos_after_image else ""
        pieces: list[str] = []
        at = 0
        for item, marker in zip(items, markers, strict=True):
            start = text.find(marker.core, at)
            if start < 0:
                break
            before, after = self.around(item)
            pieces += [text[at:start], before, marker.core, after.removesuffix(ending)]
            at = start + len(marker.core)
            if self.processor.family.boundary and _BARE.match(text, at):
                pieces.append(" ")
        return "".join([*pieces, text[at:], ending])

    def ranges(self, tokens: Sequence[int], items: Sequence[MediaItem]) -> list[tuple[int, int]]:
        """Return the (start, stop) of each marker in a tokenised prompt. Raises InvalidRequest."""
        found: list[tuple[int, int]] = []
        end = 0
        for item in items:
            marker = self.token_markers[item.kind]
            at = position_of(marker, tokens, end)
            if at < 0:
                break
            end = at + len(marker)
            found.append((at, end))
        kinds = {item.kind for item in items}
        beyond = any(position_of(self.token_markers[kind], tokens, end) >= 0 for kind in kinds)
        if len(found) < len(items) or beyond:
            markers = "more markers" if beyond else f"only {len(found)} markers"
            raise InvalidRequest(
                f"{len(items)} items of media are sent, but the rendered prompt has {markers} for"
                " them: remove the model's own markers from Prompt and from assistant and system"
                " messages, or send the media with the last message"
            )
        return found


def _by_kind(attachments: Attachments) -> Iterator[tuple[str, Sequence[Any], Any]]:
    """Return the items of each kind and their stated positions, which may be None."""
    yield IMAGE, attachments.images, attachments.image_messages
    yield VIDEO, attachments.videos, attachments.video_messages
    yield AUDIO, attachments.audios, attachments.audio_messages


def _positions(
    texts: Sequence[str], users: Sequence[int], attachments: Attachments
) -> list[tuple[int, ...]]:
    """Return the position of each image, video and audio item: (message,) or (message, character).

    Raises InvalidRequest.
    """
    positions: list[tuple[int, ...]] = []
    for kind, sent, entries in _by_kind(attachments):
        count = len(sent)
        if entries is None:
            if count and not users:
                raise InvalidRequest(
                    f"{named(_FIELDS[kind])} has {count} items, but {named('Messages')} has no user"
                    " message for them: add one"
                )
            positions += [(users[-1],) for _ in range(count)]
            continue
        key = named(f"Metadata mlx.{kind}_messages")
        if len(entries) != count:
            raise InvalidRequest(
                f"{key} has {len(entries)} entries, but {named(_FIELDS[kind])} has {count}: send"
                " one for each"
            )
        for entry in entries:
            message, *within = (entry,) if isinstance(entry, int) else entry
            if message not in users:
                raise InvalidRequest(
                    f"{key} names message {message}, which is not a user message: Messages has"
                    f" {len(texts)}, counted from 0"
                )
            if within and not 0 <= within[0] <= len(texts[message]):
                raise InvalidRequest(
                    f"{key} names character {within[0]} of message {message}, which has"
                    f" {len(texts[message])}"
                )
            positions.append((message, *within))
    return positions


def _text(message: Message) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""

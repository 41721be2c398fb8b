"""Media in prompts, on the prompt threads: media into messages, and markers into tokens.

The protocol has flat lists of media and does not say where an item belongs. All items go into the
last user message (images, videos, sounds, then its text), unless the request gives the position of
each (`mlx.image_messages`, `mlx.video_messages`, `mlx.audio_messages`), or the user messages have
as many markers `<__media__>` as there are items. A model that accepts images but no videos receives
the frames of a video as images.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from backend.engine.errors import InvalidRequest
from backend.engine.media.decoding import decode
from backend.engine.media.limits import MediaLimits
from backend.engine.request import Attachments
from backend.engine.vision.markers import TemplateForm
from backend.engine.vision.media_plan import AUDIO, IMAGE, VIDEO, MediaItem
from backend.engine.vision.processor import ItemProcessor
from common.field_names import named

# The marker that LocalAI writes into a Prompt that it has rendered itself. Its clients may write it
# into a message, because LocalAI sends the texts of a message without the order of its parts.
PLACE = "<__media__>"
# Stands for an item in a message's text until control strings in the text are quoted. Unicode's
# noncharacters do not occur in text, and no client knows the random number.
_HERE = f"\ufdef{secrets.token_hex(16)}\ufdef"
_FIELDS = {IMAGE: "Images", VIDEO: "Videos", AUDIO: "Audios"}
_CANNOT = {
    IMAGE: "this model accepts no images: send none",
    VIDEO: "this model accepts neither videos nor images: send none",
    AUDIO: "this model accepts no audio: send none, or a transcript as text",
}
# Text that Idefics 2's processor separates from an image before it by a space.
_BARE = re.compile(r"[^\s<]")

Message = Mapping[str, Any]
Shown = Sequence[MediaItem]  # the items of one attachment: a video may become several images


class MediaPrompts:
    """Puts the media of requests into the prompts of one loaded model.

    around: the text that the processor writes before and after an item.
    token_markers: the tokens of each kind's marker.
    """

    place = PLACE  # the marker for an item in a raw prompt

    def __init__(
        self,
        form: TemplateForm,
        processor: ItemProcessor,
        around: Callable[[MediaItem], tuple[str, str]],
        token_markers: Mapping[str, Sequence[int]],
        limits: MediaLimits,
    ) -> None:
        self._form = form
        self._processor = processor
        self._around = around
        self._token_markers = token_markers
        self._limits = limits
        self._family = processor.family
        self.fitted = processor.fitted

    @property
    def kinds(self) -> frozenset[str]:
        """Which of image, video and audio the model accepts, videos also as images."""
        return frozenset(self._form.markers) | ({VIDEO} if self._shows_frames else set())

    @property
    def _shows_frames(self) -> bool:
        image = self._form.markers.get(IMAGE)
        return VIDEO not in self._form.markers and image is not None and image.several

    @property
    def lists(self) -> bool:
        """Whether every content is a list of parts."""
        return self._form.lists

    @property
    def begins(self) -> bool:
        """Whether an item contains the BOS token of its prompt."""
        return self._family.bos_after_image

    def items(self, given: Attachments) -> list[Shown]:
        """Return a request's media, decoded and prepared. Raises InvalidRequest."""
        self._require_taken(IMAGE, len(given.images))
        self._require_taken(VIDEO, len(given.videos))
        self._require_taken(AUDIO, len(given.audios))
        media = decode(
            given.images,
            given.audios,
            self._limits,
            given.videos,
            lambda: self._processor.used_pixels,
        )
        frames = self._shows_frames
        images = len(media.pictures)
        if frames:
            images += sum(len(video.frames) for video in media.videos)
        return [
            [self._processor.prepare(part, f"{_FIELDS[kind]}[{index}]", images) for part in parts]
            for kind, sent in (
                (IMAGE, [[picture] for picture in media.pictures]),
                (VIDEO, [video.frames if frames else [video] for video in media.videos]),
                (AUDIO, [[sound] for sound in media.sounds]),
            )
            for index, parts in enumerate(sent)
        ]

    def _require_taken(self, kind: str, count: int) -> None:
        marker = self._form.markers.get(kind)
        if not count or (kind == VIDEO and self._shows_frames):
            return
        if kind == VIDEO and not marker and IMAGE in self._form.markers:
            why = (
                "this model's chat template accepts only one image, and a video is sent as several:"
                " send one frame of it as an image"
            )
        elif not marker:
            why = _CANNOT[kind]
        elif count > 1 and not marker.several:
            why = "this model's chat template accepts only one: send one"
        else:
            return
        raise InvalidRequest(f"{named(_FIELDS[kind])} has {count} items, but {why}")

    def placed(
        self, messages: Sequence[Message], given: Attachments, items: Sequence[Shown]
    ) -> tuple[tuple[Message, ...], list[MediaItem]]:
        """The messages with a mark in their texts for every item, and the items in that order.

        items: what `items` returned. Raises InvalidRequest.
        """
        texts = [_text(message) for message in messages]
        users = [at for at, message in enumerate(messages) if message.get("role") == "user"]
        order = list(range(len(items)))
        named = (given.image_messages, given.video_messages, given.audio_messages)
        marks = sum(texts[at].count(PLACE) for at in users)
        if named == (None, None, None) and marks == len(items):
            rest = iter(items)
            for at in users:
                texts[at] = re.sub(PLACE, lambda _: _HERE * len(next(rest)), texts[at])
        else:
            positions = _positions(texts, users, given)
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
        """The messages that `placed` returned, with what the template needs in place of marks."""
        rest = iter(items)
        return tuple(self._with(message, rest) for message in messages)

    def _with(self, message: Message, rest: Iterator[MediaItem]) -> Message:
        first, *texts = _text(message).split(_HERE)
        if not texts and not self._form.lists:
            return message
        markers = [self._form.markers[next(rest).kind] for _ in texts]
        leads = not first and not any(texts[:-1]) and all(each == markers[0] for each in markers)
        written = not leads and any(marker.hoisted for marker in markers)
        parts: list[Any] = [first]
        for marker, text in zip(markers, texts, strict=True):
            if marker.part is None or written:
                parts[-1] += marker.text + text
            else:
                parts += [dict(marker.part), text]
        if len(parts) == 1 and not self._form.lists:
            return {**message, "content": parts[0]}
        typed = (
            {"type": "text", "text": each} if isinstance(each, str) else each for each in parts
        )
        return {**message, "content": [part for part in typed if part.get("text") != ""]}

    def marked(self, text: str, items: Sequence[Shown]) -> str:
        """A raw prompt with `PLACE` replaced by the model's markers. Raises InvalidRequest."""
        cores = sorted({marker.core for marker in self._form.markers.values()}, key=len)
        places = re.findall("|".join(map(re.escape, [PLACE, *reversed(cores)])), text)
        if len(places) != len(items):
            raise InvalidRequest(
                f"{named('Prompt')} has {len(places)} media markers, but {len(items)} items are"
                f" sent: write {PLACE} where each of them belongs",
            )
        for parts in items:
            markers = (self._form.markers[part.kind] for part in parts)
            written = "".join("" if marker.in_front else marker.core for marker in markers)
            text = text.replace(PLACE, written, 1)
        return text

    def surrounded(self, text: str, items: Sequence[MediaItem]) -> str:
        """A rendered prompt with the text that the processor adds around items and at the end."""
        markers = [self._form.markers[item.kind] for item in items]
        text = "".join(marker.core for marker in markers if marker.in_front) + text
        ending = "\n" if items and self._family.bos_after_image else ""
        pieces: list[str] = []
        at = 0
        for item, marker in zip(items, markers, strict=True):
            start = text.find(marker.core, at)
            if start < 0:
                break
            before, after = self._around(item)
            pieces += [text[at:start], before, marker.core, after.removesuffix(ending)]
            at = start + len(marker.core)
            if self._family.boundary and _BARE.match(text, at):
                pieces.append(" ")
        return "".join([*pieces, text[at:], ending])

    def places(self, tokens: Sequence[int], items: Sequence[MediaItem]) -> list[tuple[int, int]]:
        """(start, stop) of each marker in a tokenised prompt. Raises InvalidRequest."""
        found: list[tuple[int, int]] = []
        end = 0
        for item in items:
            marker = self._token_markers[item.kind]
            at = _find(tokens, marker, end)
            if at < 0:
                break
            end = at + len(marker)
            found.append((at, end))
        kinds = {item.kind for item in items}
        beyond = any(_find(tokens, self._token_markers[kind], end) >= 0 for kind in kinds)
        if len(found) < len(items) or beyond:
            markers = "more markers" if beyond else f"only {len(found)} markers"
            raise InvalidRequest(
                f"{len(items)} items of media are sent, but the rendered prompt has {markers} for"
                " them: remove the model's own markers from Prompt and from assistant and system"
                " messages, or send the media with the last message"
            )
        return found


def _positions(
    texts: Sequence[str], users: Sequence[int], given: Attachments
) -> list[tuple[int, ...]]:
    """Return the position of each image, video and sound as `Attachments` describes it, in a tuple.

    users: the indices of user messages. Raises InvalidRequest.
    """
    positions: list[tuple[int, ...]] = []
    for kind, count, places in (
        (IMAGE, len(given.images), given.image_messages),
        (VIDEO, len(given.videos), given.video_messages),
        (AUDIO, len(given.audios), given.audio_messages),
    ):
        if places is None:
            if count and not users:
                raise InvalidRequest(
                    f"{named(_FIELDS[kind])} has {count} items, but {named('Messages')} has no user"
                    " message for them: add one",
                )
            positions += [(users[-1],) for _ in range(count)]
            continue
        key = named(f"Metadata mlx.{kind}_messages")
        if len(places) != count:
            raise InvalidRequest(
                f"{key} has {len(places)} entries, but {named(_FIELDS[kind])} has {count}: send one"
                " for each"
            )
        for entry in places:
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


def _find(tokens: Sequence[int], indices: Sequence[int], start: int) -> int:
    wanted, length = list(indices), len(indices)
    return next(
        (
            at
            for at in range(start, len(tokens) - length + 1)
            if tokens[at] == wanted[0] and list(tokens[at : at + length]) == wanted
        ),
        -1,
    )

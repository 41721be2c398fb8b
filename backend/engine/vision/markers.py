"""Finds out how a chat template marks media, by rendering messages with and without an item.

Families differ: some templates accept content as a list of parts and write the marker, some need
the marker in the text, and some cannot render content that is a string. So the template is tested
once, when the model is loaded. A marker contains a control token. Texts of users and tools cannot
contain control tokens (`engine.prompting.control_tokens`), so no text is mistaken for an image.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from backend.engine.prompting.control_tokens import ControlTokens
from common.prefixes import common_prefix

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
    kinds: the kinds of items that the processor accepts.
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

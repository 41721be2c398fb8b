"""How a chat template marks media, found by rendering a message with and without an item.

Families differ: some templates accept content as a list of parts and write the marker themselves,
some need the marker in the text, some cannot render content that is a plain string. So the template
is tested once, when the model is loaded. A marker contains a control token, which the text of users
and tools cannot (`engine.prompting.control_tokens`), so no text can pass for an image.
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
# (kind, marker) → control strings that replace a marker of plain text; '' if there are none.
Ends = Callable[[str, str], str]


@dataclass(frozen=True, slots=True)
class Marker:
    """How one kind of item is written into a prompt.

    core: the marker in the rendered prompt, from its first control token to its last.
    expands: the text that the processor expands to one item's tokens.
    part: the content part for which the template writes the marker; if None, `text` is put before
        the text of the message instead.
    several: whether a prompt may contain more than one item of this kind.
    in_front: whether the item is before the whole prompt, wherever its message is; neither template
        nor message has a marker for it then.
    hoisted: whether the template writes a message's items before all its texts; between two texts,
        `text` is written into them instead of the part.
    """

    core: str
    expands: str
    part: Mapping[str, Any] | None
    text: str
    several: bool
    in_front: bool = False
    hoisted: bool = False


@dataclass(frozen=True, slots=True)
class TemplateForm:
    """How the template accepts content.

    lists: content must be a list of parts even if it is only text.
    markers: by kind of item; the model cannot be sent items of a kind without a marker.
    """

    lists: bool
    markers: Mapping[str, Marker]


def learn(
    render: Render,
    control: ControlTokens,
    kinds: Sequence[str],
    fallbacks: Mapping[str, Sequence[str]],
    ends: Ends,
) -> TemplateForm:
    """Test a template.

    render: the template's text for some messages; raises if it cannot render them. fallbacks: by
    kind, markers that the family's processor recognises in text. If such a marker is plain text,
    what `ends` gives for it is written instead.
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
    own = _core(expands, control)
    text = expands if own else instead()
    core = _core(text, control)
    if not core or core not in _rendered(render, text + _TEXT):
        return None
    return Marker(core, own or expands, None, text, several=True)


def _rendered(render: Render, content: Any) -> str:
    try:
        return render([{"role": "user", "content": content}])
    except Exception:
        return ""


def _inserted(plain: str, longer: str) -> str:
    """Return the text inserted into `plain` to make `longer`; '' if it was not one insertion."""
    if not plain or len(longer) <= len(plain):
        return ""
    start = common_prefix(plain, longer)
    stop = start + len(longer) - len(plain)
    return longer[start:stop] if longer[:start] + longer[stop:] == plain else ""


def _core(text: str, control: ControlTokens) -> str:
    found = [(text.find(token), text.rfind(token) + len(token)) for token in control.tokens]
    inside = [place for place in found if place[0] >= 0]
    return text[min(inside)[0] : max(stop for _, stop in inside)] if inside else ""

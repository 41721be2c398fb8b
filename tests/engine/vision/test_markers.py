"""The markers that templates of every style write for an image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import pytest
from tokenizers import AddedToken

from backend.engine.prompting.control_tokens import ControlTokens
from backend.engine.vision.media_prompts import Marker, learn

CONTROL = ControlTokens({
    at: AddedToken(text, special=True)
    for at, text in enumerate(("<|user|>", "<|end|>", "<img>", "<pad>", "</img>", "<n>"))
})  # fmt: skip
STRINGS_ONLY = "<|user|>{{ messages[0].content + '' }}<|end|>"
BOTH = (
    "<|user|>{% if messages[0].content is string %}{{ messages[0].content }}{% else %}"
    "{% for part in messages[0].content %}"
    "{% if part.type == 'image' %}MARK{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}<|end|>"
)
PARTS_ONLY = (
    "<|user|>{% for part in messages[0].content %}"
    "{% if part.type == 'image' %}<img><pad></img>{% elif part.type == 'text' %}{{ part.text }}"
    "{% endif %}{% endfor %}<|end|>"
)
NUMBERED = BOTH.replace("MARK", "<img>{{ loop.index }}</img>")


def learned(template: str, *fallbacks: str, ends: str = "") -> tuple[bool, Marker | None]:
    compiled = jinja2.Environment().from_string(template)

    def render(messages: Sequence[Mapping[str, Any]]) -> str:
        return compiled.render(messages=messages)

    form = learn(render, CONTROL, ("image",), {"image": fallbacks}, lambda kind, text: ends)
    return form.lists, form.markers.get("image")


@pytest.mark.parametrize("mark", ["<img><pad></img>", "<pad>", "Picture: <img><pad></img>\n"])
def test_a_template_that_writes_the_marker(mark: str) -> None:
    core = mark.removeprefix("Picture: ").strip()
    expected = Marker(core, core, {"type": "image"}, mark, several=True)
    assert learned(BOTH.replace("MARK", mark)) == (False, expected)


def test_a_template_that_takes_only_parts() -> None:
    lists, marker = learned(PARTS_ONLY)
    assert lists
    assert marker is not None
    assert marker.core == "<img><pad></img>"


def test_a_template_that_numbers_images_takes_one_image() -> None:
    marker = learned(NUMBERED)[1]
    assert marker is not None
    assert not marker.several


def test_a_template_of_plain_text_takes_the_marker_of_the_family() -> None:
    expected = Marker("<img>", "<img>", None, "<img>\n", several=True)
    assert learned(STRINGS_ONLY, "<img>\n") == (False, expected)


def test_a_marker_of_plain_text_is_replaced_by_control_tokens_around_it() -> None:
    expected = Marker("<img></img>", "[image]", None, "<img></img>", several=True)
    assert learned(STRINGS_ONLY, "[image]", ends="<img></img>") == (False, expected)
    assert learned(STRINGS_ONLY, "[image]") == (False, None)


def test_what_surrounds_a_control_string_in_the_place_of_a_marker_is_written_too() -> None:
    expected = Marker("<n>", "[image]\n", None, "<n>\n", several=True)
    assert learned(STRINGS_ONLY, "[image]\n", ends="<n>\n") == (False, expected)


def test_a_template_without_a_marker_for_images() -> None:
    assert learned(STRINGS_ONLY) == (False, None)

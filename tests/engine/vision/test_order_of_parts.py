"""The parts of a message reach the model in their order: text, image, text, image, text.

Every family that is served is compared, with templates that keep the order and that do not.

Covers: backend/engine/vision/media_prompts.py, backend/engine/vision/media_prompts.py
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from backend.engine.engine import Engine
from backend.engine.errors import InvalidRequest
from backend.engine.prompting.prompts import BuiltPrompt
from backend.engine.request import Attachments, ChatPrompt
from tests.engine.vision import test_families as compared
from tests.engine.vision.families import write_family
from tests.engine.vision.further_families import own_tokens, small_pyramid
from tests.engine.vision.ocr_families import small_tower
from tests.engine.vision.plain import AMONG_SIGNS, PlainPasses
from tests.engine.vision.recent_families import small_convolutions
from tests.engine.vision.seeing import (
    TINY_VISION,
    answer_to,
    asking,
    encoded,
    picture,
    seeing,
    shown,
    tone,
    turns,
)
from tests.long import TEST_LONG
from tests.models.tiny_media_eval import load

TEXTS = ["Before: ", "After: ", "What changed?"]
CONTENT = "".join(TEXTS)
PLACES = (0, len(TEXTS[0])), (0, len(TEXTS[0] + TEXTS[1]))
RED_BLUE = shown("red", "blue", image_messages=PLACES)
PICTURES = [picture("red", 0), picture("blue", 1)]
BARE = {"enable_thinking": False}
SAMPLE = ["qwen2_5_vl", "gemma3", "idefics3", "llava", "pixtral", "internvl_chat", "minicpmv4_6"]
SAMPLE += ["llama4", "dots_ocr"]
# Families whose prompts have one image, before all text, as they were trained.
IN_FRONT = ["molmo", "paligemma", "paligemma2"]
NOT_BOTH = [*compared._ONE_EACH, "got", "jina_vlm", "molmo2", "multi_modality"]
FAMILIES = [family for family in (*compared.FAMILIES, "minicpmo") if family not in IN_FRONT]
# Families whose processor reads two images, and writes all their tokens.
READ_BOTH = [family for family in compared.FAMILIES if family not in (*IN_FRONT, *NOT_BOTH)]
# mlx-vlm itself writes the parts of these in their order, with the template of the checkpoint.
KEPT = ["qwen2_5_vl", "gemma3", "idefics3", "pixtral"]
_IN_ORDER = "{%- for part in content -%}"
_IMAGES_FIRST = (
    "{%- for part in (content | selectattr('type', 'ne', 'text') | list)"
    " + (content | selectattr('type', 'equalto', 'text') | list) -%}"
)


def _build(engine: Engine, attachments: Attachments, *texts: str) -> BuiltPrompt:
    assert engine._served is not None
    prompt = ChatPrompt(turns(*(texts or (CONTENT,))), template_arguments=BARE)
    return engine._served.prompts.build(prompt, attachments)


def _around(engine: Engine, built: BuiltPrompt) -> list[str]:
    """The text before, between and after the items of a prompt."""
    assert engine._served is not None
    assert built.media is not None
    ends = [0, *(span.stop for span in built.media.spans)]
    starts = [*(span.start for span in built.media.spans), len(built.tokens)]
    read = engine._served.prompts.detokenize
    return [read(built.tokens[end:start]) for end, start in zip(ends, starts, strict=True)]


def _inputs(built: BuiltPrompt) -> list[bytes]:
    """What the encoder gets for each item; MiniCPM's digests depend on an item's number as well."""
    assert built.media is not None
    return [pickle.dumps(span.item.arrays) for span in built.media.spans]


def _hoisted(path: Path) -> Path:
    """Let the checkpoint's template write the images of a message before its texts."""
    template = path / "chat_template.jinja"
    if not template.exists():
        pytest.skip("this family has the template of `loading/chat_templates`")
    written = template.read_text()
    assert _IN_ORDER in written
    template.write_text(written.replace(_IN_ORDER, _IMAGES_FIRST))
    return path


def _require_order(texts: Sequence[str]) -> None:
    first, second, third = texts
    assert first.rstrip().endswith(TEXTS[0].rstrip())
    assert second.strip() == TEXTS[1].strip()
    assert third.lstrip().startswith(TEXTS[2])


@pytest.mark.parametrize("hoisted", [False, True])
@pytest.mark.parametrize("family", FAMILIES if TEST_LONG else SAMPLE)
async def test_images_are_between_the_texts(
    tmp_path: Path, family: str, hoisted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_convolutions(monkeypatch)
    small_tower(monkeypatch)
    small_pyramid(monkeypatch)
    path = write_family(tmp_path / family, family)
    own_tokens(path, monkeypatch)
    if hoisted:
        _hoisted(path)
    async with seeing(path, load_trial=False) as engine:
        built = _build(engine, RED_BLUE)
        _require_order(_around(engine, built))
        front = _build(engine, replace(RED_BLUE, image_messages=(0, 0)))
        assert _inputs(built) == _inputs(front) != _inputs(built)[::-1]
        _, between, after = _around(engine, front)
        assert not between.strip()
        assert CONTENT in after
        turned = _build(engine, replace(RED_BLUE, image_messages=PLACES[::-1]))
        assert _inputs(turned) == _inputs(front)[::-1]
        _require_order(_around(engine, turned))
        # An earlier message's images come first, wherever their texts are.
        later = replace(RED_BLUE, image_messages=((2, 4), (0, 3)))
        spread = _build(engine, later, "One more", "Yes.", CONTENT)
        assert _inputs(spread) == _inputs(front)[::-1]


@pytest.mark.parametrize("family", IN_FRONT if TEST_LONG else IN_FRONT[:2])
async def test_some_families_take_one_image_before_all_texts(tmp_path: Path, family: str) -> None:
    path = write_family(tmp_path / family, family)
    async with seeing(path, load_trial=False) as engine:
        before, after = _around(engine, _build(engine, shown("red", image_messages=((0, 8),))))
        assert not before.strip()
        assert CONTENT in after
        with pytest.raises(InvalidRequest, match="only one item: send one"):
            _build(engine, RED_BLUE)


@pytest.mark.parametrize("family", KEPT)
async def test_the_prompt_is_that_of_mlx_vlm(tmp_path: Path, family: str) -> None:
    from mlx_vlm.prompt_utils import apply_chat_template
    from mlx_vlm.utils import prepare_inputs, should_add_special_tokens

    path = write_family(tmp_path / family, family)
    model, processor = load(path)
    image: dict[str, str] = {"type": "image"}
    words = [{"type": "text", "text": text} for text in TEXTS]
    content = [words[0], image, words[1], image, words[2]]
    messages = [{"role": "user", "content": content}]
    text = apply_chat_template(processor, model.config, messages, num_images=2, **BARE)
    kind = model.config.model_type
    inputs = prepare_inputs(
        processor,
        images=PICTURES,
        prompts=text,
        image_token_index=getattr(model.config, "image_token_index", None),
        add_special_tokens=should_add_special_tokens(kind, processor),
    )
    async with seeing(path, load_trial=False) as engine:
        built = _build(engine, RED_BLUE)
    assert built.tokens == inputs["input_ids"].reshape(-1).tolist()


@pytest.mark.parametrize("family", READ_BOTH if TEST_LONG else SAMPLE)
async def test_the_prompt_is_that_of_the_processor(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processor of mlx-vlm reads the whole prompt at once, and this backend each item."""
    small_convolutions(monkeypatch)
    small_pyramid(monkeypatch)
    path = write_family(tmp_path / family, family)
    own_tokens(path, monkeypatch)
    plain = PlainPasses(path, compared._IN_TEXT.get(family, ""))
    words = [{"type": "text", "text": text} for text in TEXTS]
    image = {"type": "image"}
    content = [words[0], image, words[1], image, words[2]]
    inputs = plain._inputs([{"role": "user", "content": content}], PICTURES)
    async with seeing(path, load_trial=False) as engine:
        assert engine._served is not None
        built = engine._served.prompts.build(ChatPrompt(turns(CONTENT)), RED_BLUE)
    assert built.tokens == inputs["input_ids"].reshape(-1).tolist()


@pytest.mark.parametrize("family", ["qwen2_5_vl", "idefics3"])
async def test_an_answer_is_that_of_plain_passes_over_the_parts(
    tmp_path: Path, family: str
) -> None:
    path = write_family(tmp_path / family, family)
    plain = PlainPasses(path)
    words = [{"type": "text", "text": text} for text in TEXTS]
    image = {"type": "image"}
    messages = [{"role": "user", "content": [words[0], image, words[1], image, words[2]]}]
    async with seeing(path, prefill_chunk=16, load_trial=False) as engine:
        request = asking(ChatPrompt(turns(CONTENT)), RED_BLUE, sampling=AMONG_SIGNS)
        answer = await answer_to(engine, request)
        assert answer.prompt_tokens == plain.prompt_tokens(messages, PICTURES)
        assert answer.tokens == plain.chooses(messages, PICTURES, answer.tokens)


async def test_images_and_sounds_keep_their_order(tmp_path: Path) -> None:
    path = write_family(tmp_path / "omni", "qwen3_omni_moe")
    given = Attachments(
        (encoded(PICTURES[0]),),
        (tone(440), tone(880)),
        image_messages=((0, 0, 1),),
        audio_messages=((0, 0, 0), (0, 4)),
    )
    async with seeing(path, load_trial=False) as engine:
        built = _build(engine, given, "Now listen.")
        assert built.media is not None
        assert [span.item.kind for span in built.media.spans] == ["audio", "image", "audio"]
        assert _around(engine, built)[2].endswith("Now ")


async def test_markers_in_a_message_are_positions_if_the_request_gives_none() -> None:
    """LocalAI sends the texts of a message, and its media in other fields."""
    given = replace(RED_BLUE, image_messages=None)
    marked = "<__media__>".join(TEXTS)
    async with seeing() as engine:
        _require_order(_around(engine, _build(engine, given, marked)))
        built = _build(engine, given, "<__media__>Look.", "Yes.", "And <__media__>this?")
        assert [text[-5:] for text in _around(engine, built)[:2]] == ["user\n", "\nAnd "]
        one = _build(engine, shown("red"), marked)  # two markers for one image are text
        assert "<__media__>" in _around(engine, one)[1]
        quoted = _build(engine, RED_BLUE, CONTENT + "<__media__>")
        assert _around(engine, quoted)[2].startswith("What changed?<__media__>")


async def test_a_control_string_around_an_image_is_still_text() -> None:
    """Quoting it must not move the image, and the image must not join two halves of another."""
    content = "<|im_end|>a<|im_end|>"
    async with seeing() as engine:
        built = _build(engine, shown("red", image_messages=((0, 11),)), content)
        before, after = _around(engine, built)
        assert before.endswith("<|im_end|>a")
        assert after.startswith("<|im_end|>")
        ended = json.loads((TINY_VISION / "config.json").read_text())["eos_token_id"]
        assert built.tokens.count(ended) == 1


@pytest.mark.parametrize(
    ("position", "words"),
    [
        ((0, len(CONTENT) + 1), "names character 29"),
        ((0, -1), "names character -1"),
        ((1,), "not a user"),
    ],
)
async def test_a_position_outside_of_a_message_is_refused(position: Any, words: str) -> None:
    async with seeing() as engine:
        with pytest.raises(InvalidRequest, match=words):
            _build(engine, shown("red", image_messages=(position,)))

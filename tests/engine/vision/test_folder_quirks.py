"""Folders of vision models as people have them: what mlx-vlm loads loads here, and means the same.

Each quirk changes a small checkpoint. The reference is `mlx_vlm.load` of the same folder.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from backend.engine.errors import InvalidRequest, ModelRejected
from backend.engine.request import ChatPrompt, RawPrompt
from backend.engine.vision.media_prompts import PLACE
from tests.engine.folder_changes import (
    BOM,
    INDEX,
    Change,
    all_of,
    before,
    config,
    edit,
    files,
    put,
    read_json,
    snapshot,
    tokens,
    weights,
    without,
)
from tests.engine.loading_models import read_weights, write_weights
from tests.engine.vision.families import write_family
from tests.engine.vision.plain import AMONG_SIGNS, PlainPasses
from tests.engine.vision.seeing import TINY_VISION, answer_to, asking, picture, seeing, shown, turns

QUESTION = "What colour is the image?"
TEMPLATE = (TINY_VISION / "chat_template.jinja").read_text()


def of_part(part: str, **values: Any) -> Change:
    """Set values of a part of config.json; None removes one."""

    def change(path: Path) -> None:
        whole = read_json(path, "config.json")
        found = whole[part] | values
        whole[part] = {name: value for name, value in found.items() if value is not None}
        put("config.json", whole)(path)

    return change


def by_part(path: Path) -> None:
    """A file for each part, and no index."""
    held = read_weights(path)
    (path / "model.safetensors").unlink()
    seeing = {name for name in held if "visual" in name}
    for part, names in (("language", held.keys() - seeing), ("vision", seeing)):
        chosen = {name: held[name] for name in names}
        mx.save_safetensors(str(path / f"{part}.safetensors"), chosen)


def one_processor_file(path: Path) -> None:
    """As transformers 5 saves a processor."""
    images = read_json(path, "preprocessor_config.json")
    videos = read_json(path, "video_preprocessor_config.json")
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        (path / name).unlink()
    whole = {"image_processor": images, "video_processor": videos}
    put("processor_config.json", whole | {"processor_class": "Qwen3VLProcessor"})(path)


def renamed_token(old: str, new: str) -> Change:
    """Give a token another text in the tokenizer and the template."""

    def change(path: Path) -> None:
        for file in [*path.glob("*.json"), *path.glob("*.jinja")]:
            file.write_text(file.read_text().replace(old, new))

    return change


def indexed(*names: str) -> Change:
    """Files with these names, and an index of them."""

    def change(path: Path) -> None:
        held = sorted(read_weights(path))
        files(*names)(path)
        parts = {name: file for at, file in enumerate(names) for name in held[at :: len(names)]}
        put(INDEX, {"metadata": {}, "weight_map": parts})(path)

    return change


IMAGE_TOKEN = read_json(TINY_VISION, "config.json")["image_token_id"]
TEMPLATE_FILE, PROCESSOR = "chat_template.jinja", "Qwen3VLProcessor"
NAMED = [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": "tools"}]
QUIRKS: dict[str, Change] = {
    "nothing": lambda path: None,
    "no processor for videos": without("video_preprocessor_config.json"),
    "one file for the processor": one_processor_file,
    "a processor that names no class": without("preprocessor_config.json", "processor_class"),
    "a processor of no type": without("preprocessor_config.json", "image_processor_type"),
    "a fast processor of images": edit(
        "preprocessor_config.json", image_processor_type="Qwen2VLImageProcessorFast"
    ),
    "a processor with null values": edit(
        "preprocessor_config.json", crop_size=None, do_pad=None, device=None, unknown=1
    ),
    "the template in another file": all_of(
        without(TEMPLATE_FILE), put("chat_template.json", {"chat_template": TEMPLATE})
    ),
    "templates in a folder": put("additional_chat_templates/tool_use.jinja", "tools"),
    "another type of template": tokens(chat_template_type="gemma4", tool_parser_type="gone"),
    "the template in the tokenizer's file": all_of(
        without(TEMPLATE_FILE), tokens(chat_template=TEMPLATE)
    ),
    "the template in both": tokens(chat_template="old"),
    "null for the tokenizer's template": tokens(chat_template=None),
    "templates with names": all_of(without(TEMPLATE_FILE), tokens(chat_template=NAMED)),
    "files with odd names": files("model.00.safetensors", "model.01.safetensors"),
    "an index of odd names": indexed("a.safetensors", "b.safetensors"),
    "an index of usual names": indexed(
        "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    ),
    "an index that names a file too many": all_of(
        put(INDEX, {"weight_map": {"x": "model.safetensors", "mtp.y": "model-mtp.safetensors"}})
    ),
    "a broken index": put(INDEX, "{"),
    "an earlier name": files("weights.00.safetensors"),
    "a file for each part": by_part,
    "Mistral's weights beside": put("consolidated.safetensors", b"junk"),
    "a broken generation": put("generation_config.json", "{"),
    "a list of end tokens": put("generation_config.json", {"eos_token_id": [2, 0]}),
    "no generation": without("generation_config.json"),
    "null for the architectures": config(architectures=None),
    "null for a part": config(audio_config=None),
    "a type for each part": config(dtype={"text_config": "bfloat16"}, torch_dtype=None),
    "a tower without its type": of_part("vision_config", model_type=None),
    "a type of a part": of_part("text_config", dtype="bfloat16", torch_dtype="bfloat16"),
    "the hub's cache": snapshot,
    "PyTorch's weights beside": put("pytorch_model.bin", b"\x80"),
    "a large log": put("train.jsonl", b"{}\n" * 100),
    "a broken file that nothing reads": put("special_tokens_map.json", "{}"),
    "a tokenizer's fast class": tokens(tokenizer_class="Qwen2TokenizerFast"),
    "a tokenizer's processor": tokens(processor_class="Qwen3VLProcessor"),
}
# What mlx-vlm refuses, and should not.
MORE: dict[str, Change] = {
    **{
        f"a byte order mark in {name}": before(name, BOM)
        for name in ("config.json", "preprocessor_config.json", "tokenizer_config.json")
    },
    "the template in the processor's file": all_of(
        without(TEMPLATE_FILE),
        put("processor_config.json", {"chat_template": TEMPLATE, "processor_class": PROCESSOR}),
    ),
    "an adapter beside": all_of(
        put("adapters.safetensors", b"junk"), put("adapter_config.json", {"r": 8})
    ),
    "the image's token under another name": all_of(
        without("config.json", "image_token_id"), config(image_token_index=IMAGE_TOKEN)
    ),
    "left-over tables": weights(
        model__language_model__layers__0__self_attn__rotary_emb__inv_freq=mx.zeros(4),
        model__visual__position_ids=mx.zeros((1, 4), dtype=mx.int64),
    ),
    "another text of the image's token": renamed_token("<|image_pad|>", "<|picture|>"),
    "no token for the image": without("config.json", "image_token_id"),
    "a name with brackets": lambda path: path.rename(path.with_name("model [8bit]")),
    "named templates in another file": all_of(
        without(TEMPLATE_FILE), put("chat_template.json", {"chat_template": NAMED})
    ),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TINY_VISION, tmp_path / "model"))


@pytest.mark.parametrize("name", QUIRKS)
async def test_what_mlx_vlm_loads_is_loaded(name: str, folder: Path) -> None:
    path = QUIRKS[name](folder) or folder
    await require_same(path, PlainPasses(path))


@pytest.mark.parametrize("name", MORE)
async def test_what_other_programs_load_is_loaded(name: str, folder: Path) -> None:
    plain = PlainPasses(folder)
    await require_same(MORE[name](folder) or folder, plain)


@pytest.mark.parametrize("family", ["dots_ocr", "internvl", "kimi_vl", "nemotron_h_nano_omni"])
async def test_the_weights_of_the_text_part_are_enough(family: str, tmp_path: Path) -> None:
    path = write_family(tmp_path / family, family)
    held = read_weights(path)
    write_weights(path, {name: held[name] for name in held if name.startswith("language_model.")})
    plain = PlainPasses(path)
    async with seeing(path) as engine:
        answer = await answer_to(engine, asking(ChatPrompt(turns(QUESTION)), sampling=AMONG_SIGNS))
    messages = [{"role": "user", "content": QUESTION}]
    assert answer.tokens == plain.chooses(messages, [], answer.tokens)


@pytest.mark.parametrize("family", ["qwen3_vl_moe", "gemma3n"])
async def test_a_text_part_that_mlx_lm_cannot_read_is_refused(family: str, tmp_path: Path) -> None:
    path = write_family(tmp_path / family, family)
    held = read_weights(path)
    write_weights(path, {name: held[name] for name in held if name.startswith("language_model.")})
    sentence = "only its text part is loaded, whose weights have a form that cannot be read: use a"
    with pytest.raises(ModelRejected, match=sentence):
        async with seeing(path):
            pass


async def test_without_a_template_raw_prompts_are_answered(folder: Path) -> None:
    request = asking(RawPrompt(f"{PLACE}{QUESTION}"), shown("red"), max_tokens=6)
    answers = []
    for change in (lambda _: None, without(TEMPLATE_FILE)):
        change(folder)
        async with seeing(folder) as engine:
            answers.append(await answer_to(engine, request))
    assert answers[0].tokens == answers[1].tokens
    assert answers[0].prompt_tokens == answers[1].prompt_tokens
    async with seeing(folder) as engine:
        with pytest.raises(InvalidRequest, match="it has no chat template; send Prompt"):
            await answer_to(engine, asking(QUESTION, shown("red")))


async def require_same(path: Path, plain: PlainPasses) -> None:
    """Require the answer about an image that mlx-vlm's own passes give."""
    request = asking(ChatPrompt(turns(QUESTION)), shown("red"), max_tokens=6, sampling=AMONG_SIGNS)
    async with seeing(path, load_trial=False) as engine:
        answer = await answer_to(engine, request)
    messages = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]}
    ]
    pictures = [picture("red")]
    assert answer.prompt_tokens == plain.prompt_tokens(messages, pictures)
    assert answer.tokens == plain.chooses(messages, pictures, answer.tokens)

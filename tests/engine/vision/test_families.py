"""Families that differ in positions, windows, recurrent state and tiles, against plain passes.

The reference is a model's plain passes over whole sequences, with no cache. An answer of these
models changes if attention does not see the earlier tokens.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from PIL import Image
from transformers import AutoTokenizer

from backend.engine.caching import kv
from backend.engine.disk_cache.use import DiskUse
from backend.engine.engine import Engine
from backend.engine.errors import InvalidRequest, ModelRejected
from backend.engine.loading.architectures import aliases
from backend.engine.loading.serving_trial import SEEING_ON_CPU, ServingTrial, Verdict
from backend.engine.loading.stages import Stages
from backend.engine.loading.weights import mlx_lm_classes
from backend.engine.model import EngineModel
from backend.engine.request import (
    Attachments,
    ChatPrompt,
    GenerationRequest,
    RawPrompt,
    Sampling,
    TokenPrompt,
)
from backend.engine.vision.processor import load_processor
from backend.engine.vision.vision_builder import _open_multimodal_model
from tests.engine.vision.checkpoint_files import begin_with
from tests.engine.vision.families import write_family
from tests.engine.vision.further_families import own_tokens, small_pyramid
from tests.engine.vision.ocr_families import small_tower
from tests.engine.vision.plain import AMONG_SIGNS, SIGNS, Message, PlainPasses
from tests.engine.vision.recent_families import small_convolutions
from tests.engine.vision.seeing import (
    answer_to,
    asking,
    encoded,
    picture,
    samples_of,
    seeing,
    shown,
    tone,
    turns,
)
from tests.long import TEST_LONG

TOKENS = 48
CLOSE = 1e-4  # log-probabilities in another order of summation
# Positions in three dimensions, recurrent state, windows, tiles, latent attention, a plain marker.
# Each has another form of positions, features or windows.
SAMPLE = ["qwen2_5_vl", "qwen3_5", "gemma3", "idefics3", "mistral4", "internvl_chat"]
SAMPLE += ["qwen3_omni_moe"]
FAMILIES = [
    *SAMPLE,
    "qwen3_5_moe",
    "minicpmv4_6",
    "minicpmv4_7",
    "smolvlm",
    "ministral3",
    "minimax_m3_vl",
    "paddleocr_vl",
    "kimi_vl",
    "aya_vision",
    "dots_ocr",
    "glm4v",
    "glm_ocr",
    "lfm2_vl",
    "llava",
    "llava_bunny",
    "llava_onevision",
    "pixtral",
    "qwen2_vl",
    "qwen3_vl_moe",
    "deepseek_vl_v2",
    "deepseekocr",
    "fastvlm",
    "gemma3n",
    "gemma4",
    "gemma4_moe",
    "gemma4_unified",
    "glm4v_moe",
    "granite4_vision",
    "kimi_k25",
    "llama4",
    "ernie4_5_moe_vl",
    "idefics2",
    "got",
    "paligemma",
    "paligemma2",
    "hunyuan_vl",
    "molmo",
    "molmo2",
    "multi_modality",
    "cohere_compass",
    "glm5_next",
    "inkling",
    "internvl",
    "indic_ocr",
    "jina_vlm",
    "kimi_k3",
    "locateanything",
    "mage_vl",
    "mimo_v2",
    "muse_glimmer",
    "nemotron_h_nano_omni",
    "qwen4_exp",
    "step3p7",
    "unlimited_ocr",
    "zaya1_vl",
]
HEARING = ["qwen3_omni_moe", "inkling", "gemma3n"]
_IN_TEXT = dict.fromkeys(("internvl_chat", "llava_bunny", "fastvlm"), "<image>\n")
_IN_TEXT |= {"multi_modality": "<image>", "locateanything": "<image-1>"}
# mlx-vlm itself fails on two images, forgets one, or puts it a token too late.
_ONE_EACH = ["llava_bunny", "paddleocr_vl", "fastvlm", "granite4_vision"]
_ONE_EACH += [
    "unlimited_ocr",
    "deepseekocr",
    "multi_modality",
    "step3p7",
    "molmo",
    "hunyuan_vl",
    "jina_vlm",
    "got",
    "paligemma",
    "paligemma2",
]
# An image has 258 to 729 tokens, so an answer's own few tokens hardly affect what comes next.
_LARGE = ["llava_bunny", "got", "molmo2", "jina_vlm", "deepseekocr", "unlimited_ocr"]
# What a token attends to depends on where the prompt ended, so nothing is stored.
_NOT_STORED = ["unlimited_ocr", "paligemma", "paligemma2"]
_QUESTION, _NEXT = "What colours are the images?", "And then?"


class _Dialogue:
    """Questions and answers, and the pictures in the first question."""

    def __init__(self, texts: Sequence[str], colours: Sequence[str] = ()) -> None:
        self.texts, self.colours = tuple(texts), tuple(colours)

    def then(self, answer: str) -> _Dialogue:
        return _Dialogue((*self.texts, answer, _NEXT), self.colours)

    def request(self, tokens: int = TOKENS, **fields: Any) -> GenerationRequest:
        attachments = shown(*self.colours, image_messages=(0,) * len(self.colours))
        prompt = ChatPrompt(turns(*self.texts))
        fields = {"max_tokens": tokens, "sampling": AMONG_SIGNS} | fields
        return asking(prompt, attachments if self.colours else None, **fields)

    @property
    def plain(self) -> tuple[Sequence[Message], Sequence[Any]]:
        """The messages and pictures of this question, as mlx-vlm takes them."""
        first, *others = turns(*self.texts)
        words = {"type": "text", "text": first["content"]}
        content = [*({"type": "image"} for _ in self.colours), words]
        pictures = [picture(colour, seed) for seed, colour in enumerate(self.colours)]
        return [{"role": "user", "content": content}, *others], pictures


_TEXT = _Dialogue(["Count to 30."])
_ONE = _Dialogue([_QUESTION], ["red"])
_TWO = _Dialogue([_QUESTION], ["blue", "green"])


@pytest.mark.parametrize("family", FAMILIES if TEST_LONG else SAMPLE)
async def test_a_family_chooses_what_its_plain_passes_choose(
    tmp_path: Path,
    family: str,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    small_convolutions(monkeypatch)
    small_tower(monkeypatch)
    small_pyramid(monkeypatch)
    path = write_family(tmp_path / family, family)
    own_tokens(path, monkeypatch)
    model_type = json.loads((path / "config.json").read_text())["model_type"].lower()
    model_type = aliases("mlx_vlm").get(model_type, model_type)
    run, ways = ServingTrial.run, list[str]()

    def recorded(self: ServingTrial, model: EngineModel) -> Stages[Verdict]:
        verdict = yield from run(self, model)
        ways.append(verdict.way)
        return verdict

    monkeypatch.setattr(ServingTrial, "run", recorded)
    plain = PlainPasses(path, _IN_TEXT.get(family, ""))
    first = [_TEXT, _ONE, *([_TWO] if family not in _ONE_EACH else [])]
    async with seeing(path, prefill_chunk=16, load_trial=True) as engine:
        asked = [await answer_to(engine, one.request()) for one in first]
        second = [one.then(answer.text) for one, answer in zip(first, asked, strict=True)]
        continued = [await answer_to(engine, one.request()) for one in second]
    (way,) = ways
    record_property("model_type", model_type)
    record_property("way", way)
    if not TEST_LONG:  # `make test-models` makes the table
        assert SEEING_ON_CPU[model_type] == way
    async with seeing(path, prefill_chunk=16) as engine:
        together = [*await asyncio.gather(*(answer_to(engine, one.request()) for one in first))]
        together += await asyncio.gather(*(answer_to(engine, one.request()) for one in second))
    for one, answer, in_batch in zip(
        [*first, *second], [*asked, *continued], together, strict=True
    ):
        messages, images = one.plain
        assert answer.prompt_tokens == plain.prompt_tokens(messages, images)
        for tokens in {answer.tokens, in_batch.tokens}:
            assert len(tokens) == TOKENS
            assert tokens == plain.chooses(messages, images, tokens)
        if family not in _LARGE or not images:
            assert not plain.forgets(messages, images, answer.tokens), "it would hide a fault"
    for before, answer in zip(asked, continued, strict=True):
        stored = 0 if family in _NOT_STORED else before.prompt_tokens + TOKENS - 1
        assert answer.cached_tokens >= stored


_UNEQUAL = r"its image features include \d+ embeddings for \d+ tokens"
_WITHOUT = "its image processor cannot be built here"


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("llava_next", _UNEQUAL),
        ("granite_vision", _UNEQUAL),
        ("mistral_large3", "cannot be built here: it needs PyTorch, .*; serve"),
        ("llmjpvl", "Python code of its checkpoint, which runs only if .* trust_remote_code"),
        ("phi4_siglip", _WITHOUT),
        ("youtu_vl", _WITHOUT),
    ],
)
async def test_a_family_that_mlx_vlm_cannot_run_is_refused(
    tmp_path: Path,
    family: str,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    path = write_family(tmp_path / family, family)
    opened: list[object] = []
    open_tokenizer = AutoTokenizer.from_pretrained

    def noted(*arguments: object, **named: object) -> object:
        opened.append(arguments)
        return open_tokenizer(*arguments, **named)

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", noted)
    with pytest.raises(ModelRejected, match=reason) as refused:
        async with seeing(path):
            pass
    # Phi-4's processor opens itself, until Python's stack is full.
    assert len(opened) < 100
    record_property("refused", str(refused.value))


async def test_the_tokens_of_an_image_see_each_other(tmp_path: Path) -> None:
    path = write_family(tmp_path / "gemma4_moe", "gemma4_moe")
    plain = PlainPasses(path)
    async with seeing(path, prefill_chunk=16) as engine:
        answer = await answer_to(engine, _TWO.request(12))
    assert answer.tokens == plain.chooses(*_TWO.plain, answer.tokens)


async def test_the_whole_of_a_tiled_image_comes_after_its_tiles(tmp_path: Path) -> None:
    """mlx-vlm's processor omits the whole image, and its model then reads beyond the features."""
    path = write_family(tmp_path / "llama4", "llama4")
    processor = load_processor(path, trust_remote_code=False)
    wide = picture("red").resize((300, 40))
    inputs = processor(images=[wide], text="<|image|>")
    tiles = list(inputs["pixel_values"])
    marks = list(np.array(inputs["input_ids"]).reshape(-1))
    patch = processor.tokenizer.convert_tokens_to_ids("<|patch|>")
    assert len(tiles) == 3
    assert marks.count(patch) == len(tiles) * 4
    small = wide.resize(tiles[0].shape[1:], Image.Resampling.BICUBIC)
    assert np.allclose(
        np.array(tiles[2]), np.array(small).transpose(2, 0, 1) / 127.5 - 1, atol=0.01
    )
    plain = PlainPasses(path)
    messages, _ = _ONE.plain
    given = Attachments((encoded(wide),))
    request = asking(ChatPrompt(turns(_QUESTION)), given, max_tokens=12, sampling=AMONG_SIGNS)
    async with seeing(path, prefill_chunk=16) as engine:
        answer = await answer_to(engine, request)
    assert answer.prompt_tokens == plain.prompt_tokens(messages, [wide])
    assert answer.tokens == plain.chooses(messages, [wide], answer.tokens)


async def test_a_value_that_only_transformers_refuses_changes_nothing(tmp_path: Path) -> None:
    """Llama 4 was published with a number where transformers wants true or false."""
    answers = []
    for value in (True, 4):
        path = write_family(tmp_path / str(value), "llama4")
        config = json.loads((path / "config.json").read_text())
        config["text_config"]["attn_temperature_tuning"] = value
        (path / "config.json").write_text(json.dumps(config))
        async with seeing(path) as engine:
            answers.append(await answer_to(engine, _TWO.request(12)))
    assert answers[0] == answers[1]
    assert answers[0].prompt_tokens > 16  # the tokens of images count too


async def test_images_are_not_tiled_if_they_are_many(tmp_path: Path) -> None:
    path = write_family(tmp_path / "deepseek_vl_v2", "deepseek_vl_v2")
    plain = PlainPasses(path)
    async with seeing(path) as engine:
        for colours in (["red"], ["red", "blue", "green"]):
            one = _Dialogue([_QUESTION], colours)
            answer = await answer_to(engine, one.request(12))
            messages, images = one.plain
            assert answer.prompt_tokens == plain.prompt_tokens(messages, images)
            assert answer.tokens == plain.chooses(messages, images, answer.tokens)


@pytest.mark.parametrize("family", ["idefics3", "pixtral"])
async def test_a_bos_token_begins_prompts_and_is_in_no_image(tmp_path: Path, family: str) -> None:
    path = write_family(tmp_path / family, family)
    begin_with(path, "<tool_call>")
    plain = PlainPasses(path)
    async with seeing(path) as engine:
        for one in (_ONE, _TWO):
            answer = await answer_to(engine, one.request(12))
            messages, images = one.plain
            assert answer.prompt_tokens == plain.prompt_tokens(messages, images)
            assert answer.tokens == plain.chooses(messages, images, answer.tokens)


async def test_a_row_is_right_after_others_have_left(tmp_path: Path) -> None:
    path = write_family(tmp_path / "qwen3_5", "qwen3_5")

    async def stay_a_moment(engine: Engine) -> None:
        async with engine.submit(_TWO.request()) as generation:
            await anext(aiter(generation))

    async with seeing(path) as engine:
        answer, *_ = await asyncio.gather(
            answer_to(engine, _TEXT.request()),
            answer_to(engine, _ONE.request(7)),
            answer_to(engine, _TWO.request(20)),
            stay_a_moment(engine),
        )
    assert len(answer.tokens) == TOKENS
    assert answer.tokens == PlainPasses(path).chooses(*_TEXT.plain, answer.tokens)


@pytest.mark.parametrize("family", ["qwen3_vl_moe", "qwen3_omni_moe"][: 2 if TEST_LONG else 1])
async def test_shorter_rows_are_right_after_the_longest_has_left(
    tmp_path: Path, family: str
) -> None:
    """The batch keeps its width for some steps."""
    path = write_family(tmp_path / family, family)
    shorter = [_Dialogue([text]) for text in ("Count to 30.", "Say A.", "Hello.", "Why?")]
    async with seeing(path) as engine:
        _, *answers = await asyncio.gather(
            answer_to(engine, _Dialogue(["A long question. " * 6]).request(6)),
            *(answer_to(engine, one.request(24)) for one in shorter),
        )
    plain = PlainPasses(path)
    for one, answer in zip(shorter, answers, strict=True):
        assert len(answer.tokens) == 24
        assert answer.tokens == plain.chooses(*one.plain, answer.tokens)


async def test_a_later_prompt_starts_from_what_one_row_stored_on_disk(tmp_path: Path) -> None:
    path = write_family(tmp_path / "qwen3_5", "qwen3_5")
    kept = {"prompt_cache_dir": str(tmp_path / "kept")}
    async with seeing(path, **kept) as engine:
        first = await answer_to(engine, _TEXT.request(disk=DiskUse(answer=True)))
        await engine.free()
    second = _TEXT.then(first.text)
    async with seeing(path, prompt_cache_mib=0, **kept) as engine:
        answer = await answer_to(engine, second.request())
    assert answer.cached_tokens >= TOKENS
    assert answer.tokens == PlainPasses(path).chooses(*second.plain, answer.tokens)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
async def test_the_text_part_alone_gives_the_same_answer(tmp_path: Path, family: str) -> None:
    path = write_family(tmp_path / family, family)
    async with seeing(path, type="text") as engine:
        assert not engine.require_model().media
        answer = await answer_to(engine, _TEXT.request())
    assert answer.tokens == PlainPasses(path).chooses(*_TEXT.plain, answer.tokens)


@pytest.mark.parametrize("family", ["cohere2_moe", "deepseek_v4"])
async def test_a_text_model_that_only_mlx_vlm_has_is_served(tmp_path: Path, family: str) -> None:
    from mlx_vlm.models.cache import make_prompt_cache
    from mlx_vlm.utils import load_model

    path = write_family(tmp_path / family, family)
    prompts = [tuple(range(20 + count, 20 + 3 * count)) for count in (5, 14, 9)]
    requests = [
        asking(TokenPrompt(one), max_tokens=TOKENS, sampling=AMONG_SIGNS) for one in prompts
    ]
    async with seeing(path) as engine:
        assert not engine.require_model().media
        alone = [await answer_to(engine, request) for request in requests]
    async with seeing(path) as engine:
        together = await asyncio.gather(*(answer_to(engine, request) for request in requests))
    language = load_model(path).language_model
    for prompt, *answers in zip(prompts, alone, together, strict=True):
        for answer in answers:
            assert len(answer.tokens) == TOKENS
            whole = mx.array([[*prompt, *answer.tokens[:-1]]])
            # Without a cache, DeepSeek-V4's tokens see windows of later ones.
            logits = language(whole, cache=make_prompt_cache(language)).logits[0]
            among = np.array(logits[len(prompt) - 1 :])[:, SIGNS]
            chosen = among[np.arange(TOKENS), [SIGNS.index(one) for one in answer.tokens]]
            assert (among.max(axis=1) - chosen < CLOSE).all()


async def test_end_tokens_of_the_processor_end_an_answer_too(tmp_path: Path) -> None:
    path = write_family(tmp_path / "idefics3", "idefics3")
    added = json.loads((path / "tokenizer.json").read_text())["added_tokens"]
    ids = {token["content"]: token["id"] for token in added}
    turn_over = Sampling(temperature=0, logit_bias=((ids["<end_of_utterance>"], 100.0),))
    async with seeing(path) as engine:
        answer = await answer_to(engine, _ONE.request(5, sampling=turn_over))
    assert answer.text == ""


@pytest.mark.parametrize("family", HEARING if TEST_LONG else HEARING[:1])
async def test_an_answer_about_a_sound_equals_the_plain_passes(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_pyramid(monkeypatch)
    path = write_family(tmp_path / family, family)
    listening: Sequence[Message] = [
        {"role": "user", "content": [{"type": "audio"}, {"type": "text", "text": _QUESTION}]}
    ]
    plain = {pitch: PlainPasses(path, sound=samples_of(pitch)) for pitch in (220, 2000)}
    requests = {
        pitch: asking(
            ChatPrompt(turns(_QUESTION)),
            Attachments(audios=(tone(pitch),)),
            max_tokens=TOKENS,
            sampling=AMONG_SIGNS,
        )
        for pitch in plain
    }
    async with seeing(path, prefill_chunk=16) as engine:
        alone = [await answer_to(engine, request) for request in requests.values()]
    async with seeing(path, prefill_chunk=16) as engine:
        together = await asyncio.gather(*(answer_to(engine, one) for one in requests.values()))
    for passes, *answers in zip(plain.values(), alone, together, strict=True):
        for answer in answers:
            assert len(answer.tokens) == TOKENS
            assert answer.prompt_tokens == passes.prompt_tokens(listening, [])
            assert answer.tokens == passes.chooses(listening, [], answer.tokens)
    assert alone[0].tokens != alone[1].tokens


async def test_sounds_images_and_texts_share_a_batch(tmp_path: Path) -> None:
    path = write_family(tmp_path / "minicpmo", "minicpmo")
    sounds = [tone(220), tone(2000)]
    requests = [
        asking("What is it?", Attachments(audios=(sounds[0],)), max_tokens=TOKENS),
        asking("What is it?", Attachments(audios=(sounds[1],)), max_tokens=TOKENS),
        asking("What is it?", Attachments(audios=(sounds[1], sounds[0])), max_tokens=TOKENS),
        asking("What is it?", shown("red"), max_tokens=TOKENS),
        asking("What is it?", Attachments(shown("red").images, (sounds[0],)), max_tokens=TOKENS),
        asking("What is it?", max_tokens=TOKENS),
    ]
    async with seeing(path, prompt_cache_mib=0, vision_cache_mib=0) as engine:
        assert engine.require_model().media == {"image", "video", "audio"}
        alone = [await answer_to(engine, request) for request in requests]
        assert alone[0].prompt_tokens == alone[1].prompt_tokens
        listening = sorted(sum(answer.logprobs) for answer in alone)
        assert min(b - a for a, b in itertools.pairwise(listening)) > 10 * CLOSE
        together = await asyncio.gather(*(answer_to(engine, request) for request in requests))
        for first, second in zip(alone, together, strict=True):
            assert second.logprobs == pytest.approx(first.logprobs, abs=CLOSE)
    async with seeing(path) as engine:
        for _ in range(2):
            again = [await answer_to(engine, request) for request in requests]
            for first, second in zip(alone, again, strict=True):
                assert second.logprobs == pytest.approx(first.logprobs, abs=CLOSE)
        assert again[1].cached_tokens == again[1].prompt_tokens - 1


@pytest.mark.skipif(not TEST_LONG, reason="part of make test-long")
async def test_an_image_of_any_turn_stands_before_the_prompt_where_the_processor_puts_it(
    tmp_path: Path,
) -> None:
    path = write_family(tmp_path / "molmo", "molmo")
    texts = ["Hello.", "Good day.", _QUESTION]
    messages, images = [*turns(*texts)], [picture("red")]
    plain = PlainPasses(path)
    async with seeing(path, prefill_chunk=16) as engine:
        later = asking(ChatPrompt(turns(*texts)), shown("red"), sampling=AMONG_SIGNS)
        raw = asking(RawPrompt(f"Look: <__media__>{_QUESTION}"), shown("red"))
        two = asking(ChatPrompt(turns(_QUESTION)), shown("red", "blue"))
        answer = await answer_to(engine, later)
        assert answer.prompt_tokens == plain.prompt_tokens(messages, images)
        assert answer.tokens == plain.chooses(messages, images, answer.tokens)
        assert (await answer_to(engine, raw)).tokens
        with pytest.raises(InvalidRequest, match="accepts only one item: send one"):
            await answer_to(engine, two)


def test_each_group_of_heads_attends_to_its_own_blocks(tmp_path: Path) -> None:
    """MiniMax M3 computes what mlx-lm and transformers compute, also in steps after a long text."""
    from mlx_lm.utils import load_model

    path = write_family(tmp_path / "m3", "minimax_m3_vl")
    tokens = [30 + (7 * at * at + at) % 90 for at in range(1560)]
    answers = []
    for model, _ in (
        _open_multimodal_model(path),
        load_model(path, get_model_classes=mlx_lm_classes),
    ):
        row = kv.new_row(model)
        read = model(mx.array([tokens[:-4]]), cache=row)[:, ::97]
        steps = [model(mx.array([[token]]), cache=row) for token in tokens[-4:]]
        answers.append(mx.concatenate([read, *steps], axis=1))
    with_images, text_alone = answers
    assert mx.allclose(with_images, text_alone, atol=1e-4)

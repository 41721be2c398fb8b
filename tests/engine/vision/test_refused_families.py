"""Defects in mlx-vlm 0.7.10's own code for which some families are refused.

If one of these tests fails, mlx-vlm has fixed the defect, and the family can be tried again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from backend.engine.vision.processor import load_processor
from tests.architectures.shapes import configuration
from tests.engine.vision.families import write_family
from tests.engine.vision.ocr_families import small_tower
from tests.engine.vision.seeing import picture


def test_deepseek_ocr_loses_the_last_token_of_a_prompt_with_an_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlx_vlm.utils import prepare_inputs

    small_tower(monkeypatch)
    path = write_family(tmp_path / "deepseekocr", "deepseekocr")
    processor = load_processor(path, trust_remote_code=False)
    inputs = prepare_inputs(processor, images=[picture("red")], prompts="<image>\nGo 42")
    whole = processor.tokenizer.encode("\nGo 42", add_special_tokens=False)
    assert inputs["input_ids"][0].tolist()[-len(whole) + 1 :] == whole[:-1]


def test_unlimited_ocr_continues_differently_from_stored_kv(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlx_vlm.utils import load_model

    small_tower(monkeypatch)
    path = write_family(tmp_path / "unlimited_ocr", "unlimited_ocr")
    language = load_model(path).language_model
    prompt, answer, following = range(20, 60), range(60, 100), range(100, 110)
    stored = language.make_cache()
    language(mx.array([[*prompt]]), cache=stored)
    for token in answer:
        language(mx.array([[token]]), cache=stored)
    from_stored = language(mx.array([[*following]]), cache=stored).logits[0, -1]
    whole = mx.array([[*prompt, *answer, *following]])
    afresh = language(whole, cache=language.make_cache()).logits[0, -1]
    assert not mx.allclose(from_stored, afresh, atol=0.1)


def test_deepseek_v4_answers_otherwise_than_it_reads() -> None:
    """Its compressed KV is another after steps of one token than after one pass."""
    from mlx_vlm.models import deepseek_v4

    small = {
        "num_hidden_layers": 2,
        "vocab_size": 128,
        "hidden_size": 64,
        "moe_intermediate_size": 32,
        "num_attention_heads": 4,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "head_dim": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "compress_ratios": [0, 4],
        "hc_mult": 2,
        "num_hash_layers": 0,
        "sliding_window": 128,
        "o_groups": 2,
        "o_lora_rank": 32,
        "index_n_heads": 2,
        "index_head_dim": 32,
    }
    mx.random.seed(7)
    language = deepseek_v4.Model(deepseek_v4.ModelConfig.from_dict(small)).language_model
    tokens = list(range(20, 60))
    whole = language(mx.array([tokens]), cache=language.make_cache()).logits[0]
    stored = language.make_cache()
    steps = [language(mx.array([[token]]), cache=stored).logits[0] for token in tokens]
    assert not mx.allclose(mx.concatenate(steps), whole, atol=0.01)


def test_gemma3n_scales_answers_but_not_prompts() -> None:
    from mlx_vlm.models import gemma3n

    text: dict[str, Any] = configuration("gemma3n")["text_config"]
    text["intermediate_size"] = [text["intermediate_size"]] * text["num_hidden_layers"]
    model = gemma3n.Model(
        gemma3n.ModelConfig(
            text_config=gemma3n.TextConfig.from_dict(text),
            vision_config=gemma3n.VisionConfig(),
            audio_config=gemma3n.AudioConfig(),
            model_type="gemma3n",
        )
    )
    tokens = mx.array([[5, 9, 33, 7, 61, 20, 44]])
    as_answer = model.language_model(tokens).logits
    given = model.get_input_embeddings(tokens).to_dict()
    as_prompt = model.language_model(
        tokens, **{name: value for name, value in given.items() if value is not None}
    ).logits
    assert not mx.allclose(as_answer, as_prompt, atol=0.1)

"""Why some families of mlx-vlm 0.7.10 are refused, or served without stored KV.

If one of these tests fails, mlx-vlm has fixed the defect, and the family can be tried again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import KVCache

from backend.engine.engine import Engine
from backend.engine.errors import InvalidRequest
from backend.engine.load_request import LoadRequest
from tests.engine.vision.families import write_family
from tests.engine.vision.ocr_families import small_tower
from tests.engine.vision.seeing import TINY_VISION, picture

_SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def _caches() -> list[Any]:
    return [KVCache() for _ in range(_SMALL["num_hidden_layers"])]


def _drawn(network: Any) -> Any:
    """The network with random weights, large enough that each layer changes the result."""
    mx.random.seed(7)
    parameters: Any = tree_flatten(network.parameters())
    network.update(tree_unflatten([
        (name, mx.random.normal(value.shape) * (1.5 / value.shape[-1] ** 0.5))
        if value.ndim > 1
        else (name, mx.full(value.shape, 0.5) if "gate" in name else value)
        for name, value in parameters
    ]))  # fmt: skip
    return network


def test_phi3_v_loses_the_token_after_an_image() -> None:
    from mlx_vlm.models.phi3_v.processing_phi3_v import Phi3VImageProcessor, Phi3VProcessor
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(TINY_VISION)
    processor: Any = Phi3VProcessor(Phi3VImageProcessor(num_crops=1), tokenizer)
    (tokens,) = processor(images=[picture("red")], text="<|image_1|>Go 42")["input_ids"].tolist()
    rest = tokenizer.encode("Go 42", add_special_tokens=False)
    assert [token for token in tokens if token >= 0] == rest[1:]


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


async def test_drafting_with_unlimited_ocr_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_tower(monkeypatch)
    path = write_family(tmp_path / "unlimited_ocr", "unlimited_ocr")
    engine = Engine()
    engine.start()
    try:
        with pytest.raises(InvalidRequest, match="option prompt_lookup is true, but model"):
            await engine.load(LoadRequest("ocr", str(path), settings={"prompt_lookup": True}))
    finally:
        await engine.stop(10)


def test_mllama_decodes_differently_than_it_prefills() -> None:
    from mlx_vlm.models import mllama

    language = _drawn(mllama.LanguageModel(mllama.TextConfig.from_dict({
        **_SMALL, "model_type": "mllama", "cross_attention_layers": [1], "rope_scaling": None
    })))  # fmt: skip
    tokens = [*range(20, 60)]
    whole = language(mx.array([tokens]), cache=_caches()).logits[0]
    otherwise = language(mx.array([[*tokens[:-1], 99]]), cache=_caches()).logits[0]
    assert not mx.allclose(whole[:-1], otherwise[:-1], atol=0.1)  # it sees a later token
    image = mx.random.normal((1, 20, _SMALL["hidden_size"]))
    seen = mx.where(mx.arange(20) < 10, 0.0, -1e9)[None, None, None]  # the rest are padding
    masks = {
        "cross_attention_mask": mx.broadcast_to(seen, (1, 1, len(tokens), 20)),
        "full_text_row_masked_out_mask": mx.ones((1, 1, len(tokens), 1)),
    }
    shown: dict[str, Any] = {"cross_attention_states": image}
    whole = language(mx.array([tokens]), cache=_caches(), **shown, **masks).logits[0]
    stored = _caches()
    prompt = {name: mask[:, :, :-1] for name, mask in masks.items()}
    language(mx.array([tokens[:-1]]), cache=stored, **shown, **prompt)
    answer = language(mx.array([tokens[-1:]]), cache=stored, **shown).logits[0]
    assert not mx.allclose(answer[-1], whole[-1], atol=0.1)


def test_paligemma_reads_a_prompt_by_what_follows() -> None:
    from mlx_vlm.models import paligemma

    language = _drawn(paligemma.LanguageModel(paligemma.TextConfig.from_dict({
        **_SMALL, "model_type": "gemma", "head_dim": 16, "use_bidirectional_attention": True
    })))  # fmt: skip
    whole, part = _caches(), _caches()
    language(mx.array([[*range(20, 60)]]), cache=whole)
    language(mx.array([[*range(20, 50)]]), cache=part)
    assert not mx.allclose(whole[-1].keys[:, :, :30], part[-1].keys[:, :, :30], atol=0.1)


def test_moondream_generates_without_the_attention_within_an_image() -> None:
    from mlx_vlm.models import moondream2

    tower = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    tower |= {"num_attention_heads": 2, "proj_inner_dim": 64, "proj_out_dim": 64}
    text = {**_SMALL, "num_key_value_heads": 4}
    model = _drawn(moondream2.Model(moondream2.ModelConfig(text, tower)))
    tokens = mx.array([[0] * 730 + [*range(20, 40)]])
    shown: dict[str, Any] = {"pixel_values": mx.random.normal((1, 378, 378, 3))}
    shown |= {"num_crops": [1], "crop_layouts": [(1, 1)]}
    own = model(tokens, **shown).logits[0, -1]
    given = model.get_input_embeddings(tokens, **shown).to_dict()
    generated = model.language_model(
        tokens, **{name: value for name, value in given.items() if value is not None}
    ).logits[0, -1]
    assert not mx.allclose(own, generated, atol=0.01)


def test_some_processors_write_a_whole_prompt_around_an_image() -> None:
    from mlx_vlm.models.falcon_ocr.processing_falcon_ocr import make_ocr_prompt
    from mlx_vlm.models.plamo2vl.processing import _apply_ja01_template

    assert make_ocr_prompt("Read it.") == make_ocr_prompt("Who wrote it?")
    assert _apply_ja01_template("<plamo:image>", "Read it.").endswith("Read it.\n\n### 応答:\n")

"""What the files of sentence-transformers say: prompts, lengths, end tokens, scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backend.engine.embedding.readers import TextReader
from backend.engine.errors import InvalidRequest, ModelRejected, TooLong
from tests.engine.embedding import tiny_checkpoints as tiny
from tests.engine.embedding.engine_calls import embed, rerank, serving
from tests.engine.embedding.tiny_checkpoints import QUERY, TEXTS

PROMPTS = {"query": "moon, ", "document": ""}


def change(file: Path, **changes: Any) -> None:
    stated = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(stated | changes))


async def vector(folder: Path, text: str, **settings: Any) -> list[float]:
    async with serving(folder, settings=settings) as engine:
        return (await embed(engine, text)).values


@pytest.mark.parametrize(
    ("default", "option", "request_", "prompt"),
    [
        (None, "", None, ""),
        ("query", "", None, "moon, "),
        ("query", "document", None, ""),
        ("document", "query", None, "moon, "),
        ("query", "", "document", ""),
        (None, "", "query", "moon, "),
    ],
)
async def test_a_prompt_is_put_in_front(
    default: str | None, option: str, request_: str | None, prompt: str, tmp_path: Path
) -> None:
    folder = tiny.write("bert", tmp_path)
    wanted = await vector(folder, prompt + "Paris")
    change(
        folder / "config_sentence_transformers.json", prompts=PROMPTS, default_prompt_name=default
    )
    async with serving(folder, settings={"prompt_name": option}) as engine:
        reader = engine.reader(TextReader)
        pieces = reader.read_text("Paris", prompt_name=request_)
        found = reader.answer(pieces, await engine.encode(lambda: pieces)).values
    assert found == wanted


async def test_prompts_that_there_are_not_are_refused(tmp_path: Path) -> None:
    folder = tiny.write("bert", tmp_path)
    file = folder / "config_sentence_transformers.json"
    async with serving(folder) as engine:
        reader = engine.reader(TextReader)
        with pytest.raises(InvalidRequest, match="'x', but the model has no prompts"):
            reader.read_text("Paris", prompt_name="x")
    change(file, prompts=PROMPTS)
    with pytest.raises(InvalidRequest, match="'x', but the model's prompts are 'query', 'docu"):
        await vector(folder, "Paris", prompt_name="x")
    change(file, default_prompt_name="x")
    with pytest.raises(ModelRejected, match=r"default_prompt_name .* is 'x', which is not among"):
        await vector(folder, "Paris")


async def test_the_tokens_of_a_prompt_may_be_left_out_of_the_mean(tmp_path: Path) -> None:
    folder = tiny.write("xlm_roberta", tmp_path)
    async with serving(folder, settings={"pooling": "none"}) as engine:
        text = await embed(engine, "moon, is it paris?")
    change(folder / "config_sentence_transformers.json", prompts={"q": "moon, "})
    change(folder / "1_Pooling" / "config.json", include_prompt=False)
    found = await vector(folder, "is it paris?", prompt_name="q")
    states = np.array(text.values).reshape(text.rows, text.dim)
    pooled = states[3:].mean(axis=0)  # without <s>, `moon` and `,`
    np.testing.assert_allclose(found, pooled / np.linalg.norm(pooled), atol=1e-6)


async def test_a_text_is_truncated_unless_that_is_refused(tmp_path: Path) -> None:
    folder = tiny.write("bert", tmp_path)
    change(folder / "sentence_bert_config.json", max_seq_length=10)
    async with serving(folder) as engine:
        reader = engine.reader(TextReader)
        long = await embed(engine, "moon " * 30)
        assert long.values == (await embed(engine, "moon " * 8)).values
        assert (long.prompt_tokens, long.truncated) == (10, 22)
        assert (await embed(engine, "moon")).truncated == 0
        (piece,) = reader.read_tokens([5] * 12)
        assert (len(piece.ids), piece.cut) == (10, 2)
        with pytest.raises(TooLong, match="32 tokens long, but the model reads at most 10"):
            reader.read_text("moon " * 30, truncate=False)
        with pytest.raises(TooLong, match="12 tokens long"):
            reader.read_tokens([5] * 12, truncate=False)
        assert (await embed(engine, "moon " * (1 << 18))).prompt_tokens == 10


@pytest.mark.parametrize("kind", ["embedding", "text"])
async def test_the_tokenizer_may_be_told_to_add_an_end_token(kind: str, tmp_path: Path) -> None:
    """As gte-Qwen2 and e5-mistral state it: in tokenizer_config.json alone."""
    folder = tiny.write("qwen2_both_ways", tmp_path, is_causal=True)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer | {"post_processor": None}))
    change(folder / "1_Pooling" / "config.json", pooling_mode="lasttoken")
    counts = []
    for adds in (False, True):
        change(folder / "tokenizer_config.json", add_eos_token=adds)
        async with serving(folder, settings={"type": kind}) as engine:
            (piece,) = engine.reader(TextReader).read_text("paris river")
            counts.append(len(piece.ids))
            assert (piece.ids[-1] == 0) is adds
    assert counts[1] == counts[0] + 1


@pytest.mark.parametrize(
    ("function", "raw"),
    [
        (None, False),
        ("torch.nn.modules.activation.Sigmoid", False),
        ("torch.nn.modules.linear.Identity", True),
        ("custom.Softsign", False),
    ],
)
@pytest.mark.parametrize("place", ["config_sentence_transformers.json", "config.json"])
async def test_scores_have_the_function_of_the_checkpoint(
    place: str, function: str | None, raw: bool, tmp_path: Path
) -> None:
    folder = tiny.write("bert_rerank", tmp_path)
    async with serving(folder) as engine:
        plain = [one.score for one in await rerank(engine, QUERY, list(TEXTS))]
    changes: dict[str, Any] = {"activation_fn": function}
    change(
        folder / place,
        **({"sentence_transformers": changes} if place == "config.json" else changes),
    )
    async with serving(folder) as engine:
        found = [one.score for one in await rerank(engine, QUERY, list(TEXTS))]
    if raw:
        np.testing.assert_allclose(1 / (1 + np.exp(-np.array(found))), plain, atol=1e-6)
        assert found != plain
    else:
        assert found == plain


async def test_one_long_document_does_not_fail_a_request(tmp_path: Path) -> None:
    folder = tiny.write("bert_rerank", tmp_path)
    documents = [*TEXTS, "river of france " * 100]
    async with serving(folder) as engine:
        found = await rerank(engine, QUERY, documents)
        assert sorted(one.index for one in found) == list(range(len(documents)))
        with pytest.raises(TooLong, match=r"documents\[4\] is"):
            await rerank(engine, QUERY, documents, truncate=False)


async def test_the_vectors_of_several_poolings_follow_one_another(tmp_path: Path) -> None:
    folder = tiny.write("bert", tmp_path)
    async with serving(folder, settings={"pooling": "none"}) as engine:
        text = await embed(engine, "moon, is it paris?")
    change(folder / "1_Pooling" / "config.json", pooling_mode_mean_tokens=True)
    states = np.array(text.values).reshape(text.rows, text.dim)
    wanted = np.concatenate([states[0], states.mean(axis=0)])
    np.testing.assert_allclose(await vector(folder, "moon, is it paris?"), wanted, atol=1e-6)

"""Each family's forward pass, pooling and scaling against its reference implementation.

The checkpoints are tiny and random, the same ones that the reference read; its results are in
tiny_references.json (`make_references`).
"""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backend.engine.embedding.label_reader import LabelReader
from backend.engine.errors import InvalidRequest, ModelRejected, TooLong, WrongKind
from tests.engine.embedding.rooms import embed, entities, rerank, serving
from tests.engine.embedding.tiny_checkpoints import (
    EMBEDDERS,
    HIDDEN,
    LABELLERS,
    QUERY,
    RERANKERS,
    TEXTS,
    write,
)

SAID: dict[str, Any] = json.loads((Path(__file__).parent / "tiny_references.json").read_text())


@pytest.mark.parametrize("family", EMBEDDERS)
async def test_vectors_equal_the_references(family: str, tmp_path: Path) -> None:
    async with serving(write(family, tmp_path)) as engine:
        alone = [(await embed(engine, text)).values for text in TEXTS]
        together = await asyncio.gather(*(embed(engine, text) for text in TEXTS * 5))
    np.testing.assert_allclose(alone, SAID[family], atol=2e-4)
    np.testing.assert_allclose([one.values for one in together], alone * 5, atol=1e-5)


@pytest.mark.parametrize("family", RERANKERS)
async def test_scores_equal_the_references(family: str, tmp_path: Path) -> None:
    reranking = family == "qwen3_rerank"
    async with serving(write(family, tmp_path), reranking=reranking) as engine:
        ranked = await rerank(engine, QUERY, list(TEXTS))
        best = await rerank(engine, QUERY, list(TEXTS), 2)
        assert [one.score for one in ranked] == sorted((one.score for one in ranked), reverse=True)
        assert [one.index for one in best] == [one.index for one in ranked[:2]]
        with pytest.raises(WrongKind, match="ranks documents against a query"):
            await embed(engine, "x")
    scores = [one.score for one in sorted(ranked, key=lambda one: one.index)]
    np.testing.assert_allclose(scores, SAID[family], atol=1e-4)


@pytest.mark.parametrize("family", LABELLERS)
async def test_labels_equal_the_references(family: str, tmp_path: Path) -> None:
    async with serving(write(family, tmp_path)) as engine:
        reader = engine.reader(LabelReader)
        for text, expected in zip(TEXTS, SAID[family], strict=True):
            pieces = reader.read(text).pieces
            (shares,) = (await engine.encode(lambda given=pieces: given)).outputs  # type: ignore[misc]
            np.testing.assert_allclose(shares, expected, atol=1e-4)
            for entity in await entities(engine, text):
                assert entity.group in {label.partition("-")[2] for label in reader.labels}
                assert text.encode()[entity.start : entity.end].decode() == entity.text
        everything = await entities(engine, TEXTS[2])
        assert everything
        some = await entities(engine, TEXTS[2], 0.5)
        assert some == [entity for entity in everything if entity.score >= 0.5]


async def test_a_long_text_is_labelled_in_windows(tmp_path: Path) -> None:
    text = "paris is of france and the river is the moon, " * 20
    async with serving(write("bert_labels", tmp_path)) as engine:
        reader = engine.reader(LabelReader)
        read = reader.read(text)
        assert len(read.pieces) > 1
        assert max(len(piece.ids) for piece in read.pieces) <= reader.limits.context
        found = await entities(engine, text)
    assert found[-1].end > len(text) // 2
    assert all(first.end <= second.start for first, second in itertools.pairwise(found))


@pytest.mark.parametrize(
    ("options", "rows", "length"),
    [
        ({"pooling": "none"}, 7, None),
        ({"pooling": "none", "normalize": True}, 7, 1.0),
        ({"pooling": "mean"}, 1, None),
        ({"pooling": "last", "normalize": True}, 1, 1.0),
    ],
)
async def test_options_override_the_checkpoint(
    options: dict[str, Any], rows: int, length: float | None, tmp_path: Path
) -> None:
    async with serving(write("bert", tmp_path), settings=options) as engine:
        embedded = await embed(engine, "paris")
        text = await embed(engine, "abcde")
    assert (embedded.rows, embedded.dim) == (3 if rows > 1 else 1, HIDDEN)
    assert text.rows == rows
    assert text.per_token == (rows > 1)
    vectors = np.array(text.values).reshape(text.rows, text.dim)
    lengths = np.linalg.norm(vectors, axis=1)
    if length is None:
        assert (np.abs(lengths - 1) > 1e-3).all()
    else:
        np.testing.assert_allclose(lengths, length, atol=1e-5)


async def test_the_end_token_that_a_causal_model_pools_at_is_added_once(tmp_path: Path) -> None:
    folder = write("qwen3", tmp_path)
    async with serving(folder) as engine:
        whole = await embed(engine, "paris")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer | {"post_processor": None}))
    async with serving(folder) as engine:
        bare = await embed(engine, "paris")
    assert whole == bare
    assert whole.prompt_tokens == 2


async def test_too_long_texts_are_refused_with_both_lengths(tmp_path: Path) -> None:
    async with serving(write("bert", tmp_path), context_size=20) as engine:
        with pytest.raises(TooLong, match="32 tokens long, but the model reads at most 20"):
            await embed(engine, "a" * 30)
        with pytest.raises(TooLong, match="characters long"):
            await embed(engine, "a" * (1 << 21))


@pytest.mark.parametrize(
    ("family", "changes", "sentence"),
    [
        ("bert", {"hidden_act": "relu"}, "its hidden_act is 'relu'"),
        ("bert", {"position_embedding_type": "relative_key"}, "its position_embedding_type is"),
        ("bert_rerank", {"id2label": {"0": "a", "1": "b"}}, "it classifies texts into 2 classes"),
        ("bert_labels", {"id2label": None}, "does not name the labels"),
        ("xlm_roberta", {"model_type": "mpnet"}, "its model type 'mpnet' is not among the"),
        # jina-embeddings-v3 and v4, nomic-embed-text-v2-moe, and a converted Qwen3-Reranker.
        ("xlm_roberta", {"position_embedding_type": "rotary"}, "'rotary', .* such as BGE-M3"),
        (
            "qwen3_rerank",
            {"model_type": "qwen2_5_vl", "architectures": ["JinaEmbeddingsV4Model"]},
            "'qwen2_5_vl' is not among the supported .* load one of those",
        ),
        ("bert", {"model_type": "nomic_bert"}, "its model type 'nomic_bert' is not among the"),
        (
            "qwen3_rerank",
            {"architectures": ["Qwen3ForSequenceClassification"]},
            "load the original, such as Qwen3-Reranker-0.6B",
        ),
    ],
)
async def test_checkpoints_that_would_be_computed_wrongly_are_refused(
    family: str, changes: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelRejected, match=sentence):
        async with serving(write(family, tmp_path, **changes)):
            pass


@pytest.mark.parametrize(
    ("family", "request_", "sentence"),
    [
        ("bert", {"reranking": True}, "Reranking is true, but the model turns text into vectors"),
        ("bert_rerank", {"embeddings": True}, "Embeddings is true, but the model ranks documents"),
        ("bert", {"draft_model": "/d"}, "DraftModel is set, but the model turns text into"),
    ],
)
async def test_load_flags_that_do_not_fit_the_checkpoint_are_refused(
    family: str, request_: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidRequest, match=sentence):
        async with serving(write(family, tmp_path), **request_):
            pass

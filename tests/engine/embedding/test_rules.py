"""The decisions behind embedding, ranking and labelling, as properties of pure functions."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models import gpt_neox
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing

from backend.engine.embedding.encode_queue import ActivationCost, bucket_of, rows_that_fit
from backend.engine.embedding.encoding import Piece
from backend.engine.embedding.kind import is_causal
from backend.engine.embedding.label_reader import LabelReader, entities_of, runs_of, windows
from backend.engine.embedding.networks import inner_model, padded, pool
from backend.engine.embedding.readers import (
    Limits,
    PairReader,
    TextReader,
    id_encoder,
    pair_encoder,
    text_encoder,
)
from backend.engine.embedding.sentence_files import (
    Mode,
    PoolingRule,
    SentenceFiles,
    pooling_of_checkpoint,
    prompts_of,
    sequence_limit,
)
from backend.engine.errors import InvalidRequest, ModelRejected
from backend.engine.settings import Settings
from common.model_kind import ModelKind, kind_of

LENGTHS = st.lists(st.integers(1, 9000), min_size=1, max_size=60)


@given(LENGTHS, st.integers(16, 20_000), st.integers(1, 1 << 40))
def test_a_step_stays_within_its_limits_or_is_a_single_row(
    lengths: list[int], tokens: int, room: int
) -> None:
    cost = ActivationCost(heads=4, hidden=512, itemsize=4)
    rows = rows_that_fit(lengths, tokens, cost, room)
    assert 1 <= rows <= len(lengths)
    longest = max(lengths[:rows])
    if rows > 1:
        assert rows * longest <= tokens
        assert cost.of(rows, longest) <= room
    if rows < len(lengths):
        wider = max(longest, lengths[rows])
        assert (rows + 1) * wider > tokens or cost.of(rows + 1, wider) > room


@given(st.integers(1, 1 << 20))
def test_rows_of_a_bucket_have_similar_lengths(length: int) -> None:
    bucket = bucket_of(length)
    assert length <= bucket
    assert length > bucket * 2 // 3 - 1 or bucket == 16
    assert bucket_of(bucket) == bucket


@given(st.integers(0, 2000), st.integers(4, 300))
def test_every_token_counts_in_exactly_one_window(length: int, size: int) -> None:
    parts = windows(length, size)
    counted = [place for part in parts for place in range(part.kept, part.until)]
    assert counted == list(range(length))
    for part in parts:
        assert part.first <= part.kept < part.until <= part.last
        assert part.last - part.first <= size


LABELS = st.lists(st.sampled_from(["O", "B-PER", "I-PER", "E-PER", "S-LOC", "I-LOC", "NAME"]))


@given(LABELS, st.data())
def test_runs_are_disjoint_and_hold_every_labelled_token(
    labels: list[str], data: st.DataObject
) -> None:
    runs = runs_of(labels)
    assert all(first.last <= second.first for first, second in pairwise(runs))
    held = {place for run in runs for place in range(run.first, run.last)}
    assert held == {place for place, label in enumerate(labels) if label != "O"}
    words = sorted(
        data.draw(st.lists(st.integers(0, 5), min_size=len(labels), max_size=len(labels)))
    )
    settled = runs_of(labels, words)
    for run in settled:
        assert run.first == 0 or words[run.first] != words[run.first - 1]


@pytest.mark.parametrize(
    ("labels", "runs"),
    [
        ("B-PER I-PER O", [("PER", 0, 2)]),
        ("B-PER B-PER", [("PER", 0, 1), ("PER", 1, 2)]),
        ("I-PER I-LOC", [("PER", 0, 1), ("LOC", 1, 2)]),
        ("B-PER E-PER I-PER", [("PER", 0, 2), ("PER", 2, 3)]),
        ("S-LOC I-LOC", [("LOC", 0, 1), ("LOC", 1, 2)]),
        ("PER PER O PER", [("PER", 0, 2), ("PER", 3, 4)]),
    ],
)
def test_label_prefixes(labels: str, runs: list[tuple[str, int, int]]) -> None:
    assert [(run.group, run.first, run.last) for run in runs_of(labels.split())] == runs


@given(st.lists(st.text("aé漢🙂 ", min_size=1, max_size=4), min_size=1, max_size=8))
def test_offsets_count_bytes(tokens: list[str]) -> None:
    text = "".join(tokens)
    ends = np.cumsum([len(token) for token in tokens]).tolist()
    offsets = [(end - len(token), end) for token, end in zip(tokens, ends, strict=True)]
    runs = runs_of(["S-X"] * len(tokens))
    found = entities_of(text, runs, offsets, [0.5] * len(runs))
    assert [entity.text for entity in found] == [part.strip() for part in tokens if part.strip()]
    for entity in found:
        assert text.encode()[entity.start : entity.end].decode() == entity.text


ROWS = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=9), min_size=1, max_size=5)
CONFIG = {"model_type": "bert"}
MODES: tuple[Mode, ...] = ("cls", "mean", "max", "last", "weighted_mean", "mean_sqrt_len")


@given(ROWS, st.sampled_from(MODES))
def test_padding_does_not_change_a_vector(rows: list[list[int]], mode: Mode) -> None:
    table = np.random.RandomState(1).standard_normal((10, 6)).astype(np.float32)
    batch = padded([Piece(row, [0] * len(row)) for row in rows], pad_token=3)
    hidden = mx.where(batch.mask[..., None] > 0, mx.array(table)[batch.ids], mx.nan)
    found = np.array(pool(hidden, batch, mode))
    for row, vector in zip(rows, found, strict=True):
        states = table[row].astype(np.float64)
        places = np.arange(1, len(row) + 1)[:, None]
        wanted = {
            "cls": states[0],
            "last": states[-1],
            "max": states.max(axis=0),
            "mean": states.mean(axis=0),
            "mean_sqrt_len": states.sum(axis=0) / np.sqrt(len(row)),
            "weighted_mean": (states * places).sum(axis=0) / places.sum(),
        }[mode]
        np.testing.assert_allclose(vector, wanted, atol=1e-5)


def state(folder: Path, *modules: str, **pooling: Any) -> PoolingRule:
    steps = [{"path": f"{place}_{kind}", "type": f"x.{kind}"} for place, kind in enumerate(modules)]
    (folder / "modules.json").write_text(json.dumps(steps))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return pooling_of_checkpoint(SentenceFiles(folder), {"model_type": "bert"}, Settings())


def test_pooling_is_read_from_the_checkpoint(tmp_path: Path) -> None:
    two = ("Transformer", "Pooling")
    assert state(tmp_path, *two, pooling_mode_cls_token=True) == PoolingRule(("cls",), False)
    assert state(tmp_path, *two, "Normalize", pooling_mode="lasttoken") == PoolingRule(
        ("last",), True
    )
    flags = {f"pooling_mode_{kind}_tokens": True for kind in ("mean", "max")}
    several = state(tmp_path, *two, **flags, pooling_mode_cls_token=True)
    assert several.modes == ("cls", "max", "mean")
    assert state(tmp_path, *two, pooling_mode=["mean", "cls"]).modes == ("mean", "cls")
    with pytest.raises(ModelRejected, match="its pooling 'attention' is not supported"):
        state(tmp_path, *two, pooling_mode="attention")
    assert state(tmp_path, *two, "Dense", "Normalize") == PoolingRule(("mean",), True)
    assert state(tmp_path, *two, "Normalize", "Dense") == PoolingRule(("mean",), False)
    with pytest.raises(ModelRejected, match="the step 'LSTM' in its modules"):
        state(tmp_path, "Transformer", "LSTM", "Pooling")
    with pytest.raises(ModelRejected, match="it lacks the step Pooling in modules"):
        state(tmp_path, "Transformer", "Normalize")
    state(tmp_path, *two)
    (tmp_path / "1_Pooling" / "config.json").unlink()
    config = {"model_type": "bert"}
    with pytest.raises(ModelRejected, match=r"it lacks 1_Pooling/config\.json, .* option pooling"):
        pooling_of_checkpoint(SentenceFiles(tmp_path), config, Settings())
    chosen = pooling_of_checkpoint(SentenceFiles(tmp_path), config, Settings(pooling="cls"))
    assert chosen == PoolingRule(("cls",), False)
    (tmp_path / "modules.json").unlink()
    rule = pooling_of_checkpoint(SentenceFiles(tmp_path), {"model_type": "bert"}, Settings())
    assert rule == PoolingRule(("mean",), True)


@pytest.mark.parametrize(
    ("file", "stated", "sentence"),
    [
        ("modules.json", ["x"], "its modules.json is not a list of objects"),
        ("modules.json", [None], "its modules.json is not a list of objects"),
        ("config_sentence_transformers.json", {"default_prompt_name": ["a"]}, "is not among its"),
        ("1_Pooling/config.json", {"pooling_mode": [["mean"]]}, r"its pooling \['mean'\] is not"),
    ],
)
def test_malformed_files_are_named(file: str, stated: Any, sentence: str, tmp_path: Path) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(json.dumps(stated))
    files = SentenceFiles(tmp_path)
    with pytest.raises(ModelRejected, match=sentence):
        (prompts_of(files, Settings()), pooling_of_checkpoint(files, CONFIG, Settings()))


def test_maximum_length_of_a_checkpoint(tmp_path: Path) -> None:
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    roberta: dict[str, Any] = dict.fromkeys((*sizes, "vocab_size"), 4)
    roberta |= {"model_type": "roberta", "max_position_embeddings": 514, "num_attention_heads": 2}
    assert sequence_limit(SentenceFiles(tmp_path), {"model_type": "llama"}) == 0
    assert sequence_limit(SentenceFiles(tmp_path), roberta) == 512
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 1e30}')
    assert sequence_limit(SentenceFiles(tmp_path), roberta) == 512
    mistral = {"model_type": "mistral", "max_position_embeddings": 512, "sliding_window": 64}
    assert sequence_limit(SentenceFiles(tmp_path), mistral) == 0
    (tmp_path / "sentence_roberta_config.json").write_text('{"max_seq_length": 128}')
    assert sequence_limit(SentenceFiles(tmp_path), roberta) == 128
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 256}')
    assert sequence_limit(SentenceFiles(tmp_path), roberta) == 256


@pytest.mark.parametrize(
    ("config", "files", "wanted", "kind"),
    [
        ({"model_type": "qwen3"}, (), "", ModelKind.TEXT),
        ({"model_type": "qwen3"}, ("modules.json",), "", ModelKind.EMBEDDING),
        ({"model_type": "qwen3"}, (), "embedding", ModelKind.EMBEDDING),
        ({"model_type": "qwen3"}, (), "rerank", ModelKind.RERANK),
        ({"model_type": "qwen3"}, ("modules.json", "1_LogitScore"), "", ModelKind.RERANK),
        (
            {"model_type": "qwen3"},
            ("modules.json", "1_LogitScore/config.json"),
            "",
            ModelKind.RERANK,
        ),
        ({"model_type": "bert"}, (), "", ModelKind.EMBEDDING),
        (
            {"model_type": "bert", "architectures": ["BertForSequenceClassification"]},
            ("config_sentence_transformers.json",),
            "",
            ModelKind.RERANK,
        ),
        (  # vectors of a model that was trained from a classifier
            {"model_type": "bert", "architectures": ["BertForSequenceClassification"]},
            ("modules.json", "1_Pooling/config.json"),
            "",
            ModelKind.EMBEDDING,
        ),
        (
            {"model_type": "bert", "architectures": ["BertForTokenClassification"]},
            (),
            "",
            ModelKind.TOKEN_CLASSIFY,
        ),
    ],
)
def test_kind_of_a_checkpoint(
    config: dict[str, Any], files: tuple[str, ...], wanted: str, kind: ModelKind
) -> None:
    assert kind_of(config, frozenset(files), wanted) is kind


def test_logits_are_not_vectors() -> None:
    """mlx-lm's GPT-NeoX computes logits in the part that computes states in other models."""
    sizes: dict[str, Any] = {
        "max_position_embeddings": 16,
        "hidden_size": 8,
        "num_attention_heads": 2,
    }
    sizes |= {"num_hidden_layers": 1, "layer_norm_eps": 1e-5, "vocab_size": 9, "rotary_pct": 0.5}
    arguments = gpt_neox.ModelArgs.from_dict(
        sizes | {"model_type": "gpt_neox", "rotary_emb_base": 10000}
    )
    assert inner_model(gpt_neox.Model(arguments)) is None


def test_texts_with_tokens_that_the_model_does_not_have_are_refused() -> None:
    """MLX does not check ids: it would read beyond the table of embeddings."""
    tokenizer = Tokenizer(WordLevel({"a": 0, "b": 1, "<new>": 2}, "a"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    limits = Limits(context=100, vocabulary=2)
    pairs = PairReader(lambda _: pair_encoder(tokenizer, False), limits)
    assert [piece.ids for piece in pairs.read("a", ["b"])] == [[0, 1]]
    with pytest.raises(InvalidRequest, match=r"documents\[1\] has the token 2, but .* ends at 1"):
        pairs.read("a", ["b", "a <new>"])
    labels = LabelReader(tokenizer, limits, ("O",), lambda shares: [0] * len(shares))
    assert labels.read("a b").pieces[0].ids == [0, 1]
    with pytest.raises(InvalidRequest, match=r"text has the token 2, but .* ends at 1"):
        labels.read("a b <new>")
    texts = TextReader(text_encoder(tokenizer), limits)
    with pytest.raises(InvalidRequest, match=r"Embeddings has the token 2, but .* ends at 1"):
        texts.read_text("a <new>")


SIDES = st.sampled_from(["right", "left"])


def words(count: int) -> Tokenizer:
    """A tokenizer of words w0, w1, …, which adds [CLS] in front and [SEP] after each text."""
    names = ["[CLS]", "[SEP]", *(f"w{at}" for at in range(count))]
    tokenizer = Tokenizer(WordLevel({name: at for at, name in enumerate(names)}, "w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 0), ("[SEP]", 1)],
    )
    return tokenizer


@given(st.integers(0, 12), st.integers(0, 12), st.integers(3, 20), SIDES)
def test_pairs_are_truncated_as_the_tokenizer_does(
    first: int, second: int, limit: int, side: str
) -> None:
    query, document = (" ".join(f"w{at}" for at in range(count)) for count in (first, second))
    whole, cutting = words(12), words(12)
    cutting.enable_truncation(limit, direction=side)  # longest first
    wanted = cutting.encode(query, document)
    piece = pair_encoder(whole, True, side=side)(query, document, limit)
    assert (piece.ids, piece.segments) == (wanted.ids, wanted.type_ids)
    assert piece.cut == max(first + second + 3 - limit, 0)
    assert pair_encoder(whole, True)(query, document, None).cut == 0


@given(st.integers(0, 12), st.integers(2, 20), SIDES)
def test_texts_are_truncated_as_the_tokenizer_does(count: int, limit: int, side: str) -> None:
    text = " ".join(f"w{at}" for at in range(count))
    whole, cutting = words(12), words(12)
    cutting.enable_truncation(limit, direction=side)
    piece = text_encoder(whole, side=side)("", text, limit)
    assert piece.ids == cutting.encode(text).ids
    assert piece.cut == max(count + 2 - limit, 0)
    by_id = id_encoder(lambda text: whole.encode(text).ids, {0, 1}, side=side)("", text, limit)
    assert (by_id.ids, by_id.cut) == (piece.ids, piece.cut)


@pytest.mark.parametrize(
    ("architecture", "causal"), [("Ministral3Model", True), ("Ministral3BidirectionalModel", False)]
)
def test_only_embedders_of_ministral_attend_in_both_directions(
    architecture: str, causal: bool
) -> None:
    config = {"model_type": "ministral3", "architectures": [architecture]}
    assert is_causal(config) is causal

"""BERT models with rotary positions: both forms of their files, tasks, experts, limits, refusals.

`test_families` compares the published form with the references; here are the cases that only these
models have.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from backend.engine.embedding.readers import TextReader
from backend.engine.errors import InvalidRequest, ModelRejected, TooLong
from tests.engine.embedding import rotary_checkpoints as rotary
from tests.engine.embedding import tiny_checkpoints as tiny
from tests.engine.embedding.engine_calls import embed, rerank, serving
from tests.engine.embedding.tiny_checkpoints import HEADS, HIDDEN, POSITIONS, QUERY, TEXTS
from tests.engine.loading_models import write_model

SAID: dict[str, Any] = json.loads((Path(__file__).parent / "tiny_references.json").read_text())
FORMS: dict[str, Callable[[Path, Path], Path]] = {
    "transformers": rotary.in_form_of_transformers,
    "published names": lambda published, folder: rotary.in_form_of_transformers(
        published, folder, weights=False
    ),
}


async def vectors(folder: Path, **options: Any) -> np.ndarray:
    async with serving(folder, settings=options) as engine:
        return np.array([(await embed(engine, text)).values for text in TEXTS])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", rotary.OF_TRANSFORMERS)
async def test_the_form_of_transformers_5_means_the_same(
    family: str, form: str, tmp_path: Path
) -> None:
    folder = FORMS[form](rotary.write(family, tmp_path / "published"), tmp_path / "later")
    if family not in rotary.RERANKERS:
        np.testing.assert_allclose(await vectors(folder), SAID[family], atol=1e-5)
        return
    async with serving(folder) as engine:
        ranked = await rerank(engine, QUERY, list(TEXTS))
    scores = [one.score for one in sorted(ranked, key=lambda one: one.index)]
    np.testing.assert_allclose(scores, SAID[family], atol=1e-5)


@pytest.mark.parametrize("form", ["published", *FORMS])
@pytest.mark.parametrize("task", rotary.TASKS[:2])
async def test_a_task_applies_its_adapter(task: str, form: str, tmp_path: Path) -> None:
    folder = rotary.write("jina_v3", tmp_path / "published")
    if form != "published":
        folder = FORMS[form](folder, tmp_path / "later")
    found = await vectors(folder, task=task)
    np.testing.assert_allclose(found, SAID[f"jina_v3 {task}"], atol=1e-5)
    assert np.abs(found - SAID["jina_v3"]).max() > 0.01


async def test_a_task_may_be_written_as_in_either_form(tmp_path: Path) -> None:
    published = rotary.write("jina_v3", tmp_path / "published")
    later = rotary.in_form_of_transformers(published, tmp_path / "later")
    for folder in (published, later):
        first = await vectors(folder, task="text-matching")
        np.testing.assert_array_equal(first, await vectors(folder, task="text_matching"))


@pytest.mark.parametrize("later", [False, True])
async def test_another_task_is_refused_with_those_that_there_are(
    later: bool, tmp_path: Path
) -> None:
    folder = rotary.write("jina_v3", tmp_path / "published")
    named = ("'retrieval.query', 'retrieval.passage'", "'retrieval_passage', 'retrieval_query'")
    if later:
        folder = rotary.in_form_of_transformers(folder, tmp_path / "later")
    with pytest.raises(InvalidRequest, match=f"task is 'code', but the .* are .*{named[later]}"):
        await vectors(folder, task="code")


async def test_a_task_is_refused_by_models_without_adapters(tmp_path: Path) -> None:
    bert = tiny.write("bert", tmp_path / "bert")
    (bert / "a").mkdir()
    (bert / "a" / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4}')
    for folder, words in (
        (rotary.write("nomic_v15", tmp_path / "nomic"), "has no tasks"),
        (bert, "has no tasks"),
        (write_model(tmp_path / "text"), "generates text"),
        (rotary.write("gte_reranker", tmp_path / "reranker"), "ranks documents"),
    ):
        with pytest.raises(InvalidRequest, match=f"task is 'a', but the model {words}"):
            await vectors(folder, task="a")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"use_dora": True},
            "adapter 'separation' cannot be applied: layer '.*' has no m",
        ),
        ({"lora_alpha": "a"}, "cannot be applied: lora_alpha in adapter_config.json is 'a'"),
    ],
)
async def test_other_adapters_are_refused_by_name(
    changes: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    published = rotary.write("jina_v3", tmp_path / "published")
    folder = rotary.in_form_of_transformers(published, tmp_path / "later")
    file = folder / "separation" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ModelRejected, match=sentence):
        await vectors(folder, task="separation")


async def test_a_task_is_added_to_quantised_weights(tmp_path: Path) -> None:
    """Some matrices of a layer are quantised, and others are not."""
    published = rotary.write("jina_v3", tmp_path / "published")
    found = []
    for keep in (True, False):
        folder = rotary.in_form_of_transformers(published, tmp_path / str(keep))
        _quantise(folder, "q", "v", keep=keep)
        found.append(await vectors(folder, task="separation"))
    np.testing.assert_allclose(found[0], found[1], atol=2e-4)


def _quantise(folder: Path, *parts: str, keep: bool) -> None:
    """Quantise matrices of a layer to 4 bits, and make them dense again unless `keep` is set."""
    weights = load_file(folder / "model.safetensors")
    for part in parts:
        stem = f"layers.0.self_attn.{part}_proj"
        packed = mx.quantize(mx.array(weights[f"{stem}.weight"]), group_size=32, bits=4)
        dense = mx.dequantize(*packed, group_size=32, bits=4)
        weights[f"{stem}.weight"] = np.array(packed[0] if keep else dense)
        if keep:
            weights |= {
                f"{stem}.scales": np.array(packed[1]),
                f"{stem}.biases": np.array(packed[2]),
            }
    save_file(weights, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config |= {"quantization": {"group_size": 32, "bits": 4}} if keep else {}
    (folder / "config.json").write_text(json.dumps(config))


async def test_a_task_that_has_no_weights_is_refused(tmp_path: Path) -> None:
    folder = rotary.write("jina_reranker", tmp_path, lora_adaptations=["a"], lora_alpha=1)
    config = json.loads((folder / "config.json").read_text()) | {
        "architectures": ["XLMRobertaModel"]
    }
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelRejected, match="its weights have no adapters for tasks"):
        await vectors(folder, task="a")


async def test_experts_equal_their_formula(tmp_path: Path) -> None:
    folder = rotary.write("nomic_v2_moe", tmp_path)
    async with serving(folder) as engine:
        reader = engine.reader(TextReader)
        rows = [reader.read_text(text)[0].ids for text in TEXTS]
        found = [(await embed(engine, text)).values for text in TEXTS]
    weights = load_file(folder / "model.safetensors")
    pooled = np.stack([_states_with_experts(weights, row).mean(axis=0) for row in rows])
    wanted = pooled / np.linalg.norm(pooled, axis=1, keepdims=True)
    np.testing.assert_allclose(found, wanted, atol=1e-5)


def _states_with_experts(weights: dict[str, np.ndarray], ids: list[int]) -> np.ndarray:
    """nomic-embed-text-v2-moe in NumPy, for one row: (tokens, hidden)."""

    def matrix(states: np.ndarray, name: str) -> np.ndarray:
        product: np.ndarray = states @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]
        return product

    def scaled(states: np.ndarray, name: str) -> np.ndarray:
        centred = states - states.mean(axis=-1, keepdims=True)
        deviation = np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-5)
        normed: np.ndarray = centred / deviation * weights[f"{name}.weight"]
        normed += weights[f"{name}.bias"]
        return normed

    states = weights["embeddings.word_embeddings.weight"][ids].astype(np.float64)
    states = scaled(states + weights["embeddings.token_type_embeddings.weight"][0], "emb_ln")
    for at in range(2 * tiny.LAYERS):
        layer = f"encoder.layers.{at}"
        mixed = _attention(matrix(states, f"{layer}.attn.Wqkv"))
        states = scaled(states + matrix(mixed, f"{layer}.attn.out_proj"), f"{layer}.norm1")
        if at % 2 == 1:
            added = _experts(weights, f"{layer}.mlp", states)
        else:
            added = matrix(_gelu(matrix(states, f"{layer}.mlp.fc1")), f"{layer}.mlp.fc2")
        states = scaled(states + added, f"{layer}.norm2")
    return states


def _attention(joined: np.ndarray) -> np.ndarray:
    size = HIDDEN // HEADS
    queries, keys, values = np.split(joined.reshape(len(joined), 3 * HEADS, size), 3, axis=1)
    places = np.arange(len(joined))[:, None] * 10000.0 ** (-np.arange(0, size, 2) / size)
    cosines, sines = np.cos(places)[:, None], np.sin(places)[:, None]

    def turned(states: np.ndarray) -> np.ndarray:
        first, second = np.split(states, 2, axis=-1)
        turn = (first * cosines - second * sines, second * cosines + first * sines)
        return np.concatenate(turn, axis=-1)

    scores = np.einsum("qhd,khd->hqk", turned(queries), turned(keys)) / math.sqrt(size)
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    shares /= shares.sum(axis=-1, keepdims=True)
    mixed: np.ndarray = np.einsum("hqk,khd->qhd", shares, values)
    return mixed.reshape(len(joined), HIDDEN)


def _experts(weights: dict[str, np.ndarray], layer: str, states: np.ndarray) -> np.ndarray:
    """Each token's best two experts, weighted by their shares among all."""
    up, down = (
        weights[f"{layer}.experts.mlp.{name}"].reshape(rotary.EXPERTS, -1, HIDDEN)
        for name in ("w1", "w2")
    )
    scores = states @ weights[f"{layer}.router.layer.weight"].T
    shares = np.exp(scores) / np.exp(scores).sum(axis=-1, keepdims=True)
    mixed = np.tile(weights[f"{layer}.experts.bias"].astype(np.float64), (len(states), 1))
    for token, share in enumerate(shares):
        for expert in np.argsort(-share)[:2]:
            inner = _gelu(states[token] @ up[expert].T)
            mixed[token] += share[expert] * (inner @ down[expert])
    return mixed


def _gelu(values: np.ndarray) -> np.ndarray:
    erf = np.vectorize(math.erf)
    activated: np.ndarray = values * (1 + erf(values / math.sqrt(2))) / 2
    return activated


@pytest.mark.parametrize("family", rotary.EMBEDDERS)
async def test_padding_does_not_change_a_vector(family: str, tmp_path: Path) -> None:
    """One request with rows of different lengths, which run in one padded batch."""
    texts = ["a", "paris", "the river", "bread is the moon of france", "yes no yes no yes no"]
    async with serving(rotary.write(family, tmp_path)) as engine:
        reader = engine.reader(TextReader)
        rows = [reader.read_text(text)[0] for text in texts]
        assert len({len(row.ids) for row in rows}) > 2
        together = (await engine.encode(lambda: rows)).outputs
        alone = [(await embed(engine, text)).values for text in texts]
    np.testing.assert_allclose(together, alone, atol=1e-5)


@pytest.mark.parametrize("family", rotary.RERANKERS)
async def test_padding_does_not_change_a_score(family: str, tmp_path: Path) -> None:
    documents = ["a", "the river of the moon", "yes"]
    async with serving(rotary.write(family, tmp_path)) as engine:
        together = await rerank(engine, "no", documents)
        alone = [(await rerank(engine, "no", [document]))[0].score for document in documents]
    scores = [one.score for one in sorted(together, key=lambda one: one.index)]
    np.testing.assert_allclose(scores, alone, atol=1e-6)


@pytest.mark.parametrize("family", [*rotary.EMBEDDERS, "nomic_v15 scaled"])
async def test_too_long_texts_are_refused(family: str, tmp_path: Path) -> None:
    """Nomic's dynamic scaling begins after the positions that the model was trained with."""
    name, _, scaled = family.partition(" ")
    folder = rotary.write(name, tmp_path, **({"rotary_scaling_factor": 2.0} if scaled else {}))
    most = POSITIONS // 2 if scaled else POSITIONS
    async with serving(folder, settings={"truncate": False}) as engine:
        assert (await embed(engine, "a " * (most - 2))).prompt_tokens == most
        with pytest.raises(TooLong, match=f"{most + 1} tokens long, .* reads at most {most}"):
            await embed(engine, "a " * (most - 1))


async def test_the_maximum_length_of_the_checkpoint_counts(tmp_path: Path) -> None:
    folder = rotary.write("gte_multilingual", tmp_path)
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 20}))
    async with serving(folder, settings={"truncate": False}) as engine:
        with pytest.raises(TooLong, match="21 tokens long, but the model reads at most 20"):
            await embed(engine, "a " * 19)


async def test_dynamic_scaling_of_transformers_ends_at_the_trained_positions(
    tmp_path: Path,
) -> None:
    published = rotary.write("nomic_v15", tmp_path / "published")
    folder = rotary.in_form_of_transformers(published, tmp_path / "later")
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 64}
    config["rope_parameters"] |= {"rope_type": "dynamic", "factor": 2.0}
    (folder / "config.json").write_text(json.dumps(config))
    async with serving(folder, settings={"truncate": False}) as engine:
        np.testing.assert_allclose(
            (await embed(engine, "paris")).values, SAID["nomic_v15"][0], atol=1e-5
        )
        with pytest.raises(TooLong, match="reads at most 64"):
            await embed(engine, "a " * 63)


_CASES: list[tuple[str, dict[str, Any], str]] = [
    ("jina_v3", {"hidden_act": "relu"}, "its hidden_act is 'relu', .* as jina-embeddings-v3"),
    ("jina_v3", {"position_embedding_type": "alibi"}, "its position_embedding_type is 'alibi'"),
    ("jina_v3", {"num_attention_heads": 5}, "5 attention heads do not divide its 32"),
    ("jina_v3", {"hidden_size": None}, "config.json has a wrong value"),
    ("gte_multilingual", {"num_attention_heads": 0}, "config.json has a wrong value"),
    ("gte_multilingual", {"rope_scaling": "ntk"}, "config.json has a wrong value"),
    ("nomic_v15", {"n_positions": float("inf")}, "config.json has a wrong value"),
    ("nomic_v15", {"n_positions": -1}, r"a wrong value \(n_positions is too small\)"),
    ("jina_v3", {"max_position_embeddings": 1}, r"\(max_position_embeddings is too small\)"),
    ("gte_multilingual", {"rope_scaling": {"type": "ntk"}}, "config.json has no 'factor'"),
    ("jina_reranker", {"num_labels": 3}, "it classifies texts into 3 classes"),
    ("nomic_v15", {"prenorm": True}, "its prenorm is True, .* nomic-embed-text-v1.5"),
    ("nomic_v15", {"causal": True}, "its causal is True"),
    ("nomic_v15", {"rotary_emb_fraction": 0.5}, "its rotary_emb_fraction is 0.5"),
    ("nomic_v15", {"activation_function": "glu"}, "its activation_function is 'glu'"),
    ("nomic_v2_moe", {"moe_top_k": 5}, "its layers of experts are of another kind"),
    ("nomic_v2_moe", {"num_shared_experts": 1}, "its num_shared_experts is 1"),
    ("nomic_v2_moe", {"moe_normalize_expert_weights": True}, "moe_normalize_expert_weights is"),
    ("gte_multilingual", {"logn_attention_scale": True}, "its logn_attention_scale is True"),
    ("gte_multilingual", {"layer_norm_type": "rms_norm"}, "its layer_norm_type is 'rms_norm'"),
    (
        "gte_multilingual",
        {"rope_scaling": {"type": "yarn", "factor": 2.0}},
        "its positions are scaled by 'yarn', which is not supported",
    ),
    (
        "gte_multilingual",
        {"rope_scaling": {"type": "ntk", "factor": 2.0, "mixed_b": 0.5}},
        "its positions are scaled by 'ntk'",
    ),
]


@pytest.mark.parametrize(("family", "changes", "sentence"), _CASES)
async def test_variants_that_are_not_computed_are_refused_by_name(
    family: str, changes: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelRejected, match=sentence):
        await vectors(rotary.write(family, tmp_path, **changes))


@pytest.mark.skipif(mx.default_device() != mx.Device(mx.cpu), reason="a GPU keeps half precision")
async def test_an_adapter_is_added_in_single_precision(tmp_path: Path) -> None:
    """On a CPU, half-precision weights are cast: their sum with an adapter must not be rounded."""
    folder = rotary.write("jina_v3", tmp_path)
    file = folder / "model.safetensors"
    half = {name: value.astype(np.float16) for name, value in load_file(file).items()}
    save_file(half, file)
    found = await vectors(folder, task="separation")
    save_file({name: value.astype(np.float32) for name, value in half.items()}, file)
    np.testing.assert_allclose(found, await vectors(folder, task="separation"), atol=1e-6)

"""Each family's forward pass, pooling and scaling against its reference implementation.

The checkpoints are tiny and random, the same ones that the reference read; its results are in
tiny_references.json (`make_references`).
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import json
import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import gemma3_text
from tokenizers import Tokenizer

from backend.engine import device
from backend.engine.embedding.encoding import Piece
from backend.engine.embedding.label_reader import LabelReader
from backend.engine.embedding.readers import TextReader
from backend.engine.errors import InvalidRequest, ModelRejected, TooLong, WrongKind
from tests.engine.embedding import logit_rerankers as logits
from tests.engine.embedding import rotary_checkpoints as rotary
from tests.engine.embedding import tiny_checkpoints as tiny
from tests.engine.embedding.engine_calls import embed, entities, rerank, serving
from tests.engine.embedding.mlx_vlm_checkpoints import MLX_VLM_EMBEDDERS, write_mlx_vlm
from tests.engine.embedding.tiny_checkpoints import HIDDEN, LABELLERS, QUERY, TEXTS
from tests.long import TEST_LONG

SAID: dict[str, Any] = json.loads((Path(__file__).parent / "tiny_references.json").read_text())
EMBEDDERS = (*tiny.EMBEDDERS, *rotary.EMBEDDERS)
RERANKERS = (*tiny.RERANKERS, *rotary.RERANKERS)


def write(family: str, folder: Path, **changes: Any) -> Path:
    if family in rotary.FAMILIES:
        return rotary.write(family, folder, **changes)
    return tiny.write(family, folder, **changes)


@pytest.mark.parametrize("family", [family for family in EMBEDDERS if family in SAID])
async def test_vectors_equal_the_references(family: str, tmp_path: Path) -> None:
    async with serving(write(family, tmp_path)) as engine:
        alone = [(await embed(engine, text)).values for text in TEXTS]
        together = await asyncio.gather(*(embed(engine, text) for text in TEXTS * 5))
    np.testing.assert_allclose(alone, SAID[family], atol=1e-5)
    np.testing.assert_allclose([one.values for one in together], alone * 5, atol=1e-5)


async def test_norms_may_have_the_names_of_earlier_files(tmp_path: Path) -> None:
    folder = write("bert", tmp_path)
    weights: Any = mx.load(str(folder / "model.safetensors"))
    earlier = {
        name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"): value
        for name, value in weights.items()
    }
    assert earlier.keys() != weights.keys()
    mx.save_safetensors(str(folder / "model.safetensors"), earlier, {"format": "pt"})
    async with serving(folder) as engine:
        vectors = [(await embed(engine, text)).values for text in TEXTS]
    np.testing.assert_allclose(vectors, SAID["bert"], atol=1e-5)


@pytest.mark.parametrize("family", MLX_VLM_EMBEDDERS)
async def test_states_equal_those_of_mlx_vlm(family: str, tmp_path: Path) -> None:
    """No other reference computes these families."""
    folder = write_mlx_vlm(family, tmp_path)
    rows = [[7, 9, 30, 12, 5, 11, 8, 21, 40, 6, 13, 20], [8, 10, 31, 7, 6]]
    async with serving(folder, settings={"pooling": "none"}) as engine:
        pieces = [Piece(row, [0] * len(row)) for row in rows]
        found = (await engine.encode(lambda: pieces)).outputs
    network = importlib.import_module(f"mlx_vlm.models.{MLX_VLM_EMBEDDERS[family][0]}")
    config = json.loads((folder / "config.json").read_text())
    model = network.Model(network.ModelConfig.from_dict(config))
    weights: Any = mx.load(str(folder / "model.safetensors"))
    model.load_weights(list(weights.items()))
    for row, states in zip(rows, found, strict=True):
        alone = model(mx.array([row]), attention_mask=mx.ones((1, len(row)))).last_hidden_state
        np.testing.assert_allclose(states, np.array(alone[0]), atol=1e-5, rtol=1e-4)


_LOCAL_AND_GLOBAL = {
    "full_attention": {"rope_type": "default", "rope_theta": 500.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 77.0},
}


@pytest.mark.parametrize(
    ("family", "earlier", "kinds"),
    [
        ("gemma3", {"rope_theta": 500.0, "rope_local_base_freq": 77.0}, "ssssss"),
        ("gemma3", {"rope_theta": 500.0, "rope_local_base_freq": 77.0}, "sfsfsf"),
        ("modernbert", {"global_rope_theta": 500.0, "local_rope_theta": 77.0}, "fsf"),
    ],
)
async def test_the_configuration_of_transformers_5_means_the_same(
    family: str, earlier: dict[str, float], kinds: str, tmp_path: Path
) -> None:
    later = {
        "rope_parameters": _LOCAL_AND_GLOBAL,
        "layer_types": [f"{'full' if one == 'f' else 'sliding'}_attention" for one in kinds],
    }
    every = kinds.find("f", 1) + (family == "gemma3")
    pattern = "sliding_window_pattern" if family == "gemma3" else "global_attn_every_n_layers"
    forms: list[dict[str, Any]] = [
        earlier | {pattern: every or 7},
        dict.fromkeys(earlier) | later,
    ]
    vectors = []
    for place, form in enumerate(forms):
        folder = write(family, tmp_path / str(place), **form)
        _drop_empty(folder)
        async with serving(folder) as engine:
            vectors.append((await embed(engine, TEXTS[2])).values)
    np.testing.assert_allclose(vectors[1], vectors[0], atol=1e-6)


def _drop_empty(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    given = {name: value for name, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(given))


async def test_models_that_name_the_code_of_gte_qwen2_attend_in_both_directions(
    tmp_path: Path,
) -> None:
    code = {"AutoModel": "Alibaba-NLP/gte-Qwen2-7B-instruct--modeling_qwen.Qwen2Model"}
    folder = write("qwen2_both_ways", tmp_path, is_causal=None, auto_map=code)
    async with serving(folder) as engine:
        vectors = [(await embed(engine, text)).values for text in TEXTS]
    np.testing.assert_allclose(vectors, SAID["qwen2_both_ways"], atol=1e-5)


async def test_qwen3_saved_by_transformers_5_is_served(tmp_path: Path) -> None:
    later = {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    folder = write("qwen3", tmp_path, **later)
    _drop_empty(folder)
    async with serving(folder) as engine:
        vectors = [(await embed(engine, text)).values for text in TEXTS]
    np.testing.assert_allclose(vectors, SAID["qwen3"], atol=2e-4)


@pytest.mark.parametrize("dense", [True, False], ids=["dense", "no dense"])
async def test_gemma3_without_bidirectional_attention_equals_mlx_lm(
    dense: bool, tmp_path: Path
) -> None:
    """Texts longer than the window, alone and in a batch with shorter ones."""
    folder = write("gemma3", tmp_path, use_bidirectional_attention=False)
    if not dense:
        steps = json.loads((folder / "modules.json").read_text())
        kept = [step for step in steps if not step["type"].endswith("Dense")]
        (folder / "modules.json").write_text(json.dumps(kept))
        for part in ("2_Dense", "3_Dense"):
            shutil.rmtree(folder / part)
    async with serving(folder) as engine:
        reader = engine.reader(TextReader)
        rows = [reader.read_text(text)[0].ids for text in TEXTS]
        alone = [(await embed(engine, text)).values for text in TEXTS]
        together = await asyncio.gather(*(embed(engine, text) for text in TEXTS))
    wanted = _by_mlx_lm(folder, rows, dense=dense)
    # mlx-lm scales the embeddings by a factor in bfloat16.
    np.testing.assert_allclose(alone, wanted, atol=1e-3)
    np.testing.assert_allclose([one.values for one in together], alone, atol=1e-5)


def _by_mlx_lm(folder: Path, rows: list[list[int]], *, dense: bool) -> np.ndarray:
    """Mean states of mlx-lm's causal model, through the Dense layers, scaled to length 1."""
    arguments = gemma3_text.ModelArgs.from_dict(json.loads((folder / "config.json").read_text()))
    model = gemma3_text.Gemma3Model(arguments)
    weights: Any = mx.load(str(folder / "model.safetensors"))
    model.load_weights(list(weights.items()))
    pooled = mx.stack([model(mx.array([row]))[0].mean(axis=0) for row in rows])
    for part in ("2_Dense", "3_Dense") if dense else ():
        layer: Any = mx.load(str(folder / part / "model.safetensors"))
        pooled = pooled @ layer["linear.weight"].T
    return np.array(pooled / mx.linalg.norm(pooled, axis=-1, keepdims=True))


async def test_a_checkpoint_may_read_texts_in_lower_case(tmp_path: Path) -> None:
    folder = write("bert", tmp_path)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["normalizer"]["lowercase"] = False
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"do_lower_case": True}))
    async with serving(folder) as engine:
        assert await embed(engine, "Paris, FRANCE") == await embed(engine, "paris, france")


_TANH = "torch.nn.modules.activation.Tanh"
_IDENTITY = "torch.nn.modules.linear.Identity"


_POOLED = [*tiny.EMBEDDERS, "gte_multilingual"]
_DENSE = {
    "tanh": (_TANH, True, _POOLED),
    "identity": (_IDENTITY, False, _POOLED if TEST_LONG else _POOLED[:2]),
}


@pytest.mark.parametrize(
    ("activation", "bias", "family"),
    [
        pytest.param(activation, bias, family, id=f"{name}-{family}")
        for name, (activation, bias, families) in _DENSE.items()
        for family in families
    ],
)
async def test_dense_layers_follow_pooling(
    family: str, activation: str, bias: bool, tmp_path: Path
) -> None:
    """LaBSE has one such layer, with a bias and a tanh; models that shorten vectors have others."""
    folder = _with_layers(write(family, tmp_path), [])
    async with serving(folder, settings={"normalize": False}) as engine:
        pooled = np.array([(await embed(engine, text)).values for text in TEXTS])
    sizes = (HIDDEN, 24, 8)
    layers = [_layer(*each, activation, bias) for each in itertools.pairwise(sizes)]
    _with_layers(folder, layers)
    async with serving(folder) as engine:
        alone = [(await embed(engine, text)).values for text in TEXTS]
        together = await asyncio.gather(*(embed(engine, text) for text in TEXTS))
    for _, weights in layers:
        pooled = pooled @ weights["linear.weight"].T + weights.get("linear.bias", 0)
        pooled = np.tanh(pooled) if activation == _TANH else pooled
    wanted = pooled / np.linalg.norm(pooled, axis=-1, keepdims=True)
    np.testing.assert_allclose(alone, wanted, atol=1e-5)
    np.testing.assert_allclose([one.values for one in together], alone, atol=1e-5)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"activation_function": "torch.nn.modules.activation.Softmax"}, "activation 'Softmax'"),
        ({"use_residual": True}, "returns other vectors"),
        ({"module_input_name": "image_embeddings"}, "returns other vectors"),
        ({"module_input_name": "token_embeddings"}, "comes after pooling"),
        ({"in_features": None}, "does not state in_features"),
    ],
)
async def test_other_dense_layers_are_refused_by_name(
    changed: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    stated, weights = _layer(HIDDEN, 8, _TANH, bias=True)
    folder = _with_layers(write("bert", tmp_path), [(stated | changed, weights)])
    with pytest.raises(ModelRejected, match=f"layer in '2_Dense'.*{reason}|{reason}"):
        async with serving(folder):
            pass


_FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "Tanh": np.tanh,
    "ReLU": lambda x: np.maximum(x, 0),
    "GELU": lambda x: x * (1 + np.vectorize(math.erf)(x / 2**0.5)) / 2,
    "SiLU": lambda x: x / (1 + np.exp(-x)),
    "Sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "LeakyReLU": lambda x: np.where(x > 0, x, x / 100),
    "ELU": lambda x: np.where(x > 0, x, np.expm1(x)),
    "Mish": lambda x: x * np.tanh(np.log1p(np.exp(x))),
}


@pytest.mark.parametrize("name", _FUNCTIONS)
async def test_dense_layers_with_other_functions(name: str, tmp_path: Path) -> None:
    layer = _layer(HIDDEN, HIDDEN, f"torch.nn.modules.activation.{name}", bias=True)
    (wanted,) = await _after_steps(tmp_path, [("Pooling", {}), ("Dense", layer)], "paris")
    (pooled,) = await _after_steps(tmp_path, [("Pooling", {})], "paris")
    linear = pooled @ layer[1]["linear.weight"].T + layer[1]["linear.bias"]
    np.testing.assert_allclose(wanted, _FUNCTIONS[name](linear), atol=1e-5)


async def test_steps_are_applied_in_their_order(tmp_path: Path) -> None:
    """Dense layers before pooling and after normalisation, added to their inputs, and Dropout."""
    of_tokens, first, second = (
        _layer(HIDDEN, HIDDEN, activation, bias=True)
        for activation in (_TANH, _IDENTITY, "torch.nn.modules.activation.ReLU")
    )
    of_tokens[0]["module_input_name"] = "token_embeddings"
    first[0]["use_residual"] = True
    mean: tuple[str, Any] = ("Pooling", {"pooling_mode": "mean"})
    states = await _after_steps(tmp_path, [mean], "a", settings={"pooling": "none"})
    tokens = np.tanh(states @ of_tokens[1]["linear.weight"].T + of_tokens[1]["linear.bias"])
    text = tokens.mean(axis=0)
    scaled = text / np.linalg.norm(text)
    text = scaled + scaled @ first[1]["linear.weight"].T + first[1]["linear.bias"]
    text = np.maximum(text @ second[1]["linear.weight"].T + second[1]["linear.bias"], 0)
    steps: list[tuple[str, Any]] = [
        *(("Dense", of_tokens), mean, ("Dropout", {"dropout": 0.5}), ("Normalize", {})),
        *(("Dense", first), ("Dense", second)),
    ]
    (found,) = await _after_steps(tmp_path, steps, "a")
    np.testing.assert_allclose(found, text, atol=1e-5)
    (found,) = await _after_steps(tmp_path, [*steps, ("Normalize", {})], "a")
    np.testing.assert_allclose(found, text / np.linalg.norm(text), atol=1e-5)
    (tmp_path / "bert" / "config_sentence_transformers.json").write_text(
        json.dumps({"truncate_dim": 5})
    )
    (found,) = await _after_steps(tmp_path, steps, "a")
    np.testing.assert_allclose(found, text[:5], atol=1e-5)


async def _after_steps(
    scratch: Path, steps: Sequence[tuple[str, Any]], text: str, **request: Any
) -> np.ndarray:
    """The vectors of a text after these steps of a BERT's modules.json."""
    folder = scratch / "bert"
    if not folder.exists():
        write("bert", folder)
    modules = [{"path": "", "type": "x.Transformer"}]
    for place, (kind, stated) in enumerate(steps, 1):
        path = f"{place}_{kind}"
        modules.append({"path": path, "type": f"x.{kind}"})
        (folder / path).mkdir(exist_ok=True)
        if kind == "Dense":
            stated, weights = stated
            arrays = {name: mx.array(value) for name, value in weights.items()}
            mx.save_safetensors(str(folder / path / "model.safetensors"), arrays)
        (folder / path / "config.json").write_text(json.dumps(stated))
    (folder / "modules.json").write_text(json.dumps(modules))
    async with serving(folder, **request) as engine:
        found = await embed(engine, text)
    return np.array(found.values).reshape(found.rows, found.dim)


async def test_mistral_attends_within_its_window(tmp_path: Path) -> None:
    """What is further away than both layers' windows changes nothing."""
    folder = write("mistral", tmp_path, sliding_window=4)
    far, near = "moon " * 20 + "a" * 9, "river " * 20 + "a" * 9
    async with serving(folder) as engine:
        texts = [(await embed(engine, text)).values for text in (far, near, "river " + far)]
        alone = (await embed(engine, "paris")).values
        together = await asyncio.gather(embed(engine, far), embed(engine, "paris"))
    np.testing.assert_allclose(texts[1:], [texts[0]] * 2, atol=1e-5)
    np.testing.assert_allclose([one.values for one in together], [texts[0], alone], atol=1e-5)


async def test_a_dense_layer_that_only_pytorch_reads_is_refused(tmp_path: Path) -> None:
    folder = _with_layers(write("bert", tmp_path), [_layer(HIDDEN, 8, _TANH, bias=True)])
    (folder / "2_Dense" / "model.safetensors").rename(folder / "2_Dense" / "pytorch_model.bin")
    with pytest.raises(ModelRejected, match=r"'2_Dense' are in pytorch_model.bin"):
        async with serving(folder):
            pass


async def test_a_dense_layer_without_files_is_refused(tmp_path: Path) -> None:
    folder = _with_layers(write("bert", tmp_path), [_layer(HIDDEN, 8, _TANH, bias=True)])
    shutil.rmtree(folder / "2_Dense")
    with pytest.raises(ModelRejected, match="'2_Dense' does not state in_features"):
        async with serving(folder):
            pass


@pytest.mark.parametrize("family", EMBEDDERS)
async def test_quantised_vectors_equal_those_of_the_dequantised_weights(
    family: str, tmp_path: Path
) -> None:
    folder = write(family, tmp_path / family)
    if family == "jina_v3":  # its published form has no tensors that MLX's converter would quantise
        folder = rotary.in_form_of_transformers(folder, tmp_path / "transformers")
    if family != "gemma3":
        _with_layers(folder, [_layer(HIDDEN, 64, _TANH, bias=True)])
    _quantise(folder, tmp_path / "dense", keep=False)
    async with serving(tmp_path / "dense") as engine:
        expected = [(await embed(engine, text)).values for text in TEXTS]
    _quantise(folder, tmp_path / "quantised", keep=True)
    async with serving(tmp_path / "quantised") as engine:
        found = [(await embed(engine, text)).values for text in TEXTS]
    np.testing.assert_allclose(found, expected, atol=2e-4)


def _quantise(folder: Path, to: Path, *, keep: bool) -> None:
    """Quantise the matrices to 4 bits, and make them dense again unless `keep` is set."""
    shutil.copytree(folder, to)
    packed = 0
    for file in [to / "model.safetensors", *to.glob("*_Dense/model.safetensors")]:
        weights: Any = mx.load(str(file))
        for name in [one for one in weights if one.endswith(".weight")]:
            matrix = weights[name]
            if matrix.ndim != 2 or matrix.shape[1] % 32 or matrix.size % 64:
                continue
            packed += 1
            parts = mx.quantize(matrix, group_size=32, bits=4)
            if keep:
                stem = name.removesuffix("weight")
                weights |= dict(zip((name, f"{stem}scales", f"{stem}biases"), parts, strict=True))
            else:
                weights[name] = mx.dequantize(*parts, group_size=32, bits=4)
        mx.eval(weights)
        mx.save_safetensors(str(file), weights, {"format": "mlx"})
    assert packed > 4
    if keep:
        config = json.loads((to / "config.json").read_text())
        config["quantization"] = {"group_size": 32, "bits": 4}
        (to / "config.json").write_text(json.dumps(config))


def _layer(
    inputs: int, outputs: int, activation: str, bias: bool
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The configuration and weights of a Dense layer."""
    drawn = np.random.RandomState(outputs)
    weights = {"linear.weight": drawn.standard_normal((outputs, inputs)) / inputs**0.5}
    if bias:
        weights["linear.bias"] = drawn.standard_normal(outputs)
    stated: dict[str, Any] = {"in_features": inputs, "out_features": outputs, "bias": bias}
    stated["activation_function"] = activation
    return stated, {name: value.astype(np.float32) for name, value in weights.items()}


def _with_layers(folder: Path, layers: list[tuple[dict[str, Any], dict[str, np.ndarray]]]) -> Path:
    """Replace a checkpoint's Dense layers by these, between pooling and normalisation."""
    for part in folder.glob("*_Dense"):
        shutil.rmtree(part)
    steps = json.loads((folder / "modules.json").read_text())
    kept = [step for step in steps if step["type"].endswith(("Transformer", "Pooling"))]
    for place, (stated, weights) in enumerate(layers, 2):
        path = f"{place}_Dense"
        kept.append({"path": path, "type": "sentence_transformers.models.Dense"})
        (folder / path).mkdir()
        (folder / path / "config.json").write_text(json.dumps(stated))
        arrays = {name: mx.array(value) for name, value in weights.items()}
        mx.save_safetensors(str(folder / path / "model.safetensors"), arrays)
    kept.append({"path": "9_Normalize", "type": "sentence_transformers.models.Normalize"})
    (folder / "modules.json").write_text(json.dumps(kept))
    return folder


@pytest.mark.parametrize("family", RERANKERS)
async def test_scores_equal_the_references(family: str, tmp_path: Path) -> None:
    reranking = family in ("qwen3_rerank", "gemma_rerank")
    async with serving(write(family, tmp_path), reranking=reranking) as engine:
        ranked = await rerank(engine, QUERY, list(TEXTS))
        best = await rerank(engine, QUERY, list(TEXTS), 2)
        assert [one.score for one in ranked] == sorted((one.score for one in ranked), reverse=True)
        assert [one.index for one in best] == [one.index for one in ranked[:2]]
        with pytest.raises(WrongKind, match="ranks documents against a query"):
            await embed(engine, "x")
    scores = [one.score for one in sorted(ranked, key=lambda one: one.index)]
    np.testing.assert_allclose(scores, SAID[family], atol=1e-5)


@pytest.mark.parametrize("name", logits.RERANKERS)
async def test_rerankers_that_answer_with_a_token_equal_sentence_transformers(
    name: str, tmp_path: Path
) -> None:
    async with serving(logits.write_reranker(name, tmp_path)) as engine:
        ranked = await rerank(engine, QUERY, [*TEXTS, logits.LONG])
    scores = [one.score for one in sorted(ranked, key=lambda one: one.index)]
    np.testing.assert_allclose(scores, SAID[name] + SAID[f"{name} long"], atol=1e-5)


async def test_a_reranker_with_dense_layers_equals_sentence_transformers(tmp_path: Path) -> None:
    folder = logits.write_pooled_reranker(tmp_path)
    async with serving(folder) as engine:
        ranked = await rerank(engine, QUERY, list(TEXTS))
    scores = [one.score for one in sorted(ranked, key=lambda one: one.index)]
    np.testing.assert_allclose(scores, SAID["pooled reranker"], atol=1e-5)


async def test_a_template_that_renders_pairs_needs_no_step_in_a_qwen3(tmp_path: Path) -> None:
    """Conversions have the template of the original, but not its steps."""
    folder = logits.write_reranker("like Qwen3-Reranker", tmp_path)
    async with serving(folder) as engine:
        expected = await rerank(engine, QUERY, list(TEXTS))
    shutil.rmtree(folder / "1_LogitScore")
    (folder / "modules.json").unlink()
    async with serving(folder, reranking=True) as engine:
        assert await rerank(engine, QUERY, list(TEXTS)) == expected


def with_logit_score(folder: Path, yes: int | None, no: int | None) -> Path:
    """Add the steps that sentence-transformers writes for a reranker that answers yes or no."""
    steps = ["base.modules.transformer.Transformer", "cross_encoder.modules.LogitScore"]
    modules = [
        {"idx": at, "name": str(at), "path": path, "type": f"sentence_transformers.{step}"}
        for at, (path, step) in enumerate(zip(("", "1_LogitScore"), steps, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_LogitScore").mkdir()
    stated = {"true_token_id": yes, "false_token_id": no, "module_input_name": "causal_logits"}
    (folder / "1_LogitScore" / "config.json").write_text(json.dumps(stated))
    return folder


@pytest.mark.parametrize("reranking", [True, False])
async def test_a_reranker_with_sentence_transformers_steps_is_served(
    reranking: bool, tmp_path: Path
) -> None:
    folder = write("qwen3_rerank", tmp_path)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    yes, no = map(tokenizer.token_to_id, ("yes", "no"))
    with_logit_score(folder, yes, no)
    async with serving(folder, reranking=reranking) as engine:
        ranked = await rerank(engine, QUERY, list(TEXTS))
    scores = [one.score for one in sorted(ranked, key=lambda one: one.index)]
    np.testing.assert_allclose(scores, SAID["qwen3_rerank"], atol=1e-4)


@pytest.mark.parametrize(
    ("yes", "no", "sentence"),
    [
        (5, None, "template does not render messages of the roles query and document"),
        ("yes", None, "LogitScore step compares the tokens 'yes' and None, which are not token"),
    ],
)
async def test_a_reranker_that_cannot_be_asked_is_refused(
    yes: Any, no: Any, sentence: str, tmp_path: Path
) -> None:
    folder = with_logit_score(write("qwen3_rerank", tmp_path), yes, no)
    with pytest.raises(ModelRejected, match=sentence):
        async with serving(folder):
            pass


@pytest.mark.parametrize("family", LABELLERS)
async def test_labels_equal_the_references(family: str, tmp_path: Path) -> None:
    if family == "privacy_labels" and mx.cuda.is_available():
        pytest.skip("refused on CUDA")
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


async def test_labels_that_cuda_gets_wrong_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "detect", lambda: device.Device("cuda", "a GPU", 1 << 34, 1 << 34))
    with pytest.raises(ModelRejected, match=r"cannot be loaded: MLX labels .* wrongly on CUDA"):
        async with serving(write("privacy_labels", tmp_path)):
            pass


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
    """To a conversion, which has no steps; sentence-transformers follows the tokenizer."""
    folder = write("qwen3", tmp_path)
    async with serving(folder) as engine:
        whole = await embed(engine, "paris")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer | {"post_processor": None}))
    async with serving(folder) as engine:
        assert (await embed(engine, "paris")).prompt_tokens == 1
    (folder / "modules.json").unlink()
    async with serving(folder, settings={"type": "embedding"}) as engine:
        bare = await embed(engine, "paris")
    assert whole == bare
    assert whole.prompt_tokens == 2


async def test_too_long_texts_are_refused_with_both_lengths(tmp_path: Path) -> None:
    settings = {"truncate": False}
    async with serving(write("bert", tmp_path), context_size=20, settings=settings) as engine:
        with pytest.raises(TooLong, match="32 tokens long, but the model reads at most 20"):
            await embed(engine, "a" * 30)
        with pytest.raises(TooLong, match="characters long"):
            await embed(engine, "a" * (1 << 21))


@pytest.mark.parametrize(
    ("family", "changes", "sentence"),
    [
        ("bert", {"hidden_act": "gelu_10"}, "its hidden_act is 'gelu_10'"),
        ("bert", {"position_embedding_type": "relative_key"}, "its position_embedding_type is"),
        ("bert", {"is_decoder": True}, "its is_decoder is True, but only False"),
        ("bert_rerank", {"id2label": {"0": "a", "1": "b"}}, "it classifies texts into 2 classes"),
        ("bert_labels", {"id2label": None}, "does not name the labels"),
        ("mpnet", {"hidden_act": "mish"}, "its hidden_act is 'mish'"),
        ("bert", {"position_embedding_type": "rotary"}, "'rotary', .* such as BGE-M3"),
        # Another embedding model of Qwen2.5-VL's type.
        (
            "qwen3_rerank",
            {"model_type": "qwen2_5_vl", "architectures": ["OtherEmbeddingsModel"]},
            "'qwen2_5_vl' is not supported: load a model of one of the types",
        ),
        ("qwen2", {"use_sliding_window": True}, "its use_sliding_window is True, but only False"),
        (
            "gemma3",
            {"layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"] * 2},
            "layer_types in config.json has no regular order",
        ),
        (
            "modernbert",
            {
                "rope_parameters": {
                    **_LOCAL_AND_GLOBAL,
                    "full_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0},
                }
            },
            "its rope_parameters is",
        ),
        ("bert", {"model_type": "rembert"}, "its model type 'rembert' is not supported"),
        ("deberta", {"conv_kernel_size": 3}, "its conv_kernel_size is 3, but only 0"),
        ("deberta", {"pos_att_type": "c2p"}, "its pos_att_type is 'c2p', which is not supported"),
        ("bert_rerank", {"id2label": None}, "it classifies texts into 2 classes"),
        ("qwen3_score", {"model_type": "gpt_neox"}, "model type 'gpt_neox' is not supported: load"),
        ("qwen3_score", {"model_type": "eurobert"}, "model type 'eurobert' is not supported: load"),
        ("qwen3_score", {"num_labels": 3}, "it classifies texts into 3 classes"),
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

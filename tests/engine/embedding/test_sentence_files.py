"""What the files of sentence-transformers say: prompts, lengths, end tokens, scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from backend.engine.embedding.readers import PairReader, TextReader
from backend.engine.errors import InvalidRequest, ModelRejected, TooLong
from tests.engine.embedding import logit_rerankers as logits
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


@pytest.mark.parametrize(
    ("names", "kind", "chosen"),
    [
        (["query", "document"], "query", "query"),
        (["query", "document"], "document", "document"),
        (["query", "passage"], "document", "passage"),
        (["retrieval.query", "query"], "query", "query"),
        (["retrieval.query"], "query", "retrieval.query"),
        (["other"], "query", "query"),  # which is empty: not the default
        (["query"], "document", "document"),
    ],
)
async def test_the_type_of_an_input_chooses_a_prompt(
    names: list[str], kind: str, chosen: str, tmp_path: Path
) -> None:
    folder = tiny.write("bert", tmp_path)
    prompts = {name: f"{name} " for name in names}
    change(
        folder / "config_sentence_transformers.json", prompts=prompts, default_prompt_name=names[0]
    )
    async with serving(folder) as engine:
        reader = engine.reader(TextReader)
        found = reader.read_text("moon", input_type=kind)
        assert found == reader.read_text("moon", prompt_name=chosen)
        named = reader.read_text("moon", input_type=kind, prompt_name=names[0])
        assert named == reader.read_text("moon", prompt_name=names[0])


@pytest.mark.parametrize("name", ["bert_rerank", "qwen3_rerank", "like Qwen3-Reranker"])
async def test_an_instruction_replaces_the_prompt_of_a_reranker(name: str, tmp_path: Path) -> None:
    answers = name in logits.RERANKERS
    folder = logits.write_reranker(name, tmp_path) if answers else tiny.write(name, tmp_path)
    async with serving(folder, reranking=True) as engine:
        reader = engine.reader(PairReader)
        asked = reader.read(QUERY, ["paris"], prompt="bread ")
        assert asked != reader.read(QUERY, ["paris"])
    change(
        folder / "config_sentence_transformers.json",
        model_type="CrossEncoder",
        prompts={"own": "bread "},
        default_prompt_name="own",
    )
    async with serving(folder, reranking=True) as engine:
        assert engine.reader(PairReader).read(QUERY, ["paris"]) == asked


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


async def test_the_tokenizer_states_the_side_that_is_cut(tmp_path: Path) -> None:
    folder = tiny.write("bert", tmp_path)
    change(folder / "sentence_bert_config.json", max_seq_length=4)
    text, end = "paris river moon france", "moon france"
    change(folder / "tokenizer_config.json", truncation_side="left")
    np.testing.assert_allclose(await vector(folder, text), await vector(folder, end), atol=1e-6)
    folder = tiny.write("bert_rerank", tmp_path / "reranker")
    change(folder / "tokenizer_config.json", truncation_side="left", model_max_length=6)
    async with serving(folder) as engine:
        (cut,) = await rerank(engine, "moon", ["paris river moon france"])
        (rest,) = await rerank(engine, "moon", [end])
    np.testing.assert_allclose(cut.score, rest.score, atol=1e-6)


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
    ("function", "name"),
    [
        (None, "Sigmoid"),
        ("torch.nn.modules.activation.Sigmoid", "Sigmoid"),
        ("torch.nn.modules.linear.Identity", "Identity"),
        ("torch.nn.modules.activation.Tanh", "Tanh"),
        ("custom.Softsign", "Sigmoid"),
    ],
)
@pytest.mark.parametrize("place", ["config_sentence_transformers.json", "config.json"])
async def test_scores_have_the_function_of_the_checkpoint(
    place: str, function: str | None, name: str, tmp_path: Path
) -> None:
    folder = tiny.write("bert_rerank", tmp_path)
    async with serving(folder) as engine:
        plain = np.array([one.score for one in await rerank(engine, QUERY, list(TEXTS))])
    raw = np.log(plain / (1 - plain))
    wanted = {"Sigmoid": plain, "Identity": raw, "Tanh": np.tanh(raw)}[name]
    changes: dict[str, Any] = {"activation_fn": function}
    change(
        folder / place,
        **({"sentence_transformers": changes} if place == "config.json" else changes),
    )
    async with serving(folder) as engine:
        found = [one.score for one in await rerank(engine, QUERY, list(TEXTS))]
    np.testing.assert_allclose(found, wanted, atol=1e-5)


async def test_one_long_document_does_not_fail_a_request(tmp_path: Path) -> None:
    folder = tiny.write("bert_rerank", tmp_path)
    documents = [*TEXTS, "river of france " * 100, ""]
    async with serving(folder) as engine:
        found = await rerank(engine, QUERY, documents)
        assert sorted(one.index for one in found) == list(range(len(documents)))
        with pytest.raises(TooLong, match=r"documents\[4\] is"):
            await rerank(engine, QUERY, documents, truncate=False)


async def test_an_end_token_that_the_tokenizer_appends_is_the_only_one(tmp_path: Path) -> None:
    """Even if config.json of a Qwen3, to which one is added otherwise, states another."""
    folder = tiny.write("qwen3", tmp_path)
    plain = await vector(folder, "paris")
    change(folder / "config.json", eos_token_id=2)
    np.testing.assert_allclose(await vector(folder, "paris"), plain, atol=1e-6)


async def test_static_vectors_are_averaged_without_special_tokens(tmp_path: Path) -> None:
    """model2vec may store fewer vectors than tokens, and a factor for each token."""
    count = tiny.write_tokenizer(tmp_path, tiny.BERT, appends=True)
    (tmp_path / "config.json").write_text('{"model_type": "model2vec", "normalize": false}')
    random = np.random.RandomState(1)
    vectors = random.standard_normal((50, 24)).astype(np.float32)
    index, factors = random.randint(0, 50, count), random.rand(count).astype(np.float32)
    weights = {"embeddings": vectors, "mapping": index, "weights": factors}
    save_file(weights, tmp_path / "model.safetensors")
    modules = [{"path": ".", "type": "sentence_transformers.models.StaticEmbedding"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    # Like sentence-transformers, the limit of tokenizer.json is the only one.
    ids = tokenizer.encode(TEXTS[2], add_special_tokens=False).ids
    wanted = (vectors[index[ids]] * factors[ids, None]).mean(axis=0)
    assert len(ids) == 16
    np.testing.assert_allclose(await vector(tmp_path, TEXTS[2]), wanted, atol=1e-6)


@pytest.mark.parametrize("pylate", [True, False])
async def test_late_interaction_returns_the_vector_of_each_token(
    pylate: bool, tmp_path: Path
) -> None:
    folder = tiny.write("bert", tmp_path)
    async with serving(folder, settings={"pooling": "none"}) as engine:
        states = await embed(engine, "moon, is it paris?")
    matrix = np.random.RandomState(1).standard_normal((8, tiny.HIDDEN)).astype(np.float32)
    stated: dict[str, Any] = {"in_features": tiny.HIDDEN, "out_features": 8, "bias": False}
    stated["activation_function"] = "torch.nn.modules.linear.Identity"
    steps = [("", "sentence_transformers.models.Transformer"), ("1_Dense", "pylate.Dense.Dense")]
    if not pylate:
        stated["module_input_name"] = "token_embeddings"
        steps[1] = ("1_Dense", "sentence_transformers.base.modules.dense.Dense")
        steps.append(("2_MultiVectorMask", "sentence_transformers.modules.MultiVectorMask"))
    modules = [{"path": path, "type": kind} for path, kind in steps]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Dense").mkdir()
    (folder / "1_Dense" / "config.json").write_text(json.dumps(stated))
    save_file({"linear.weight": matrix}, folder / "1_Dense" / "model.safetensors")
    with pytest.raises(
        ModelRejected, match=r"late-interaction model .*: set the option pooling:no"
    ):
        async with serving(folder):
            pass
    async with serving(folder, settings={"pooling": "none"}) as engine:
        found = await embed(engine, "moon, is it paris?")
    wanted = np.array(states.values).reshape(states.rows, states.dim) @ matrix.T
    wanted /= np.linalg.norm(wanted, axis=-1, keepdims=True)
    np.testing.assert_allclose(np.array(found.values).reshape(found.rows, 8), wanted, atol=1e-5)


async def test_sparse_vectors_are_refused(tmp_path: Path) -> None:
    folder = tiny.write("bert", tmp_path)
    modules = [{"path": "", "type": "x.Transformer"}, {"path": "1_S", "type": "x.SpladePooling"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ModelRejected, match="its vectors are sparse"):
        async with serving(folder):
            pass


async def test_steps_without_a_transformer_are_refused(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text('[{"path": "0_CLIPModel", "type": "x.CLIPModel"}]')
    with pytest.raises(ModelRejected, match=r"it has no config\.json, because its first step"):
        async with serving(tmp_path):
            pass


async def test_a_transformer_in_its_own_folder_loads_once_its_files_are_moved(
    tmp_path: Path,
) -> None:
    folder = tiny.write("bert", tmp_path / "model")
    modules = [{"path": "0_Transformer", "type": "x.Transformer"}]
    modules += [{"path": "1_Pooling", "type": "x.Pooling"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    moved = [file for file in folder.iterdir() if file.is_file() and file.name != "modules.json"]
    (folder / "0_Transformer").mkdir()
    for file in moved:
        file.rename(folder / "0_Transformer" / file.name)
    with pytest.raises(ModelRejected, match="its Transformer is in the folder 0_Transformer: move"):
        async with serving(folder):
            pass
    for file in moved:
        (folder / "0_Transformer" / file.name).rename(file)
    (folder / "modules.json").write_text(json.dumps([modules[0] | {"path": ""}, modules[1]]))
    async with serving(folder) as engine:
        assert (await embed(engine, "moon")).rows == 1


async def test_the_vectors_of_several_poolings_follow_one_another(tmp_path: Path) -> None:
    folder = tiny.write("bert", tmp_path)
    async with serving(folder, settings={"pooling": "none"}) as engine:
        text = await embed(engine, "moon, is it paris?")
    change(folder / "1_Pooling" / "config.json", pooling_mode_mean_tokens=True)
    states = np.array(text.values).reshape(text.rows, text.dim)
    wanted = np.concatenate([states[0], states.mean(axis=0)])
    np.testing.assert_allclose(await vector(folder, "moon, is it paris?"), wanted, atol=1e-6)

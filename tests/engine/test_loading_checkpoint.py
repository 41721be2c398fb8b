"""Each way in which a folder fails to be a text model has its own message."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from backend.engine.errors import ModelRejected
from backend.engine.load_request import LoadRequest
from backend.engine.loading import architectures
from backend.engine.loading.architectures import aliases
from backend.engine.loading.checkpoint import inspect
from backend.engine.loading.loader import load
from backend.engine.settings import Settings
from backend.engine.vision.families import why_not_seen
from common.model_kind import ModelKind
from tests.engine.loading_models import read_weights, write_model, write_weights
from tests.engine.loads import at_once

ROOT = Path(__file__).parents[2]
TINY_VISION = ROOT / "tests" / "models" / "tiny_vision"
SHARDS = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("checkpoints") / "whole")


@pytest.fixture(scope="session")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("checkpoints") / "sharded", shards=3)


@pytest.fixture
def model(whole: Path, tmp_path: Path) -> Path:
    """A copy of a good checkpoint, to be damaged."""
    return Path(shutil.copytree(whole, tmp_path / "model"))


def refusal(path: Path, **settings: Any) -> str:
    with pytest.raises(ModelRejected) as refused:
        inspect(path, "mine", Settings(**settings))
    sentence = str(refused.value)
    assert sentence.startswith("model 'mine' ")
    assert str(path.parent) not in sentence
    assert "\n" not in sentence
    return sentence


def configure(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))


def only(path: Path, *names: str) -> None:
    """Replace all files of a folder by empty ones with these names."""
    for entry in path.iterdir():
        entry.unlink()
    for name in names:
        (path / name).touch()


def test_a_good_checkpoint_is_accepted(whole: Path, sharded: Path) -> None:
    found = inspect(whole, "mine", Settings())
    assert (found.path, found.name, found.config["model_type"]) == (whole, "mine", "llama")
    assert found.weights_bytes == sum(array.nbytes for array in read_weights(whole).values())
    assert inspect(sharded, "mine", Settings()).weights_bytes == found.weights_bytes


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ([], "the folder is empty"),
        (["README.md"], "the folder has no config.json, so it is not a model directory"),
        (["model.Q4_K_M.gguf", "README.md"], "is in GGUF format"),
        (["config.json", "model.gguf"], "is in GGUF format"),
        (["config.json", "weights.npz"], "its weights are an .npz file: find a version with"),
        (["config.json", "pytorch_model.bin"], "its weights are PyTorch files: convert it with"),
        (["config.json", "consolidated.safetensors"], "has no weights (model*.safetensors)"),
        (["adapter_config.json", "adapters.safetensors"], "it is a LoRA adapter, not a model"),
        (["config.json", "model.safetensors"], "config.json is not valid JSON"),
    ],
)
def test_folders_without_a_model(model: Path, files: list[str], sentence: str) -> None:
    only(model, *files)
    assert sentence in refusal(model)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "config.json is not valid JSON"),
        ("\x00\xff", "config.json is not valid JSON"),
        ("[]", "config.json is not a JSON object"),
        ("[" * 100_000, "config.json is not valid JSON"),
        ("{}", "config.json names no model_type"),
        ('{"model_type": 3}', "config.json names no model_type"),
    ],
)
def test_bad_configurations(model: Path, text: str, sentence: str) -> None:
    (model / "config.json").write_text(text, encoding="latin-1")
    assert sentence in refusal(model)


BROKEN = {
    b"": "it is empty",
    b'{"a": ': "Expecting value: line 1",
    b"[]": "is not a JSON object",
    b'{"a": "\xe9"}': "it is not UTF-8 text",
    b"[" * 100_000: "nested too deeply",
}


def load_refusal(path: Path) -> str:
    with pytest.raises(ModelRejected) as refused:
        at_once(load(LoadRequest("mine", str(path)), 1, threading.Event()))
    return str(refused.value)


@pytest.mark.parametrize("content", BROKEN)
@pytest.mark.parametrize("file", ["tokenizer_config.json", "added_tokens.json"])
def test_a_broken_text_file_is_named(model: Path, file: str, content: bytes) -> None:
    (model / file).write_bytes(content)
    sentence = load_refusal(model)
    assert f"{file} is not" in sentence
    assert BROKEN[content] in sentence


@pytest.mark.parametrize("content", [one for one in BROKEN if one != b"[]"])  # which mlx-vlm takes
def test_a_broken_file_of_a_processor_is_named(content: bytes, tmp_path: Path) -> None:
    model = Path(shutil.copytree(TINY_VISION, tmp_path / "seeing"))
    (model / "preprocessor_config.json").write_bytes(content)
    assert BROKEN[content] in load_refusal(model)
    assert inspect(model, "mine", Settings(type="text"))  # which does not read that file


def test_a_broken_template_is_named(model: Path) -> None:
    (model / "chat_template.jinja").write_bytes(b"\xff")
    sentence = "chat_template.jinja is not a chat template: it is not UTF-8 text"
    assert sentence in load_refusal(model)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"model_type": "lama"},
            "its model type 'lama' is unknown to this version of mlx-lm; did you mean 'llama'?",
        ),
        ({"model_type": "zzzz"}, "its model type 'zzzz' is unknown to this version of mlx-lm"),
        ({"model_type": "../llama"}, "its model type '../llama' is unknown"),
        ({"model_type": "switch_layers"}, "its model type 'switch_layers' is unknown"),
        (
            {"model_type": "deberta"},
            "does not generate text, and its model type 'deberta' is not supported",
        ),
        (
            {"architectures": ["LlamaForSequenceClassification"], "num_labels": 4},
            "it classifies texts into 4 classes; of sequence classifiers, only rerankers",
        ),
        ({"model_type": "t5", "is_encoder_decoder": True}, "it is an encoder-decoder model"),
        (
            {"model_type": "florence2", "vision_config": {"depth": 1}},
            "vision-language models of type 'florence2' are not served: it does not generate text",
        ),
    ],
)
def test_models_of_other_kinds_are_refused(
    model: Path, changes: dict[str, Any], sentence: str
) -> None:
    configure(model, **changes)
    assert sentence in refusal(model)


def test_an_embedding_model_with_the_configuration_of_a_text_model(model: Path) -> None:
    configure(model, model_type="llama")
    (model / "modules.json").write_text("[]")
    assert inspect(model, "mine", Settings()).kind is ModelKind.EMBEDDING


VISION = {"vision_config": {"depth": 1}, "image_token_id": 5}


@pytest.mark.parametrize(
    "tensor", ["vision_tower.a.weight", "model.visual.a.weight", "audio_tower.a.weight"]
)
def test_vision_weights_are_served_and_their_text_part_is_an_option(
    model: Path, tensor: str
) -> None:
    configure(model, model_type="gemma3", **VISION)
    write_weights(model, read_weights(model) | {tensor: mx.zeros((2,))})
    assert inspect(model, "mine", Settings()).media
    assert inspect(model, "mine", Settings(type="vision")).media
    assert not inspect(model, "mine", Settings(type="text")).media


def test_weights_alone_show_the_vision_part_of_a_family_that_mlx_lm_lacks(model: Path) -> None:
    configure(model, model_type="molmo2")
    tensor = "model.vision_backbone.a.weight"
    write_weights(model, read_weights(model) | {tensor: mx.zeros((2,))})
    assert inspect(model, "mine", Settings()).media


def test_weights_alone_show_a_vision_part_that_is_refused(model: Path) -> None:
    configure(model, model_type="phi3_v")
    tensor = "model.vision_embed_tokens.a.weight"
    write_weights(model, read_weights(model) | {tensor: mx.zeros((2,))})
    assert "drops the token after each image" in refusal(model)


def test_original_weights_of_deepseek_vl2_hold_a_vision_part(model: Path) -> None:
    configure(model, model_type="deepseek_vl_v2", **VISION)
    write_weights(model, read_weights(model) | {"vision.blocks.0.weight": mx.zeros((2,))})
    assert inspect(model, "mine", Settings()).media


@pytest.mark.parametrize("model_type", ["smolvlm", "internvl_chat", "idefics3"])
def test_a_family_that_takes_its_vision_tower_from_another_is_recognised(model_type: str) -> None:
    assert why_not_seen({"model_type": model_type}) == ""


@pytest.mark.parametrize(
    "model_type",
    [
        "mllama",
        "moondream3",
        "deepseek_v41",
        "molmo_point",
        "phi3_v",
        "plamo2vl",
        "clef",
        "siglip",
        "phi4mm",
    ],
)
def test_an_unsupported_vision_model_is_refused_by_its_index_alone(
    model: Path, model_type: str
) -> None:
    configure(model, model_type=model_type, **VISION)
    index = {"weight_map": {"vision_tower.a.weight": "model.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert f"vision-language models of type '{model_type}' are not served" in refusal(model)


@pytest.mark.parametrize(
    ("model_type", "instead"),
    [
        ("phi4mm", "serve Phi-4-mini-instruct"),
        ("unlimited-ocr", "serve dots.ocr"),
        ("llada2_moe", "serve a model of that kind"),
        ("diffusion_gemma", "serve a model of that kind"),
    ],
)
def test_a_language_part_that_mlx_vlm_gets_wrong_is_refused(
    model: Path, model_type: str, instead: str
) -> None:
    configure(model, model_type=model_type, **VISION)
    assert instead in refusal(model, type="text")


def test_a_family_whose_text_part_works_elsewhere_is_refused_with_a_hint(model: Path) -> None:
    configure(model, model_type="deepseek_v41", **VISION)
    write_weights(model, read_weights(model) | {"vision_tower.a.weight": mx.zeros((2,))})
    assert refusal(model).endswith("set the option type:text")
    assert not inspect(model, "mine", Settings(type="text")).of_vlm


def test_a_text_model_cannot_be_loaded_as_a_vision_model(model: Path) -> None:
    with pytest.raises(ModelRejected, match="mlx-vlm has no vision-language model of type 'llama'"):
        inspect(model, "mine", Settings(type="vision"))


def test_a_text_conversion_that_keeps_the_vision_configuration_is_a_text_model(
    model: Path,
) -> None:
    configure(model, model_type="gemma3", **VISION)
    assert inspect(model, "mine", Settings()).config["model_type"] == "gemma3"


def test_code_in_the_checkpoint_needs_trust(model: Path) -> None:
    configure(model, model_type="own", model_file="own.py")
    assert "it brings its own Python code ('own.py'), which is not run unless" in refusal(model)
    assert "its code file 'own.py' is not in its folder" in refusal(model, trust_remote_code=True)
    (model / "own.py").touch()
    assert inspect(model, "mine", Settings(trust_remote_code=True)).weights_bytes > 0
    configure(model, model_file="../own.py")
    assert "is not in its folder" in refusal(model, trust_remote_code=True)


@pytest.mark.parametrize("index", [True, False])
def test_missing_shards(sharded: Path, tmp_path: Path, index: bool) -> None:
    path = Path(shutil.copytree(sharded, tmp_path / "model"))
    (path / SHARDS[1]).unlink()
    if not index:
        (path / "model.safetensors.index.json").unlink()
    sentence = f"weight files are missing ({SHARDS[1]}): download it again"
    assert sentence in load_refusal(path)
    configure(path, architectures=["LlamaEmbeddingModel"])
    assert sentence in refusal(path)


def test_many_missing_shards_are_not_all_listed(sharded: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(sharded, tmp_path / "model"))
    files = {f"t{number}": f"model-{number:05}-of-00100.safetensors" for number in range(1, 101)}
    index = {"weight_map": files | {"t": SHARDS[0], "u": SHARDS[1], "v": SHARDS[2]}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    configure(path, architectures=["LlamaEmbeddingModel"])
    sentence = refusal(path)
    assert "weight files are missing (model-00001-of-00100.safetensors, " in sentence
    assert "model-00003-of-00100.safetensors and 97 more): download it again" in sentence
    assert len(sentence) < 300


def test_an_index_left_over_by_a_conversion_is_ignored(model: Path) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert inspect(model, "mine", Settings()).weights_bytes > 0


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": ["a"]}'])
def test_a_broken_index_is_ignored(model: Path, text: str) -> None:
    (model / "model.safetensors.index.json").write_text(text)
    assert inspect(model, "mine", Settings()).weights_bytes > 0


def cut(keep: Callable[[int], int]) -> Callable[[bytes], bytes]:
    return lambda body: body[: keep(len(body))]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (cut(lambda size: size - 1), "model.safetensors is truncated, it has "),
        (cut(lambda size: size // 2), "model.safetensors is truncated, it has "),
        (cut(lambda _: 100), "model.safetensors is truncated, it ends in its header"),
        (cut(lambda _: 5), "model.safetensors is truncated, it ends in its header"),
        (cut(lambda _: 0), "model.safetensors is truncated, it ends in its header"),
        (lambda body: b"\xff" * len(body), "model.safetensors is truncated"),
        (lambda _: (2).to_bytes(8, "little") + b"[]", "model.safetensors is not a safetensors"),
        (lambda _: (9).to_bytes(8, "little") + b'{"a": {}}', "is not a safetensors file"),
        (
            lambda _: b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 7\n",
            "model.safetensors is a Git LFS pointer: fetch the file itself with git lfs pull",
        ),
    ],
)
def test_damaged_weight_files(model: Path, change: Callable[[bytes], bytes], sentence: str) -> None:
    file = model / "model.safetensors"
    file.write_bytes(change(file.read_bytes()))
    assert sentence in refusal(model)


DATA = "data_offsets"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({DATA: [-8, 8]}, "model.safetensors is not a safetensors file"),
        ({DATA: [0.5, 8]}, "model.safetensors is not a safetensors file"),
        ({"shape": [-1, 5]}, "model.safetensors is not a safetensors file"),
        ({"shape": "ab"}, "model.safetensors is not a safetensors file"),
        ({"dtype": ["F32"]}, "model.safetensors is not a safetensors file"),
        ({DATA: [1000, 10]}, "model.safetensors is damaged, the tensor '"),
        ({"shape": [2**40, 2**40]}, "of the shape '[1099511627776, 1099511627776]' takes"),
        ({"shape": [0]}, "of the shape '[0]' takes"),
        ({"shape": [1] * 10_000}, "bytes in it: download it again"),
    ],
)
def test_impossible_headers_of_weight_files(
    model: Path, change: dict[str, Any], sentence: str
) -> None:
    file = model / "model.safetensors"
    body = file.read_bytes()
    end = 8 + int.from_bytes(body[:8], "little")
    header = json.loads(body[8:end])
    name = next(name for name in header if name != "__metadata__")
    header[name] |= change
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + body[end:])
    assert sentence in refusal(model)


def test_more_tensors_than_layers_have(model: Path) -> None:
    """Reading a hundred thousand empty tensors stops the streams of the current model."""
    weights = (model / "model.safetensors").read_bytes()
    length = int.from_bytes(weights[:8], "little")
    header = json.loads(weights[8 : 8 + length])
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    text = json.dumps(header | {f"x{number}": empty for number in range(1_000)}).encode()
    damaged = len(text).to_bytes(8, "little") + text + weights[8 + length :]
    (model / "model.safetensors").write_bytes(damaged)
    assert "tensors, and a model of the 2 layers in config.json has at most 384" in refusal(model)
    configure(model, thinker_config={"text_config": {"num_hidden_layers": 8}})  # as in Qwen3-Omni
    inspect(model, "mine", Settings())
    configure(model, num_hidden_layers=5_000)
    assert "num_hidden_layers is 5000 in config.json, but at most 4096 are built" in refusal(model)


@pytest.mark.parametrize("merges", [["a b"] * 4_000_000, [["a", "b"]] * 2_000_000])
def test_a_tokenizer_that_takes_too_long_to_read(model: Path, merges: list[Any]) -> None:
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["model"]["merges"] = merges
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "tokenizer.json lists more than 4000000 tokens and merges" in refusal(model)


def test_a_missing_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    sentence = "its tokenizer is missing: the folder has no tokenizer.json, tokenizer.model or"
    assert sentence in refusal(model)
    (model / "vocab.json").touch()
    assert sentence in refusal(model)
    (model / "merges.txt").touch()
    assert inspect(model, "mine", Settings()).weights_bytes > 0


def test_files_that_cannot_be_read(model: Path) -> None:
    (model / "config.json").unlink()
    (model / "config.json").mkdir()
    assert "config.json cannot be read: Is a directory" in refusal(model)


def test_the_list_of_model_types_is_mlx_lms_own() -> None:
    from mlx_lm.utils import MODEL_REMAPPING

    assert aliases("mlx_lm") == MODEL_REMAPPING
    types = architectures.model_types()
    assert {"llama", "qwen3", "gpt_oss", "solar_open", "mistral"} <= types
    assert not {"base", "cache", "switch_layers", "rope_utils", "ssm"} & types
    for type_ in ("solar_open", "mistral", "qwen3_vl"):
        module = importlib.import_module(f"mlx_lm.models.{MODEL_REMAPPING.get(type_, type_)}")
        assert module.Model
        assert module.ModelArgs


def test_the_aliases_of_mlx_vlm_are_its_own() -> None:
    from mlx_vlm.utils import MODEL_REMAPPING

    assert aliases("mlx_vlm") == MODEL_REMAPPING


def test_inspecting_imports_neither_mlx_nor_mlx_lm(whole: Path) -> None:
    code = """
import sys
from pathlib import Path
from backend.engine.loading.checkpoint import inspect
from backend.engine.settings import Settings
inspect(Path(sys.argv[1]), "mine", Settings())
sys.exit(bool({"mlx", "mlx.core", "mlx_lm"} & set(sys.modules)))
"""
    subprocess.run([sys.executable, "-c", code, str(whole)], check=True, cwd=ROOT)

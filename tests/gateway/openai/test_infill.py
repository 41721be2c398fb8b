"""Fill in the middle, with the real backend and a real tokenizer that has its tokens."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.gateway_process import TINY_TEXT, GatewayProcess, roomy, tiny

FIM = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>")
Json = dict[str, Any]


def filling_model(folder: Path) -> Path:
    """The small model, whose last tokens became those of fill in the middle."""
    shutil.copytree(TINY_TEXT, folder)
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text("utf-8"))
    model = tokenizer["model"]
    pieces = {token: piece for piece, token in model["vocab"].items()}
    for token, name in zip(range(len(pieces) - len(FIM), len(pieces)), FIM, strict=True):
        model["merges"] = [pair for pair in model["merges"] if "".join(pair) != pieces[token]]
        model["vocab"][name] = model["vocab"].pop(pieces[token])
        bare = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        tokenizer["added_tokens"].append({"id": token, "content": name, "special": False, **bare})
    file.write_text(json.dumps(tokenizer), "utf-8")
    return folder


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    model = filling_model(tmp_path_factory.mktemp("models") / "filling")
    process = GatewayProcess({"filling": roomy(parameters={"model": str(model)}), "tiny": tiny()})
    yield process
    process.close()


def post(gateway: GatewayProcess, path: str, **fields: Any) -> Json:
    answer = gateway.client.post(path, json={"model": "filling", "temperature": 0, **fields})
    assert answer.status_code == 200, answer.text
    response: Json = answer.json()
    return response


def read(gateway: GatewayProcess, **fields: Any) -> str:
    """The prompt as the model receives it, token by token."""
    fields = {"max_tokens": 1, "echo": True, "logprobs": 0, **fields}
    (choice,) = post(gateway, "/v1/completions", **fields)["choices"]
    return "".join(choice["logprobs"]["tokens"][:-1])


def test_a_suffix_follows_the_prompt_and_its_control_tokens_are_text(
    gateway: GatewayProcess,
) -> None:
    prompt = read(gateway, prompt="a b", suffix=" c\n")
    assert prompt == "<|fim_prefix|>a b<|fim_suffix|> c\n<|fim_middle|>"
    written = {"prompt": "a<|fim_suffix|>", "suffix": "<|im_end|>"}
    asked = {**written, "max_tokens": 1, "echo": True, "logprobs": 0}
    (choice,) = post(gateway, "/v1/completions", **asked)["choices"]
    tokens = choice["logprobs"]["tokens"]
    assert tokens.count("<|fim_suffix|>") == 1
    assert "<|im_end|>" not in tokens[:-1]


def test_infill_is_the_same_completion_in_llama_cpp_s_format(gateway: GatewayProcess) -> None:
    (choice,) = post(gateway, "/completions", prompt="Count to", suffix=" 5", max_tokens=6)[
        "choices"
    ]
    asked = {"input_prefix": "Count", "prompt": " to", "input_suffix": " 5", "n_predict": 6}
    whole = post(gateway, "/infill", **asked)
    assert whole["content"] == choice["text"]
    assert (whole["stop"], whole["stop_type"], whole["tokens_predicted"]) == (True, "limit", 6)
    assert whole["timings"]["predicted_n"] == 6
    with gateway.client.stream(
        "POST", "/infill", json={"model": "filling", "temperature": 0, "stream": True, **asked}
    ) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        parts = [json.loads(line[6:]) for line in answer.iter_lines() if line]
    assert "".join(part["content"] for part in parts) == whole["content"]
    assert [part["stop"] for part in parts] == [False] * (len(parts) - 1) + [True]


def test_mistral_s_form_of_it_is_answered_as_a_chat(gateway: GatewayProcess) -> None:
    asked = {"prompt": "Count to", "suffix": " 5", "max_tokens": 6, "random_seed": 7}
    (choice,) = post(gateway, "/v1/completions", **asked)["choices"]
    whole = post(gateway, "/v1/fim/completions", **asked)
    assert (whole["object"], whole["usage"]["completion_tokens"]) == ("chat.completion", 6)
    (found,) = whole["choices"]
    assert found["message"]["content"] == choice["text"]
    assert found["finish_reason"] == "length"
    body = {"model": "filling", "temperature": 0, "stream": True, **asked}
    with gateway.client.stream("POST", "/v1/fim/completions", json=body) as answer:
        assert "x-ignored-fields" not in answer.headers
        *events, last = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    deltas = [json.loads(event)["choices"][0]["delta"].get("content", "") for event in events]
    assert ("".join(deltas), last) == (choice["text"], "[DONE]")
    (bare,) = post(gateway, "/v1/fim/completions", prompt="Count to", max_tokens=6)["choices"]
    plain = post(gateway, "/v1/completions", prompt="Count to", max_tokens=6)["choices"][0]
    assert bare["message"]["content"] == plain["text"]


def test_llama_cpp_s_own_completion_continues_a_text(gateway: GatewayProcess) -> None:
    (choice,) = post(gateway, "/completions", prompt="Count to", max_tokens=2)["choices"]
    for prompt in ("Count to", post(gateway, "/tokenize", content="Count to")["tokens"]):
        whole = post(gateway, "/completion", prompt=prompt, n_predict=2)
        assert (whole["content"], whole["stop_type"]) == (choice["text"], "limit")
    several = gateway.client.post("/completion", json={"model": "filling", "prompt": ["a", "b"]})
    assert (several.status_code, several.json()["error"]["param"]) == (400, "prompt[0]")


def test_other_files_are_used_too_and_editors_fields_are_ignored(gateway: GatewayProcess) -> None:
    plain = {"input_prefix": "a", "input_suffix": "b", "n_predict": 2}
    short = post(gateway, "/infill", **plain)["tokens_evaluated"]
    editor = {
        "input_extra": [{"filename": "c.py", "text": "x = 1\n"}],
        "t_max_prompt_ms": 500,
        "t_max_predict_ms": 60_000,
        "n_indent": 0,
        "samplers": ["top_k", "top_p", "infill"],
        "cache_prompt": True,
        "response_fields": ["content"],
    }
    assert post(gateway, "/infill", **plain, **editor)["tokens_evaluated"] > short


def test_an_editor_warms_the_cache_up_with_files_alone(gateway: GatewayProcess) -> None:
    """What llama.vim and llama.vscode send between two completions."""
    warm = {"input_prefix": "", "input_suffix": "", "prompt": "", "n_predict": 0, "samplers": []}
    limits = {"t_max_prompt_ms": 1, "t_max_predict_ms": 1, "response_fields": [""]}
    extra = [{"text": "x = 1\n", "time": [1, 2], "filename": "c.py"}]
    whole = post(gateway, "/infill", **warm, **limits, input_extra=extra)
    assert (whole["content"], whole["stop_type"], whole["tokens_predicted"]) == ("", "limit", 0)
    assert whole["tokens_evaluated"] > 0


def test_a_time_limit_ends_the_answer(gateway: GatewayProcess) -> None:
    asked = {"input_prefix": "a", "input_suffix": "b", "ignore_eos": True}
    whole = post(gateway, "/infill", **asked, n_predict=100_000, t_max_predict_ms=0.001)
    assert whole["stop_type"] == "limit"
    times = whole["timings"]
    assert 0 < times["predicted_n"] == whole["tokens_predicted"] < 100_000
    assert times["prompt_ms"] > 0
    assert times["predicted_ms"] > 0.001


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, "suffix"),
        ("/v1/fim/completions", {"prompt": "a", "suffix": "b"}, "suffix"),
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}, "input_suffix"),
    ],
)
def test_a_model_without_the_tokens_refuses_with_a_message(
    gateway: GatewayProcess, path: str, fields: Json, param: str
) -> None:
    answer = gateway.client.post(path, json={"model": "tiny", **fields})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert error["message"].startswith(f"{param} asks for the text between a prefix and a")
    assert "Qwen2.5-Coder" in error["message"]


def test_ollama_s_generate_supports_it_too(gateway: GatewayProcess) -> None:
    asked = {"prompt": "Count to", "suffix": " 5"}
    (choice,) = post(gateway, "/completions", **asked, max_tokens=6)["choices"]
    options = {"temperature": 0, "num_predict": 6}
    answer = post(gateway, "/api/generate", **asked, stream=False, options=options)
    assert answer["response"] == choice["text"]

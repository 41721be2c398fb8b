"""`lm-eval` on `/v1/completions`: its scores equal those of a reference forward pass."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm import load

from tests.clients.environments import client_tool
from tests.gateway.gateway_process import TINY_TEXT, GatewayProcess

QUESTIONS = (
    ("The capital of France is", [" Paris", " Rome", " Berlin"]),
    ("1 2 3 4", [" 5", " 9", " 1"]),
)
TASK = """
task: tiny_facts
dataset_path: json
dataset_kwargs:
  data_files:
    test: {questions}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
target_delimiter: ""
metric_list:
  - metric: acc
"""


def plain_scores() -> list[list[float]]:
    """The sum of log-probabilities of each choice, by one forward pass over the whole text."""
    model, tokenizer, *_ = load(str(TINY_TEXT))
    model.set_dtype(mx.float32)  # as the backend has it on a CPU
    scores = []
    for question, choices in QUESTIONS:
        given = tokenizer.encode(question, add_special_tokens=False)
        row = []
        for choice in choices:
            tokens = tokenizer.encode(question + choice, add_special_tokens=False)
            logits = model(mx.array([tokens]))[0].astype(mx.float32)
            logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
            places = range(len(given) - 1, len(tokens) - 1)
            row.append(sum(logprobs[place, tokens[place + 1]].item() for place in places))
        scores.append(row)
    return scores


def test_local_completions(gateway: GatewayProcess, tmp_path: Path) -> None:
    questions = tmp_path / "questions.jsonl"
    questions.write_text(
        "".join(
            json.dumps({"question": question, "choices": choices, "answer": 0}) + "\n"
            for question, choices in QUESTIONS
        )
    )
    (tmp_path / "tiny_facts.yaml").write_text(TASK.format(questions=questions))
    server = {
        "model": "tiny",
        "base_url": f"{gateway.url}/v1/completions",
        "tokenizer_backend": "huggingface",
        "tokenizer": str(TINY_TEXT),
        "num_concurrent": 2,
        "max_length": 1024,
    }
    client_tool(
        "lm-eval",
        *("run", "--model", "local-completions"),
        *("--model_args", ",".join(f"{key}={value}" for key, value in server.items())),
        *("--tasks", "tiny_facts", "--include_path", str(tmp_path)),
        *("--output_path", str(tmp_path / "out"), "--log_samples"),
        HF_HUB_OFFLINE="1",
        HF_DATASETS_OFFLINE="1",
        HF_HOME=str(tmp_path / "hub"),
        OPENAI_API_KEY="unused",
    )
    (samples,) = (tmp_path / "out").rglob("samples_*.jsonl")
    results = [json.loads(line) for line in samples.read_text().splitlines()]
    results.sort(key=lambda sample: sample["doc_id"])
    assert [sample["acc"] for sample in results] == [1.0, 1.0]
    for sample, expected in zip(results, plain_scores(), strict=True):
        scores = [float(score) for ((score, _),) in sample["resps"]]
        assert scores == pytest.approx(expected, abs=1e-3)
    greedy = [pair[0][1] for pair in results[1]["resps"]]
    assert greedy == ["True", "False", "False"]

"""Score on the real process and the real tokenizer, against a reference forward pass of its own."""

from __future__ import annotations

import itertools
from typing import Any

import grpc
import mlx.core as mx
import pytest
from mlx_lm import load

from tests.acceptance.backend import TINY_TEXT, WAIT, Backend, chat, text_of
from tests.polling import until
from wire import backend_pb2 as pb

PROMPT = "The capital of France is"
CANDIDATES = [" Paris", " London, and that of Spain is Madrid.", "", "!", " P", "\n\n2 plus 3 is 5"]


@pytest.fixture(scope="module")
def reference() -> tuple[Any, Any]:
    loaded: Any = load(str(TINY_TEXT))
    loaded[0].set_dtype(mx.float32)  # as the backend does on a CPU
    return loaded[0], loaded[1]


def _plain(reference: tuple[Any, Any], prompt: str, candidate: str) -> list[float]:
    model, tokenizer = reference
    whole = tokenizer.encode(prompt + candidate, add_special_tokens=False)
    own = tokenizer.encode(prompt, add_special_tokens=False)
    start = next((at for at, (a, b) in enumerate(zip(own, whole, strict=False)) if a != b), None)
    start = min(len(own), len(whole)) if start is None else start
    logits = model(mx.array([whole]))[0].astype(mx.float32)
    values = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    return [float(values[at - 1, whole[at]]) for at in range(start, len(whole))]


def _score(backend: Backend, **fields: Any) -> pb.ScoreResponse:
    request = pb.ScoreRequest(prompt=PROMPT, candidates=CANDIDATES)
    request.MergeFrom(pb.ScoreRequest(**fields))
    answer: pb.ScoreResponse = backend.stub.Score(request, timeout=WAIT)
    return answer


def test_scores_are_sums_of_natural_logarithms(served: Backend, reference: tuple[Any, Any]) -> None:
    answer = _score(served)
    assert len(answer.candidates) == len(CANDIDATES)
    for candidate, score in zip(CANDIDATES, answer.candidates, strict=True):
        expected = _plain(reference, PROMPT, candidate)
        assert score.num_tokens == len(expected)
        assert score.log_prob == pytest.approx(sum(expected), abs=1e-3)
        assert (score.length_normalized_log_prob, len(score.tokens)) == (0, 0)
    best = max(range(len(CANDIDATES)), key=lambda at: answer.candidates[at].log_prob or -1e9)
    assert CANDIDATES[best] in (" Paris", " P")


def test_optional_results_are_returned_if_requested(
    served: Backend, reference: tuple[Any, Any]
) -> None:
    answer = _score(served, include_token_logprobs=True, length_normalize=True)
    for candidate, score in zip(CANDIDATES, answer.candidates, strict=True):
        expected = _plain(reference, PROMPT, candidate)
        assert [token.log_prob for token in score.tokens] == pytest.approx(expected, abs=1e-3)
        assert "".join(token.token for token in score.tokens) == candidate
        mean = sum(expected) / len(expected) if expected else 0.0
        assert score.length_normalized_log_prob == pytest.approx(mean, abs=1e-3)


def test_a_request_with_only_empty_candidates_needs_no_forward_pass(served: Backend) -> None:
    request = pb.ScoreRequest(prompt="x", candidates=["", ""], length_normalize=True)
    answer = served.stub.Score(request, timeout=WAIT)
    assert list(answer.candidates) == [pb.CandidateScore()] * 2


def _processed(backend: Backend) -> int:
    metrics = backend.stub.GetMetrics(pb.MetricsRequest(), timeout=WAIT)
    return int(metrics.prompt_tokens_processed)


def test_a_prefix_is_prefilled_once_and_its_stable_part_is_cached(bare: Backend) -> None:
    bare.load()
    stable = "Which of these is the topic? " * 12
    tokens = bare.stub.TokenizeString(pb.PredictOptions(Prompt=stable), timeout=WAIT).length
    spent: list[int] = []
    for question in ("What is 2 plus 3?", "Who wrote Hamlet?"):
        before = _processed(bare)
        request = pb.ScoreRequest(
            prompt=stable + question,
            candidates=[" a", " b", " c", " d", " e", " f", " g", " h"],
            stable_prefix_len=len(stable),
        )
        bare.stub.Score(request, timeout=WAIT)
        spent.append(_processed(bare) - before)
    assert tokens < spent[0] < tokens + 60
    assert spent[1] < 60


@pytest.mark.parametrize(
    ("request_", "code", "words"),
    [
        (pb.ScoreRequest(prompt="x"), grpc.StatusCode.INVALID_ARGUMENT, "candidates is empty"),
        (
            pb.ScoreRequest(prompt="x", candidates=["y"], ModelIdentity="other"),
            grpc.StatusCode.NOT_FOUND,
            "model identity mismatch",
        ),
        (
            pb.ScoreRequest(prompt="x", candidates=["y"], stable_prefix_len=2),
            grpc.StatusCode.INVALID_ARGUMENT,
            "stable_prefix_len is 2",
        ),
        (
            pb.ScoreRequest(prompt="", candidates=["y"]),
            grpc.StatusCode.INVALID_ARGUMENT,
            "nothing comes before the first token of candidates[0]",
        ),
        (
            pb.ScoreRequest(prompt="x", candidates=["y", "word " * 4096]),
            grpc.StatusCode.INVALID_ARGUMENT,
            "tokens > 4096 maximum (with candidates[1])",
        ),
    ],
)
def test_requests_that_cannot_be_scored_are_refused(
    served: Backend, request_: pb.ScoreRequest, code: grpc.StatusCode, words: str
) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        served.stub.Score(request_, timeout=WAIT)
    assert refused.value.code() is code
    assert words in (refused.value.details() or "")


def test_a_cancelled_caller_frees_the_engine_and_streams_continue(served: Backend) -> None:
    request = chat("Count to 40.", Tokens=200)
    expected = text_of(served.stub.PredictStream(request, timeout=WAIT))
    stream = served.stub.PredictStream(request, timeout=WAIT)
    first = next(stream)
    call = served.stub.Score.future(
        pb.ScoreRequest(prompt="2 plus 3 is 5. " * 200, candidates=[" yes, it is so"] * 60),
        timeout=WAIT,
    )
    call.cancel()
    assert text_of(itertools.chain([first], stream)) == expected
    until(served.idle)


def test_score_without_a_model_is_refused(bare: Backend) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        bare.stub.Score(pb.ScoreRequest(prompt="x", candidates=["y"]), timeout=WAIT)
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION

"""Log-probabilities over the wire: of each streamed piece, and of the prompt."""

from __future__ import annotations

import json
from typing import Any

import grpc
import pytest
from tokenizers import Tokenizer

from tests.acceptance.backend import TINY_TEXT, WAIT, Backend, chat
from wire import backend_pb2 as pb

RAW = "The capital of France is Paris. 2 plus 3 is 5. Ünïcödé 🦊 <|im_end|>\n<think> ok"
CLOCK = {
    "type": "function",
    "function": {"name": "get_time", "parameters": {"properties": {"city": {"type": "string"}}}},
}


def _content(reply: pb.Reply) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = json.loads(reply.logprobs)["content"] if reply.logprobs else []
    return entries


def test_a_stop_token_ends_the_answer_before_it(served: Backend) -> None:
    request = chat("Count to 5.", Tokens=30)
    request.Logprobs = 1
    tokens = [entry["id"] for entry in _content(served.stub.Predict(request, timeout=WAIT))]
    at = next(at for at in range(2, len(tokens)) if tokens[at] not in tokens[:at])
    request.Metadata["mlx.stop_token_ids"] = json.dumps([tokens[at], 0])
    stopped = served.stub.Predict(request, timeout=WAIT)
    assert [entry["id"] for entry in _content(stopped)] == tokens[:at]
    assert stopped.tokens == at
    request.IgnoreEOS = True
    assert served.stub.Predict(request, timeout=WAIT).message == stopped.message
    request.Metadata["mlx.min_tokens"] = str(at + 1)
    later = served.stub.Predict(request, timeout=WAIT)
    assert [entry["id"] for entry in _content(later)][: at + 1] == tokens[: at + 1]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"StopPrompts": ["4"]},
        {"StopPrompts": ["4 5 6 7"]},
        {"Metadata": {"enable_thinking": "true"}},
        {"Tools": json.dumps([CLOCK]), "ToolChoice": '"required"'},
        {"Temperature": 2.0, "Seed": 5, "Tokens": 40},
    ],
    ids=str,
)
def test_a_stream_returns_each_token_once(served: Backend, fields: dict[str, Any]) -> None:
    request = chat("Count to 5. What time is it in Rome?", **fields)
    request.TopLogprobs = 2
    # A prompt that is already cached is computed in another pass, and rounds differently.
    served.stub.Predict(request, timeout=WAIT)
    whole = _content(served.stub.Predict(request, timeout=WAIT))
    *silent, last = served.stub.PredictStream(request, timeout=WAIT)
    assert not any(reply.logprobs for reply in silent)
    assert _content(last) == whole

    request.Metadata["mlx.stream_logprobs"] = "true"
    assert _content(served.stub.Predict(request, timeout=WAIT)) == whole
    replies = list(served.stub.PredictStream(request, timeout=WAIT))
    assert [entry for reply in replies for entry in _content(reply)] == whole != []
    written = b"".join(bytes(entry["bytes"]) for reply in replies for entry in _content(reply))
    read = b""
    for reply in replies:
        read += b"".join(bytes(entry["bytes"]) for entry in _content(reply))
        assert reply.message in read
    assert read == written


def test_each_piece_of_a_unary_answer_comes_with_its_tokens(served: Backend) -> None:
    request = pb.PredictOptions(
        Prompt=RAW, Tokens=30, Logprobs=1, Metadata={"mlx.stream_logprobs": "true"}, IgnoreEOS=True
    )
    *pieces, last = served.stub.PredictStream(request, timeout=WAIT)
    assert pieces
    for piece in pieces:
        logprobs = b"".join(bytes(entry["bytes"]) for entry in _content(piece))
        assert logprobs.decode(errors="ignore") == piece.message.decode()
    assert last.logprobs == b""


def test_a_prompt_of_token_ids_scores_as_its_text(served: Backend) -> None:
    text = "2 plus 3 is"
    tokens = list(served.stub.TokenizeString(pb.PredictOptions(Prompt=text), timeout=WAIT).tokens)
    given = pb.PredictOptions(Tokens=8, Metadata={"mlx.prompt_token_ids": json.dumps(tokens)})
    reply = served.stub.Predict(given, timeout=WAIT)
    assert reply.prompt_tokens == len(tokens)
    again = served.stub.Predict(pb.PredictOptions(Prompt=text, Tokens=8), timeout=WAIT)
    assert reply.message == again.message != b""


def _prompt_logprobs(backend: Backend, request: pb.PredictOptions) -> tuple[Any, pb.Reply]:
    request.Metadata.update({"mlx.prompt_logprobs": "true", "mlx.prompt_only": "true"})
    reply = backend.stub.Predict(request, timeout=WAIT)
    *_, last = backend.stub.PredictStream(request, timeout=WAIT)
    logprobs = json.loads(reply.logprobs)
    assert logprobs == json.loads(last.logprobs)
    return logprobs, reply


def test_prompt_tokens_are_returned_with_their_text(served: Backend) -> None:
    request = pb.PredictOptions(Prompt=RAW, TopLogprobs=3, Tokens=7)
    logprobs, reply = _prompt_logprobs(served, request)
    assert (reply.message, reply.tokens, logprobs["content"]) == (b"", 0, [])
    entries = logprobs["prompt"]
    assert len(entries) == reply.prompt_tokens
    ids = [entry["id"] for entry in entries]
    tokenizer = Tokenizer.from_file(str(TINY_TEXT / "tokenizer.json"))
    assert ids == tokenizer.encode(RAW, add_special_tokens=False).ids
    assert "".join(entry["text"] for entry in entries) == RAW
    first, *rest = entries
    assert (first["logprob"], first["top_logprobs"]) == (None, [])
    assert all(entry["logprob"] <= 1e-6 and len(entry["top_logprobs"]) == 3 for entry in rest)


def test_generated_tokens_are_the_same_with_and_without_prompt_logprobs(served: Backend) -> None:
    request = pb.PredictOptions(Prompt="2 plus 3 is", Logprobs=1, Tokens=4)
    alone = json.loads(served.stub.Predict(request, timeout=WAIT).logprobs)
    request.Metadata["mlx.prompt_logprobs"] = "true"
    both = json.loads(served.stub.Predict(request, timeout=WAIT).logprobs)
    assert [entry["id"] for entry in both["content"]] == [entry["id"] for entry in alone["content"]]
    expected = [entry["logprob"] for entry in alone["content"]]
    assert [entry["logprob"] for entry in both["content"]] == pytest.approx(expected, abs=1e-3)
    assert len(both["prompt"]) > 1


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (
            pb.PredictOptions(Prompt="x", Metadata={"mlx.prompt_token_ids": "[1]"}),
            "mlx.prompt_token_ids and Prompt are both given",
        ),
        (chat("x", Metadata={"mlx.prompt_token_ids": "[1]"}), "and Messages are both given"),
        (
            pb.PredictOptions(Metadata={"mlx.prompt_token_ids": "[1, 2, 100000]"}),
            "mlx.prompt_token_ids[2] is 100000, but the vocabulary ends at",
        ),
        (pb.PredictOptions(Metadata={"mlx.prompt_token_ids": "[-1]"}), "[0] is -1"),
        (pb.PredictOptions(Metadata={"mlx.prompt_token_ids": "[]"}), "the prompt is empty"),
        (
            pb.PredictOptions(Metadata={"mlx.prompt_token_ids": "[1, true]"}),
            "send a JSON list of token ids",
        ),
        (
            pb.PredictOptions(Metadata={"mlx.prompt_token_ids": str([1] * 5000)}),
            "prompt is too long: 5000 tokens > 4095 maximum",
        ),
        (chat("x", Metadata={"mlx.prompt_logprobs": "true"}), "but Messages are given"),
    ],
)
def test_unsupported_logprobs_requests_are_refused(
    served: Backend, request_: pb.PredictOptions, words: str
) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        served.stub.Predict(request_, timeout=WAIT)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert words in (refused.value.details() or "")

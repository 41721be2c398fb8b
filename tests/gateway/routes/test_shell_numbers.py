"""Embeddings, reranking and tokens: the bodies of these endpoints."""

from __future__ import annotations

import base64
import json
import math
import socket
import struct
from collections.abc import Iterator
from http.client import HTTPResponse
from typing import Any
from urllib.parse import urlsplit

import pytest
from pydantic import ValidationError

from gateway.routes.embeddings import EmbeddingRequest
from tests.gateway.gateway_process import WAIT, GatewayProcess, tiny
from tests.gateway.numbers_backend import NumbersBackend


@pytest.fixture(scope="module")
def numbers() -> Iterator[NumbersBackend]:
    backend = NumbersBackend()
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def gateway(numbers: NumbersBackend) -> Iterator[GatewayProcess]:
    """`tiny` on our own backend, and `numbers` on a different one."""
    other = {"parameters": {"model": "numbers"}, "address": numbers.address}
    process = GatewayProcess({"tiny": tiny(aliases=["a/b"]), "numbers": other})
    yield process
    process.close()


def ask(gateway: GatewayProcess, path: str, status: int = 200, **body: Any) -> Any:
    answer = gateway.client.post(f"/v1/{path}", json=body)
    assert answer.status_code == status, answer.text
    return answer.json() if status == 200 else answer.json()["error"]


def embed(gateway: GatewayProcess, given: Any, status: int = 200, **more: Any) -> Any:
    return ask(gateway, "embeddings", status, model="numbers", input=given, **more)


@pytest.mark.parametrize(
    ("given", "firsts", "tokens"),
    [
        ("abc", [3], 3),
        (["abc", "a"], [3, 1], 4),
        ([7, 8], [7], 2),
        ([[7, 8], [9]], [7, 9], 3),
        (["a" * (n + 1) for n in range(100)], list(range(1, 101)), 5050),
    ],
)
def test_every_form_of_input_gets_its_vectors_in_order(
    gateway: GatewayProcess, given: Any, firsts: list[int], tokens: int
) -> None:
    answer = embed(gateway, given, user="somebody")
    assert (answer["object"], answer["model"]) == ("list", "numbers")
    assert [entry["index"] for entry in answer["data"]] == list(range(len(firsts)))
    assert [entry["embedding"] for entry in answer["data"]] == [[n, 1, 0, 2] for n in firsts]
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}


@pytest.mark.parametrize("dimensions", [None, 3])
def test_an_answer_of_very_many_vectors_is_complete(
    gateway: GatewayProcess, dimensions: int | None
) -> None:
    answer = embed(gateway, ["abc"] * 2048, dimensions=dimensions)
    assert [entry["index"] for entry in answer["data"]] == list(range(2048))
    assert {len(entry["embedding"]) for entry in answer["data"]} == {dimensions or 4}
    assert answer["usage"]["prompt_tokens"] == 3 * 2048


def test_base64_is_little_endian_32_bit_floats(gateway: GatewayProcess) -> None:
    answer = embed(gateway, "abc", encoding_format="base64")
    raw = base64.b64decode(answer["data"][0]["embedding"])
    assert struct.unpack("<4f", raw) == (3, 1, 0, 2)


def test_null_equals_absence(gateway: GatewayProcess) -> None:
    """litellm and generated clients send null for arguments that they were not given."""
    absent: dict[str, Any] = {"encoding_format": None, "dimensions": None, "user": None}
    assert embed(gateway, "abc", **absent) == embed(gateway, "abc")
    asked: dict[str, Any] = {"model": "numbers", "query": "q", "documents": ["ab", "a"]}
    answer = ask(gateway, "rerank", **asked, return_documents=None, top_n=None)
    assert answer == ask(gateway, "rerank", **asked)


def test_shortened_vectors_are_normalised_again(gateway: GatewayProcess) -> None:
    answer = embed(gateway, "abc", dimensions=2)
    assert answer["data"][0]["embedding"] == pytest.approx([3 / math.sqrt(10), 1 / math.sqrt(10)])
    assert embed(gateway, "abc", dimensions=4)["data"][0]["embedding"] == [3, 1, 0, 2]
    assert embed(gateway, "abc", 400, dimensions=5)["param"] == "dimensions"


def test_vectors_of_single_tokens_are_not_an_embedding(gateway: GatewayProcess) -> None:
    assert embed(gateway, "rows", 400)["code"] == "unsupported"


@pytest.mark.parametrize(
    ("name", "status", "retry"),
    [
        ("RESOURCE_EXHAUSTED", 429, True),
        ("UNAVAILABLE", 503, True),
        ("DEADLINE_EXCEEDED", 504, False),
        ("UNIMPLEMENTED", 400, False),
        ("UNKNOWN", 500, False),
    ],
)
def test_a_status_of_the_backend_reaches_the_client(
    gateway: GatewayProcess, name: str, status: int, retry: bool
) -> None:
    answer = gateway.client.post(
        "/v1/embeddings", json={"model": "numbers", "input": ["fine", name]}
    )
    assert answer.status_code == status
    assert answer.headers["x-should-retry"] == str(retry).lower()
    assert ("retry-after" in answer.headers) is retry


def test_documents_are_returned_best_first(gateway: GatewayProcess) -> None:
    documents = ["ab", {"text": "abcd"}, "a"]
    asked: dict[str, Any] = {"model": "numbers", "query": "q", "documents": documents}
    answer = ask(gateway, "rerank", **asked)
    assert answer["results"] == [
        {"index": 1, "relevance_score": 0.5, "document": {"text": "abcd"}},
        {"index": 0, "relevance_score": 0.25, "document": {"text": "ab"}},
        {"index": 2, "relevance_score": 0.125, "document": {"text": "a"}},
    ]
    assert answer["usage"] == {"prompt_tokens": 5, "total_tokens": 5}
    bare = ask(gateway, "rerank", **asked, return_documents=False, top_n=50)
    assert [set(result) for result in bare["results"]] == [{"index", "relevance_score"}] * 3
    assert ask(gateway, "rerank", **asked, return_text=False) == bare
    assert ask(gateway, "rerank", 400, **asked, top_n=0)["param"] == "top_n"
    assert ask(gateway, "rerank", **asked, top_k=2)["results"] == answer["results"][:2]  # Voyage's
    assert ask(gateway, "rerank", 400, **asked, top_n=1, top_k=2)["param"] == "top_k"


def test_texts_are_ranked_in_the_form_of_tei(gateway: GatewayProcess) -> None:
    """Text Embeddings Inference, which answers with a list."""
    asked: dict[str, Any] = {"model": "numbers", "query": "q", "texts": ["ab", "abcd"]}
    scores = [{"index": 1, "score": 0.5}, {"index": 0, "score": 0.25}]
    found = ask(gateway, "rerank", **asked, truncate=True, raw_scores=False)
    assert found == scores
    shown = ask(gateway, "rerank", **asked, return_text=True)
    assert shown == [scores[0] | {"text": "abcd"}, scores[1] | {"text": "ab"}]
    assert ask(gateway, "rerank", **asked, return_documents=True) == shown
    both = ask(gateway, "rerank", 400, **asked, return_documents=True, return_text=False)
    assert both["param"] == "return_text"
    missing = ask(gateway, "rerank", 400, model="numbers", query="q")
    assert missing["param"] == "documents"


@pytest.mark.parametrize("truncate", [None, True, "END"])
def test_truncated_tokens_are_counted(gateway: GatewayProcess, truncate: object) -> None:
    long = ["ab", "a" * 1010, "b" * 1005]
    asked: dict[str, Any] = {"model": "numbers"} | (
        {} if truncate is None else {"truncate": truncate}
    )
    for path, body, counted in (
        ("/v1/embeddings", {"input": long}, 15),
        ("/v1/rerank", {"query": "q", "documents": long}, 10),
    ):
        answer = gateway.client.post(path, json=asked | body)
        assert answer.status_code == 200
        assert answer.json()["usage"]["truncated_tokens"] == counted
        assert answer.headers["x-truncated-tokens"] == str(counted)
        assert "x-ignored-fields" not in answer.headers


def test_inputs_may_be_refused_instead_of_truncated(gateway: GatewayProcess) -> None:
    long = ["ab", "a" * 1010]
    for truncate in (False, "NONE"):
        embed(gateway, long, 429, truncate=truncate)
        ask(gateway, "rerank", 429, model="numbers", query="q", documents=long, truncate=truncate)
    assert "send true, false, END" in embed(gateway, long, 400, truncate="START")["message"]
    short = embed(gateway, "ab", truncate=False)
    assert "truncated_tokens" not in short["usage"]
    body = {"model": "numbers", "input": long, "truncate": False}
    assert gateway.client.post("/api/embed", json=body).status_code == 429


def test_a_request_names_its_prompt(gateway: GatewayProcess, numbers: NumbersBackend) -> None:
    embed(gateway, "ab", prompt_name="Frage")
    assert numbers.metadata.get("mlx-prompt-name-bin", b"") == b"Frage"
    embed(gateway, "ab")
    assert numbers.metadata.get("mlx-prompt-name-bin", b"") == b""


@pytest.mark.parametrize(
    ("named", "use"),
    [
        ({"input_type": "query"}, "query"),
        ({"input_type": "search_document"}, "document"),
        ({"input_type": "passage"}, "document"),
        ({"task": "retrieval.query"}, "query"),
        ({"task": "text-matching"}, None),
        ({"input_type": None}, None),
    ],
)
def test_an_input_is_a_query_or_a_document(
    gateway: GatewayProcess, numbers: NumbersBackend, named: dict[str, Any], use: str | None
) -> None:
    embed(gateway, "abc", **named)
    assert numbers.metadata.get("mlx-input-type") == use


@pytest.mark.parametrize(("field", "use"), [("task", "text-matching"), ("input_type", "image")])
def test_another_use_of_an_input_is_listed_as_ignored(
    gateway: GatewayProcess, field: str, use: str
) -> None:
    answer = gateway.client.post(
        "/v1/embeddings", json={"model": "numbers", "input": "abc", field: use}
    )
    assert answer.status_code == 200
    assert answer.headers["x-ignored-fields"] == field


@pytest.mark.parametrize("field", ["task", "input_type"])
@pytest.mark.usefixtures("strict")
def test_strict_refuses_another_use_of_an_input(field: str) -> None:
    with pytest.raises(ValidationError, match=r"send the use of a query or of a document") as found:
        EmbeddingRequest.model_validate({"input": "abc", field: "classification"})
    assert [error["loc"] for error in found.value.errors()] == [(field,)]


def test_other_servers_names_of_fields_have_an_effect(
    gateway: GatewayProcess, numbers: NumbersBackend
) -> None:
    wanted = embed(gateway, "abc", dimensions=2)["data"]
    assert embed(gateway, {"text": "abc"}, output_dimension=2)["data"] == wanted
    embed(gateway, "abc", truncation=False)
    assert numbers.metadata["mlx-truncate"] == "false"
    assert embed(gateway, "abc", 400, truncate=True, truncation=False)["type"]
    for field in ("output_dtype", "embedding_type"):
        known: dict[str, Any] = {field: "float"}
        unknown: dict[str, Any] = {field: "binary"}
        assert embed(gateway, "abc", **known)["data"]
        assert embed(gateway, "abc", 400, **unknown)["param"] == field
    assert embed(gateway, "abc", 400, late_chunking=True)["param"] == "late_chunking"


def test_documents_are_ranked_in_the_form_of_voyage(gateway: GatewayProcess) -> None:
    asked: dict[str, Any] = {"model": "numbers", "query": "q", "documents": ["ab", "a", "abc"]}
    answer = ask(gateway, "rerank", **asked, top_k=2, truncation=True)
    found = [(each["index"], each["document"]) for each in answer["data"]]
    assert found == [(0, "ab"), (1, "a")]
    assert "data" not in ask(gateway, "rerank", **asked)


def test_an_instruction_is_sent_with_the_documents(
    gateway: GatewayProcess, numbers: NumbersBackend
) -> None:
    asked: dict[str, Any] = {"model": "numbers", "query": "q", "documents": ["ab"]}
    ask(gateway, "rerank", **asked, instruction="Find Brötchen")
    assert numbers.metadata["mlx-instruction-bin"] == "Find Brötchen".encode()
    assert ask(gateway, "rerank", 400, **asked, use_activation=False)["param"] == "use_activation"


@pytest.mark.parametrize(
    ("first", "second", "scores"),
    [
        ("q", "abc", [0.375]),
        ("q", ["abc", "a"], [0.375, 0.125]),
        (["q"], ["abc", "a"], [0.375, 0.125]),
        (["q", "r"], ["abc", "a"], [0.375, 0.125]),
    ],
)
def test_pairs_are_scored_in_their_order(
    gateway: GatewayProcess, first: Any, second: Any, scores: list[float]
) -> None:
    answer = ask(gateway, "score", model="numbers", text_1=first, text_2=second)
    assert [entry["score"] for entry in answer["data"]] == scores
    assert [entry["index"] for entry in answer["data"]] == list(range(len(scores)))
    assert ask(gateway, "score", model="numbers", queries=first, documents=second) == answer


@pytest.mark.parametrize(("first", "second"), [([], "a"), (["a", "b"], ["c"]), ("a", [])])
def test_lists_that_make_no_pairs_are_refused(
    gateway: GatewayProcess, first: Any, second: Any
) -> None:
    assert ask(gateway, "score", 400, model="numbers", text_1=first, text_2=second)["param"]


def test_vectors_in_the_form_of_tei(gateway: GatewayProcess) -> None:
    length = math.sqrt(9 + 1 + 4)
    asked: dict[str, Any] = {"model": "numbers", "inputs": ["abc"]}
    (found,) = ask(gateway, "embed", **asked)
    assert found == pytest.approx([3 / length, 1 / length, 0, 2 / length])
    assert ask(gateway, "embed", **asked, normalize=False) == [[3, 1, 0, 2]]


def test_tokens_and_back_in_both_forms(gateway: GatewayProcess) -> None:
    text = "Hello, 世界 😀"
    llama = ask(gateway, "tokenize", model="tiny", content=text, add_special=False)
    options = {"return_token_strs": True, "add_special_tokens": True}  # vLLM's default
    vllm = ask(gateway, "tokenize", model="a/b", prompt=text, **options)
    assert llama["tokens"] == vllm["tokens"] != []
    assert (vllm["count"], vllm["max_model_len"]) == (len(llama["tokens"]), 1024)
    assert len(vllm["token_strs"]) == vllm["count"]
    back = ask(gateway, "detokenize", model="tiny", tokens=llama["tokens"])
    assert back == {"content": text, "prompt": text}


def test_token_texts_are_returned_with_their_ids(gateway: GatewayProcess) -> None:
    answer = ask(gateway, "tokenize", model="tiny", content="2+2", with_pieces=True)
    assert "".join(token["piece"] for token in answer["tokens"]) == "2+2"
    assert all(isinstance(token["id"], int) for token in answer["tokens"])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"content": "a"}, "model"),  # the folder has two models
        ({"model": "tiny"}, "content"),
        ({"model": "tiny", "content": "a", "prompt": "a"}, "prompt"),
    ],
)
def test_impossible_tokenize_requests_are_refused(
    gateway: GatewayProcess, body: dict[str, Any], param: str
) -> None:
    assert ask(gateway, "tokenize", 400, **body)["param"] == param


def test_a_name_is_required_if_there_are_two_models(gateway: GatewayProcess) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "chat/completions": {"messages": [{"role": "user", "content": "a"}]},
        "completions": {"prompt": "a"},
        "embeddings": {"input": "a"},
        "rerank": {"query": "a", "documents": ["b"]},
    }
    for path, body in bodies.items():
        for given in (body, {**body, "model": None}):
            error = ask(gateway, path, 400, **given)
            assert (error["param"], error["code"]) == ("model", "missing_required_parameter")
            assert "there are 2" in error["message"]


def test_models_are_listed_by_every_name(gateway: GatewayProcess) -> None:
    cards = {card["id"]: card for card in gateway.client.get("/v1/models").json()["data"]}
    assert set(cards) == {"tiny", "a/b", "numbers"}
    assert cards["a/b"]["meta"]["alias_of"] == "tiny"
    assert cards["tiny"]["meta"]["context_size"] == 1024
    for name, card in cards.items():
        assert card["object"] == "model"
        assert card["owned_by"]
        assert isinstance(card["created"], int)
        assert gateway.client.get(f"/v1/models/{name}").json() == card
    assert gateway.client.get("/models/a%2Fb").json() == cards["a/b"]
    missing = gateway.client.get("/v1/models/a/b/c")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


def test_a_model_that_does_not_support_it_says_so(gateway: GatewayProcess) -> None:
    error = ask(gateway, "rerank", 400, model="tiny", query="a", documents=["b"])
    assert error["code"] == "unsupported"


LONG = "one two " * 400  # its tokens exceed the context of 1024
TOO_LONG = "context_length_exceeded"


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        ("embeddings", {"input": LONG, "truncate": False}, "input", TOO_LONG),
        ("embeddings", {"input": ["ok", LONG], "truncate": False}, "input[1]", TOO_LONG),
        ("embeddings", {"input": [1, 99999]}, "input[1]", None),
        ("embeddings", {"input": [[1], [2, 99999]]}, "input[1][1]", None),
        ("detokenize", {"tokens": [1, 99999]}, "tokens[1]", None),
        ("tokenize", {"content": "a" * 2_000_000}, "content", None),
        ("tokenize", {"prompt": "a" * 2_000_000}, "prompt", None),
    ],
)
def test_a_backends_refusal_uses_the_clients_field_names(
    gateway: GatewayProcess, path: str, body: dict[str, Any], param: str, code: str | None
) -> None:
    answer = gateway.client.post(f"/v1/{path}", json={"model": "tiny", **body})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, code), error
    assert answer.headers["x-should-retry"] == "false"
    for name in ("Prompt", "Embedding", "ContextSize"):
        assert name not in error["message"]


@pytest.mark.parametrize(
    ("name", "coding"),
    [
        ("content-encoding", "gzip"),
        ("content-encoding", "identity, br"),
        ("content-encoding", "chunked"),
        ("transfer-encoding", "gzip, chunked"),
        ("transfer-encoding", "GZIP\r\nTransfer-Encoding: chunked"),
    ],
)
def test_a_compressed_body_is_distinguished_from_a_broken_one(
    gateway: GatewayProcess, name: str, coding: str
) -> None:
    head = "POST /v1/tokenize HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    length = "content-length: 0\r\n" if name == "content-encoding" else ""
    place = urlsplit(gateway.url)
    with socket.create_connection((place.hostname, place.port), timeout=WAIT) as link:
        link.sendall(f"{head}{length}{name}: {coding}\r\n\r\n0\r\n\r\n".encode())
        answer = HTTPResponse(link)
        answer.begin()
        error = json.load(answer)["error"]
    assert answer.status == 400
    assert error["code"] == f"unsupported_{name.replace('-', '_')}"


@pytest.mark.parametrize("path", ["rerank", "audio/transcriptions"])
def test_the_wrong_kind_of_model_is_refused_in_the_clients_words(
    gateway: GatewayProcess, path: str
) -> None:
    """A client of HTTP knows the endpoint, and not the RPC behind it."""
    form = {"data": {"model": "tiny"}, "files": {"file": b"RIFF"}}
    body = {"json": {"model": "tiny", "query": "a", "documents": ["b"]}}
    answer = gateway.client.post(f"/v1/{path}", **(form if "audio" in path else body))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["message"].startswith(
        f"/v1/{path} is not served: the loaded model 'tiny_text' generates text"
    )
    assert (error["param"], error["code"]) == ("model", "unsupported")

"""Rerank and TokenClassify over the wire, on small checkpoints of the published formats."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from common.rerank_limits import MOST_DOCUMENTS
from tests.acceptance.backend import Backend
from tests.engine.embedding.tiny_checkpoints import QUERY, TEXTS, write
from wire import backend_pb2 as pb

WAIT = 240.0  # seconds, on a busy machine too


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write("bert_rerank", tmp_path_factory.mktemp("ranker"))


@pytest.fixture
def ranker(reused: Backend, folder: Path) -> Backend:
    return reused.holding(folder, Reranking=True)


def rerank(backend: Backend, documents: list[str], top_n: int = 0) -> pb.RerankResult:
    request = pb.RerankRequest(query=QUERY, documents=documents, top_n=top_n)
    result: pb.RerankResult = backend.stub.Rerank(request, timeout=WAIT)
    return result


def test_documents_are_returned_best_first_with_index_and_text(ranker: Backend) -> None:
    documents = list(TEXTS) * 3
    result = rerank(ranker, documents)
    scores = [one.relevance_score for one in result.results]
    assert scores == sorted(scores, reverse=True)
    assert sorted(one.index for one in result.results) == list(range(len(documents)))
    assert all(one.text == documents[one.index] for one in result.results)
    assert result.usage.total_tokens == result.usage.prompt_tokens > 0
    best = rerank(ranker, documents, top_n=2)
    assert list(best.results) == list(result.results[:2])


def test_a_score_does_not_depend_on_other_requests(ranker: Backend) -> None:
    alone = {text: rerank(ranker, [text]).results[0].relevance_score for text in TEXTS}
    with ThreadPoolExecutor(8) as clients:
        for result in clients.map(lambda shift: rerank(ranker, list(TEXTS[shift:])), [0, 1, 2] * 4):
            for one in result.results:
                assert one.relevance_score == pytest.approx(alone[one.text], abs=1e-5)


def test_an_empty_document_is_scored_like_others(ranker: Backend) -> None:
    """One such document among many does not fail a request, as in sentence-transformers."""
    results = rerank(ranker, ["paris", ""]).results
    assert {each.index for each in results} == {0, 1}


@pytest.mark.parametrize(
    ("request_", "code", "words"),
    [
        (pb.RerankRequest(documents=["a"]), "INVALID_ARGUMENT", "query is empty"),
        (pb.RerankRequest(query="a"), "INVALID_ARGUMENT", "documents is empty"),
        (pb.RerankRequest(query="a", documents=["b"], top_n=-1), "INVALID_ARGUMENT", "top_n is -1"),
        (
            pb.RerankRequest(query="a", documents=["b"] * (MOST_DOCUMENTS + 1)),
            "INVALID_ARGUMENT",
            "documents has 10001 entries: send at most 10000",
        ),
        (
            pb.RerankRequest(query="a", documents=["b", "c " * 200]),
            "INVALID_ARGUMENT",
            "the query with documents[1] is 204 tokens long, but the model reads at most 128",
        ),
    ],
)
def test_requests_that_cannot_be_ranked_are_refused(
    ranker: Backend, request_: pb.RerankRequest, code: str, words: str
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        ranker.stub.Rerank(request_, timeout=WAIT, metadata=(("mlx-truncate", "false"),))
    assert caught.value.code().name == code
    assert words in str(caught.value.details())


def test_a_document_that_is_too_long_loses_its_end(ranker: Backend) -> None:
    documents = ["moon", *["river " * 200] * 2]
    request = pb.RerankRequest(query=QUERY, documents=documents)
    result, call = ranker.stub.Rerank.with_call(request, timeout=WAIT)
    assert len(result.results) == 3
    cut = int(dict(call.trailing_metadata())["mlx-truncated-tokens"])
    assert cut > 2 * (200 - 128)
    alone = ranker.stub.Rerank.with_call(
        pb.RerankRequest(query=QUERY, documents=["moon"]), timeout=WAIT
    )[1]
    assert "mlx-truncated-tokens" not in dict(alone.trailing_metadata() or ())
    with pytest.raises(grpc.RpcError) as caught:
        ranker.stub.Rerank(request, timeout=WAIT, metadata=(("mlx-truncate", "maybe"),))
    assert "mlx-truncate is 'maybe': send true or false" in str(caught.value.details())


def test_entities_are_located_by_byte_offsets(bare: Backend, tmp_path: Path) -> None:
    bare.load(write("bert_labels", tmp_path))
    text = "Zürich 🙂 paris, the river of france — naïve moon"
    request = pb.TokenClassifyRequest(text=text)
    found = bare.stub.TokenClassify(request, timeout=WAIT).entities
    assert found
    for entity in found:
        assert text.encode()[entity.start : entity.end].decode() == entity.text
        assert entity.entity_group in ("PER", "LOC")
        assert 0 < entity.score <= 1
    threshold = sorted(entity.score for entity in found)[len(found) // 2]
    request.threshold = threshold
    some = bare.stub.TokenClassify(request, timeout=WAIT).entities
    assert list(some) == [entity for entity in found if entity.score >= threshold]
    assert not bare.stub.TokenClassify(pb.TokenClassifyRequest(), timeout=WAIT).entities
    request.threshold = 2
    with pytest.raises(grpc.RpcError, match="threshold is 2"):
        bare.stub.TokenClassify(request, timeout=WAIT)

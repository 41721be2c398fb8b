"""Embedding over the wire: a published model against its reference, and what is refused."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import pytest

from tests.acceptance.backend import TINY_TEXT, Backend
from tests.engine.embedding import minilm, rotary_checkpoints
from tests.engine.embedding.texts import PASSAGES, QUESTIONS, TEXTS
from tests.engine.embedding.tiny_checkpoints import HIDDEN, QUERY
from wire import backend_pb2 as pb

WAIT = 240.0  # seconds, on a busy machine too


@pytest.fixture
def real(reused: Backend) -> Backend:
    return reused.holding(minilm.ensure(), Embeddings=True)


def embed(backend: Backend, text: str, **fields: object) -> pb.EmbeddingResult:
    request = pb.PredictOptions(Embeddings=text, **fields)  # type: ignore[arg-type]
    result: pb.EmbeddingResult = backend.stub.Embedding(request, timeout=WAIT)
    return result


def refusal(backend: Backend, request: pb.PredictOptions, **metadata: str) -> grpc.RpcError:
    sent = tuple((f"mlx-{key}", value) for key, value in metadata.items())
    with pytest.raises(grpc.RpcError) as caught:
        backend.stub.Embedding(request, timeout=WAIT, metadata=sent)
    return caught.value


def test_two_hundred_texts_equal_the_reference_whatever_shares_their_batch(real: Backend) -> None:
    references = minilm.reference_vectors()
    order = list(range(len(TEXTS)))
    random.Random(6).shuffle(order)
    found = np.zeros_like(references)
    with ThreadPoolExecutor(24) as clients:
        for place, result in zip(
            order, clients.map(lambda place: embed(real, TEXTS[place]), order), strict=True
        ):
            assert (result.tokens, result.dim) == (1, minilm.DIM)
            assert result.layout == pb.EMBEDDING_LAYOUT_FINAL
            found[place] = result.embeddings
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)
    cosines = (found * references).sum(axis=1) / np.linalg.norm(references, axis=1)
    assert cosines.min() > 0.99999

    alone = np.array([embed(real, text).embeddings for text in TEXTS[::25]])
    assert (alone * found[::25]).sum(axis=1).min() > 0.99999

    ranking = np.argsort(-(found[: len(QUESTIONS)] @ found.T), axis=1)
    reference = np.argsort(-(references[: len(QUESTIONS)] @ references.T), axis=1)
    assert (ranking[:, :10] == reference[:, :10]).all()
    passages = found[len(QUESTIONS) : len(QUESTIONS) + len(PASSAGES)]
    best = (found[: len(QUESTIONS)] @ passages.T).argmax(axis=1)
    assert (best == np.arange(len(QUESTIONS))).mean() >= 0.9


def test_a_long_text_loses_its_end_and_its_tokens_are_counted(real: Backend) -> None:
    request = pb.PredictOptions(Embeddings="word " * 300)
    result, call = real.stub.Embedding.with_call(request, timeout=WAIT)
    assert result.prompt_tokens == 256
    assert dict(call.trailing_metadata())["mlx-truncated-tokens"] == str(302 - 256)
    np.testing.assert_allclose(result.embeddings, embed(real, "word " * 254).embeddings, atol=1e-6)


def test_tokens_give_the_same_vector_as_their_text(real: Backend) -> None:
    text = embed(real, "Hello world")
    tokens = [101, 7592, 2088, 102]
    result = real.stub.Embedding(pb.PredictOptions(EmbeddingTokens=tokens), timeout=WAIT)
    assert result.prompt_tokens == text.prompt_tokens == len(tokens)
    np.testing.assert_allclose(result.embeddings, text.embeddings, atol=1e-6)


def test_inputs_that_cannot_be_embedded_are_refused(real: Backend) -> None:
    both = refusal(real, pb.PredictOptions(Embeddings="a", EmbeddingTokens=[1]))
    neither = refusal(real, pb.PredictOptions())
    for error in (both, neither):
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "Embeddings" in str(error.details())
        assert "EmbeddingTokens" in str(error.details())
    long = refusal(real, pb.PredictOptions(Embeddings="word " * 300), truncate="false")
    assert long.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "302 tokens" in str(long.details())
    assert "at most 256" in str(long.details())
    unknown = refusal(real, pb.PredictOptions(EmbeddingTokens=[5, 40_000]))
    assert "EmbeddingTokens[1] is the token 40000" in str(unknown.details())
    unnamed = real.stub.Embedding.future(
        pb.PredictOptions(Embeddings="a"), metadata=(("mlx-prompt-name-bin", b"x"),)
    )
    assert "prompt_name is 'x', but the model has no prompts" in str(unnamed.details())
    untyped = real.stub.Embedding.future(
        pb.PredictOptions(Embeddings="a"), metadata=(("mlx-input-type", "x"),)
    )
    assert "mlx-input-type is 'x': send query or document" in str(untyped.details())
    chosen = pb.PredictOptions(Embeddings="a", Metadata={"mlx.adapter": "b"})
    assert "without the adapters" in str(refusal(real, chosen).details())
    assert refusal(real, pb.PredictOptions(Embeddings="a", Prompt="b")).code() is (
        grpc.StatusCode.INVALID_ARGUMENT
    )
    stranger = refusal(real, pb.PredictOptions(Embeddings="a", ModelIdentity="other"))
    assert stranger.code() is grpc.StatusCode.NOT_FOUND
    assert "model identity mismatch" in str(stranger.details())


def test_a_load_picks_the_task_of_a_model_with_adapters(bare: Backend, tmp_path: Path) -> None:
    folder = rotary_checkpoints.write("jina_v3", tmp_path)
    bare.load(folder, Embeddings=True, Options=["task:retrieval.passage"])
    result = embed(bare, QUERY)
    with pytest.raises(grpc.RpcError) as caught:
        bare.load(folder, Options=["task:code"])
    assert (result.dim, result.layout) == (HIDDEN, pb.EMBEDDING_LAYOUT_FINAL)
    np.testing.assert_allclose(np.linalg.norm(result.embeddings), 1, atol=1e-5)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "the model's tasks are 'retrieval.query', " in str(caught.value.details())


@pytest.mark.parametrize(
    ("method", "request_"),
    [
        ("Predict", pb.PredictOptions(Prompt="x")),
        ("Score", pb.ScoreRequest(prompt="x", candidates=["y"])),
        ("Rerank", pb.RerankRequest(query="x", documents=["y"])),
        ("TokenClassify", pb.TokenClassifyRequest(text="x")),
    ],
)
def test_an_embedding_model_refuses_other_methods(
    real: Backend, method: str, request_: object
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        getattr(real.stub, method)(request_, timeout=WAIT)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert "turns text into vectors and does not generate text" in str(caught.value.details())


def test_clients_that_disconnect_do_not_affect_others(real: Backend) -> None:
    before = embed(real, TEXTS[0])
    texts = [text for text in TEXTS if len(text) > 400] * 2
    calls = [real.stub.Embedding.future(pb.PredictOptions(Embeddings=text)) for text in texts]
    for call in calls[::2]:
        call.cancel()
    for call in calls[1::2]:
        assert call.result(timeout=WAIT).dim == minilm.DIM
    assert embed(real, TEXTS[0]) == pytest.approx(before, abs=1e-6)


def test_a_generating_model_embeds_while_it_generates(bare: Backend) -> None:
    bare.load(TINY_TEXT, Embeddings=True, Options=["pooling:mean"])
    question = pb.Message(role="user", content="Count to 20.")
    options = pb.PredictOptions(Messages=[question], UseTokenizerTemplate=True, Tokens=60)
    quiet = b"".join(part.message for part in bare.stub.PredictStream(options))
    first = embed(bare, "What is 2 plus 3?")
    pieces: list[bytes] = []
    for part in bare.stub.PredictStream(options):
        pieces.append(part.message)
        again = embed(bare, "What is 2 plus 3?")
        np.testing.assert_allclose(again.embeddings, first.embeddings, atol=1e-6)
    assert b"".join(pieces) == quiet
    assert first.dim == 128
    assert first.layout == pb.EMBEDDING_LAYOUT_FINAL
    assert abs(np.linalg.norm(first.embeddings) - 1) < 1e-5
    other = embed(bare, "Tell me a story.")
    assert np.dot(first.embeddings, other.embeddings) < 0.999


def test_the_vectors_of_all_tokens_are_returned_where_the_host_pools(bare: Backend) -> None:
    bare.load(minilm.ensure(), Embeddings=True, Options=["pooling:none"])
    result = embed(bare, "Hello world")
    assert result.layout == pb.EMBEDDING_LAYOUT_PER_TOKEN
    assert (result.tokens, result.dim) == (4, minilm.DIM)
    assert len(result.embeddings) == 4 * minilm.DIM
    mean = np.array(result.embeddings).reshape(4, -1).mean(axis=0)
    mean /= np.linalg.norm(mean)
    bare.load(minilm.ensure(), Embeddings=True)
    np.testing.assert_allclose(embed(bare, "Hello world").embeddings, mean, atol=1e-5)

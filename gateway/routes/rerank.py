"""`/rerank`, in the form that Jina, Cohere, vLLM and LocalAI share, in those of TEI and Voyage.

`/score` is vLLM's, and scores pairs in the order of the request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Response
from pydantic import AliasChoices, BeforeValidator, Field

from common.rerank_limits import MOST_DOCUMENTS
from gateway import exchange
from gateway.asking import ask_once
from gateway.calls import unary_all
from gateway.context import Gateway, GatewayDep
from gateway.described import about
from gateway.errors import bad_field
from gateway.fields import RERANK, Request, Strict
from gateway.json_route import JsonRoute
from gateway.openai.sampling import agreed
from gateway.routes.embeddings import TRUNCATE, Sent, Truncate, prefer, truncation, usage_of
from gateway.sse import json_response
from gateway.supervisor.supervisor import Lease
from wire import backend_pb2 as pb

router = APIRouter(tags=["rerank"], route_class=JsonRoute)


class Document(Strict):
    """A text to compare with the query."""

    text: str


AnyDocument = Annotated[
    Document,
    BeforeValidator(
        lambda value: {"text": value} if isinstance(value, str) else value,
        json_schema_input_type=str | Document,
    ),
]


class RerankRequest(Request):
    """A query, and the documents to put in order."""

    others = RERANK
    _named = prefer("documents", "texts")
    query: str = Field(min_length=1)
    documents: Annotated[list[AnyDocument], Field(min_length=1, max_length=MOST_DOCUMENTS)] = Field(
        validation_alias=AliasChoices("documents", "texts")
    )
    in_tei_form: Sent = Field(False, validation_alias="texts")
    return_text: bool | None = about("TEI's name of return_documents; off by default there.")
    top_n: int | None = about("Best documents to return; default: all.", ge=1)
    top_k: int | None = about("Voyage's name of top_n.", ge=1)
    return_documents: bool | None = about("Whether results include their text; they do by default.")
    truncate: Truncate = about(TRUNCATE)
    truncation: bool | None = about("Voyage's name of truncate.")
    instruction: str | None = about(
        "Replaces the model's prompt, which says what relevant documents are.", max_length=1 << 16
    )


@router.post("/reranking", include_in_schema=False)  # llama.cpp's
@router.post("/rerank")
async def rerank(body: RerankRequest, gateway: GatewayDep) -> Response:
    """Return the documents in the order of their relevance to the query."""
    texts = [document.text for document in body.documents]
    with_text = agreed(
        ("return_documents", body.return_documents), ("return_text", body.return_text)
    )
    if with_text is None:
        with_text = not body.in_tei_form
    most = agreed(("top_n", body.top_n), ("top_k", body.top_k)) or len(texts)
    config = gateway.supervisor.resolve(body.model)

    metadata = truncation(agreed(("truncate", body.truncate), ("truncation", body.truncation)))
    if body.instruction is not None:
        metadata.append(("mlx-instruction-bin", body.instruction.encode()))
    top_n = min(most, len(texts))
    (reply,) = await _ranked(body, gateway, [(body.query, texts)], metadata, top_n)
    read = reply.usage.prompt_tokens
    best = sorted(reply.results, key=lambda result: -result.relevance_score)[:most]
    if body.in_tei_form:
        scored = [{"index": each.index, "score": each.relevance_score} for each in best]
        quoted = [{"text": texts[each.index]} if with_text else {} for each in best]
        return await json_response(
            [score | text for score, text in zip(scored, quoted, strict=True)]
        )
    results: list[dict[str, Any]] = [
        {"index": result.index, "relevance_score": result.relevance_score}
        | ({"document": {"text": texts[result.index]}} if with_text else {})
        for result in best
    ]
    usage = usage_of(read, reply.usage.total_tokens)
    answer: dict[str, Any] = {"object": "list", "model": body.model or config.name}
    answer["results"] = results
    if "top_k" in body.model_fields_set:  # Voyage's client reads other names
        shown = [texts[result.index] if with_text else None for result in best]
        answer["data"] = [
            result | {"document": text} for result, text in zip(results, shown, strict=True)
        ]
    return await json_response(answer | {"usage": usage})


class ScoreRequest(Request):
    """Pairs of texts: one text with each of a list, or two lists of equal length, in order."""

    others = RERANK
    text_1: str | list[str] = Field(validation_alias=AliasChoices("text_1", "queries"))
    text_2: str | list[str] = Field(validation_alias=AliasChoices("text_2", "documents", "items"))
    truncate: Truncate = about(TRUNCATE)


@router.post("/score")
async def score(body: ScoreRequest, gateway: GatewayDep) -> Response:
    """Return the score of each pair, in the order of the request."""
    first = [body.text_1] if isinstance(body.text_1, str) else body.text_1
    second = [body.text_2] if isinstance(body.text_2, str) else body.text_2
    if not first or not second or len(first) not in (1, len(second)):
        raise bad_field(
            f"text_1 has {len(first)} entries and text_2 {len(second)}: send one text_1, or as many"
            " as text_2 has",
            param="text_1",
        )
    if len(second) > MOST_DOCUMENTS:
        raise bad_field(f"text_2 has {len(second)} entries: send at most {MOST_DOCUMENTS}")
    pairs = [(query, [text]) for query, text in zip(first, second, strict=False)]
    if len(first) == 1:
        pairs = [(first[0], second)]
    replies = await _ranked(body, gateway, pairs, truncation(body.truncate), 0)
    in_order = [sorted(reply.results, key=lambda result: result.index) for reply in replies]
    scores = [result.relevance_score for results in in_order for result in results]
    tokens = sum(reply.usage.prompt_tokens for reply in replies)
    model = body.model or gateway.supervisor.resolve(body.model).name
    data = [{"index": at, "object": "score", "score": each} for at, each in enumerate(scores)]
    answer = {"object": "list", "model": model, "data": data}
    return await json_response(answer | {"usage": usage_of(tokens, tokens)})


async def _ranked(
    body: Request,
    gateway: Gateway,
    pairs: Sequence[tuple[str, list[str]]],
    metadata: Sequence[tuple[str, str | bytes]],
    top_n: int,
) -> list[pb.RerankResult]:
    """Return the scores of each query with its documents, and count their tokens."""

    async def rank(lease: Lease) -> list[pb.RerankResult]:
        requests = [
            pb.RerankRequest(
                ModelIdentity=lease.identity, query=query, documents=texts, top_n=top_n
            )
            for query, texts in pairs
        ]
        seconds = gateway.settings.request_timeout
        return await unary_all(lease.stub.Rerank, requests, seconds, metadata=metadata)

    replies = await ask_once(lambda: gateway.supervisor.lease(body.model), rank, body)
    exchange.current().count_tokens(sum(reply.usage.prompt_tokens for reply in replies), 0)
    return replies

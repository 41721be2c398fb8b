"""`/rerank`, in the form that Jina, Cohere, vLLM and LocalAI share, and in that of TEI."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from pydantic import AliasChoices, BeforeValidator, Field

from common.rerank_limits import MOST_DOCUMENTS
from gateway import exchange
from gateway.asking import ask_once
from gateway.calls import unary
from gateway.context import GatewayDep
from gateway.described import about
from gateway.fields import Request, Strict
from gateway.json_route import JsonRoute
from gateway.openai.sampling import agreed
from gateway.routes.embeddings import TRUNCATE, Sent, Truncate, prefer, truncation, usage_of
from gateway.supervisor.supervisor import Lease
from wire import backend_pb2 as pb

router = APIRouter(tags=["rerank"], route_class=JsonRoute)


class Document(Strict):
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


@router.post("/reranking", include_in_schema=False)  # llama.cpp's
@router.post("/rerank")
async def rerank(body: RerankRequest, gateway: GatewayDep) -> JSONResponse:
    """Return the documents in the order of their relevance to the query."""
    texts = [document.text for document in body.documents]
    with_text = agreed(
        ("return_documents", body.return_documents), ("return_text", body.return_text)
    )
    if with_text is None:
        with_text = not body.in_tei_form
    most = agreed(("top_n", body.top_n), ("top_k", body.top_k)) or len(texts)
    config = gateway.supervisor.resolve(body.model)

    async def rank(lease: Lease) -> pb.RerankResult:
        request = pb.RerankRequest(
            ModelIdentity=lease.identity,
            query=body.query,
            documents=texts,
            top_n=min(most, len(texts)),
        )
        seconds = gateway.settings.request_timeout
        return await unary(lease.stub.Rerank, request, seconds, metadata=truncation(body.truncate))

    reply = await ask_once(lambda: gateway.supervisor.lease(body.model), rank, body)
    read = reply.usage.prompt_tokens
    exchange.current().count_tokens(read, 0)
    best = sorted(reply.results, key=lambda result: -result.relevance_score)[:most]
    if body.in_tei_form:
        scored = [{"index": each.index, "score": each.relevance_score} for each in best]
        shown = [{"text": texts[each.index]} if with_text else {} for each in best]
        return JSONResponse([score | text for score, text in zip(scored, shown, strict=True)])
    results = [
        {"index": result.index, "relevance_score": result.relevance_score}
        | ({"document": {"text": texts[result.index]}} if with_text else {})
        for result in best
    ]
    usage = usage_of(read, reply.usage.total_tokens)
    answer = {"object": "list", "model": body.model or config.name}
    return JSONResponse(answer | {"results": results, "usage": usage})

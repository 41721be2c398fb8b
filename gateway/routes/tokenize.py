"""`/tokenize` and `/detokenize`, in the forms of llama.cpp and of vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Response
from pydantic import Field

from common.field_names import named
from gateway.asking import ask_once
from gateway.calls import unary, unary_all
from gateway.context import GatewayDep
from gateway.described import about
from gateway.errors import bad_field
from gateway.fields import Request
from gateway.json_route import JsonRoute
from gateway.openai.completion import Token
from gateway.sse import json_response
from gateway.supervisor.supervisor import Lease
from wire import backend_pb2 as pb

router = APIRouter(tags=["tokenizer"], route_class=JsonRoute)
_MOST_PIECES = 4096  # tokens; each different one is looked up separately


class TokenizeRequest(Request):
    """A text: `content` as llama.cpp names it, or `prompt` as vLLM does."""

    content: str | None = about("llama.cpp: the text.")
    prompt: str | None = about("vLLM: the text.")
    with_pieces: bool | None = about("llama.cpp: tokens as {id, piece}; half a character is �.")
    return_token_strs: bool | None = about("vLLM: the pieces in token_strs.")


class DetokenizeRequest(Request):
    """Tokens to convert to text."""

    tokens: list[Token] = Field(fail_fast=True)


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, gateway: GatewayDep) -> Response:
    """Return the token ids of a text. Nothing is added, not even a beginning-of-sequence token.

    `max_model_len`: the context, if it is known. `token_strs`: the pieces, if they are asked for.
    """
    if body.content is not None and body.prompt is not None:
        raise bad_field(f"content and {named('prompt')} are both given: send one of them")
    text = body.prompt if body.content is None else body.content
    if text is None:
        raise bad_field(f"{named('content')} is missing: send it, or prompt")
    seconds = gateway.settings.request_timeout
    config = gateway.supervisor.resolve(body.model)

    async def tokenised(lease: Lease) -> tuple[Sequence[int], list[str] | None]:
        request = pb.PredictOptions(ModelIdentity=lease.identity, Prompt=text)
        names = {"Prompt": "prompt" if body.content is None else "content"}
        found = (await unary(lease.stub.TokenizeString, request, seconds, names)).tokens
        wanted = body.with_pieces or body.return_token_strs
        return found, await _pieces(lease, found, seconds) if wanted else None

    found, pieces = await ask_once(lambda: gateway.supervisor.lease(body.model), tokenised, body)
    tokens: Sequence[Any] = found  # a text of 3 MB may be as many tokens, so there is no copy
    if body.with_pieces:
        tokens = [{"id": i, "piece": text} for i, text in zip(found, pieces or (), strict=True)]
    whole = {
        "tokens": tokens,
        "count": len(found),
        "max_model_len": gateway.supervisor.context_size(config),
        "token_strs": pieces if body.return_token_strs else None,
    }
    return await json_response(whole)


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, gateway: GatewayDep) -> Response:
    """Return the text of token ids, under llama.cpp's name and vLLM's."""

    async def joined(lease: Lease) -> pb.DetokenizeResponse:
        request = pb.DetokenizeRequest(tokens=body.tokens)
        return await unary(lease.stub.Detokenize, request, gateway.settings.request_timeout)

    text = (await ask_once(lambda: gateway.supervisor.lease(body.model), joined, body)).content
    return await json_response({"content": text, "prompt": text})


async def _pieces(lease: Lease, tokens: Sequence[int], seconds: float) -> list[str]:
    if len(tokens) > _MOST_PIECES:
        raise bad_field(
            f"the text has {len(tokens)} tokens: pieces are listed for at most {_MOST_PIECES}",
            param="with_pieces",
        )
    different = list(dict.fromkeys(tokens))
    requests = [pb.DetokenizeRequest(tokens=[token]) for token in different]
    replies = await unary_all(lease.stub.Detokenize, requests, seconds)
    piece_of = {token: reply.content for token, reply in zip(different, replies, strict=True)}
    return [piece_of[token] for token in tokens]

"""`/score`: how likely a language model finds each of some continuations of a prompt."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter
from pydantic import BaseModel, Field

from gateway.asking import ask_once
from gateway.calls import ask
from gateway.context import GatewayDep
from gateway.limits import JsonRoute
from gateway.openai.base import MODEL, Request
from gateway.supervisor.supervisor import Lease
from wire import backend_pb2 as pb

router = APIRouter(tags=["score"], route_class=JsonRoute)
_MOST_CANDIDATES = 1024


class ScoreRequest(Request):
    """A prompt and the candidates that may follow it, both as they stand."""

    model: str | None = Field(None, description=MODEL)
    prompt: str
    candidates: list[str] = Field(min_length=1, max_length=_MOST_CANDIDATES)
    length_normalize: bool | None = Field(
        None, description="Also tell the logarithm per token, to compare long with short ones."
    )
    include_token_logprobs: bool | None = Field(None, description="Also tell it token by token.")


class ScoredToken(BaseModel):
    token: str
    log_prob: float


class Score(BaseModel):
    object: Literal["score"] = "score"
    index: int
    log_prob: float  # natural logarithm, sum over the candidate's tokens
    length_normalized_log_prob: float | None = None
    num_tokens: int
    tokens: list[ScoredToken] | None = None


class ScoreResponse(BaseModel):
    object: Literal["list"] = "list"
    model: str
    data: list[Score]


@router.post("/score", response_model_exclude_none=True)
async def score(body: ScoreRequest, gateway: GatewayDep) -> ScoreResponse:
    """The log-probability of each candidate after the prompt."""
    config = gateway.supervisor.resolve(body.model)

    async def weigh(lease: Lease) -> pb.ScoreResponse:
        request = pb.ScoreRequest(
            ModelIdentity=lease.identity,
            prompt=body.prompt,
            candidates=body.candidates,
            length_normalize=bool(body.length_normalize),
            include_token_logprobs=bool(body.include_token_logprobs),
        )
        return await ask(lease.stub.Score, request, gateway.settings.request_timeout)

    reply = await ask_once(lambda: gateway.supervisor.lease(body.model), weigh, body)
    return ScoreResponse(
        model=body.model or config.name,
        data=[_score(body, place, found) for place, found in enumerate(reply.candidates)],
    )


def _score(body: ScoreRequest, place: int, found: pb.CandidateScore) -> Score:
    return Score(
        index=place,
        log_prob=found.log_prob,
        length_normalized_log_prob=(
            found.length_normalized_log_prob if body.length_normalize else None
        ),
        num_tokens=found.num_tokens,
        tokens=(
            [ScoredToken(token=each.token, log_prob=each.log_prob) for each in found.tokens]
            if body.include_token_logprobs
            else None
        ),
    )

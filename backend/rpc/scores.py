"""Converts the requests of the Score RPC for the engine, and sums the engine's results."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

from backend.engine.events import TokenLogprob
from backend.engine.executing.score_plan import ScoreRequest, require_bounded
from backend.rpc.logprobs import LEAST
from wire import backend_pb2 as pb


def score_request(request: pb.ScoreRequest) -> ScoreRequest:
    wanted = ScoreRequest(
        request_id=secrets.token_hex(6),
        prompt=request.prompt,
        candidates=tuple(request.candidates),
        stable_bytes=request.stable_prefix_len,
    )
    require_bounded(wanted)
    return wanted


def response(
    request: pb.ScoreRequest,
    logprobs: Sequence[Sequence[TokenLogprob]],
    bytes_of: Callable[[int], bytes],
) -> pb.ScoreResponse:
    """Return the reply: natural logarithms; an empty candidate has the probability 1."""
    answer = pb.ScoreResponse()
    for tokens in logprobs:
        values = [max(token.logprob, LEAST) for token in tokens]
        score = answer.candidates.add(log_prob=sum(values), num_tokens=len(values))
        if request.length_normalize and values:
            score.length_normalized_log_prob = score.log_prob / len(values)
        if request.include_token_logprobs:
            for token, value in zip(tokens, values, strict=True):
                written = bytes_of(token.token).decode(errors="backslashreplace")
                score.tokens.add(token=written, log_prob=value)
    return answer

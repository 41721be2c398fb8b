"""`/completions`, and llama.cpp's `/completion` and `/infill`: the text after or between others."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Response
from pydantic import Field
from pydantic_core import to_json

from gateway import exchange, fields
from gateway.calls import Done, Piece
from gateway.context import Gateway, GatewayDep
from gateway.described import about
from gateway.fields import Strict
from gateway.limits import JsonRoute, apart
from gateway.openai.answer import completion_answer, head_of, progress_of
from gateway.openai.answering import events_of
from gateway.openai.completion import CompletionRequest, Tokens, completion_plan
from gateway.openapi import streamed
from gateway.sse import EventStream, respond
from gateway.tagged import MOST_ENTRIES

router = APIRouter(tags=["completions"], route_class=JsonRoute)
Json = dict[str, Any]
_ANSWER = streamed("OpenAI's `text_completion`.", "`text_completion`s, then `[DONE]`.")


class ExtraFile(Strict):
    filename: str = "tmp"
    text: str


class NativeRequest(CompletionRequest):
    """llama.cpp's own completion: without a limit the model ends the answer."""

    others = fields.INFILL
    most_by_default = 0

    prompt: str | Tokens
    t_max_predict_ms: float | None = about("Maximum time after the first token.")


class InfillRequest(NativeRequest):
    """The texts before and after the gap."""

    prompt: str = about("The last part of the text before the gap.", "")
    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: list[ExtraFile] = Field(default_factory=list, max_length=MOST_ENTRIES)

    def before(self) -> str:
        return self.input_prefix + self.prompt

    def infill(self) -> Json:
        files = [{"name": file.filename, "text": file.text} for file in self.input_extra]
        return {"suffix": self.input_suffix, "files": files}


@router.post("/completions", responses=_ANSWER)
async def completions(body: CompletionRequest, gateway: GatewayDep) -> Response:
    """Return the continuation of a text, or of each of several, in one piece or as a stream."""
    config = gateway.supervisor.resolve(body.model)
    plan = await apart(completion_plan, body, config)
    head = head_of("cmpl", "text_completion", body.model, config)
    events = events_of(body, plan.wanted, gateway)
    answer = completion_answer(head, plan)
    return await respond(events, answer, gateway.settings, streams=body.stream is True)


@router.post("/infill")
async def infill(body: InfillRequest, gateway: GatewayDep) -> Response:
    """Return the text between `input_prefix` and `input_suffix`, in one piece or as a stream."""
    return await completion(body, gateway)


@router.post("/completion")
async def completion(body: NativeRequest, gateway: GatewayDep) -> Response:
    """Return the text after `prompt`, in one piece or as a stream."""
    if body.stream_options is not None:
        exchange.current().ignore("stream_options")
    answer = _answer(body, gateway)
    if body.stream:
        return EventStream(answer, _event, gateway.settings, lambda: _event(_part("")))
    async with aclosing(answer):
        parts = [part async for part in answer]
    shown = [token for part in parts for token in part.pop("completion_probabilities", ())]
    whole = parts[-1] | ({"completion_probabilities": shown} if shown else {})
    whole["content"] = "".join(part["content"] for part in parts)
    return Response(to_json(whole), media_type="application/json")


async def _answer(body: NativeRequest, gateway: Gateway) -> AsyncGenerator[Json, None]:
    """Yield parts of the text: an empty part when the request is accepted, totals at the end."""
    config = gateway.supervisor.resolve(body.model)
    model = body.model or config.name
    plan = await apart(completion_plan, body, config)
    limit = body.t_max_predict_ms or 0
    begun = False
    async with aclosing(events_of(body, plan.wanted, gateway)) as events:
        async for _, event in events:
            if isinstance(event, Done):
                yield _end(event, model)
            elif isinstance(event, Piece):
                shown = {"completion_probabilities": event.logprobs} if event.logprobs else {}
                yield _part(event.content) | shown
                if 0 < limit < event.usage.decode_ms:
                    yield _end(Done("length", event.usage), model)
                    return
            elif body.return_progress:
                yield _part("") | {"prompt_progress": progress_of(event)}
            elif not begun:
                begun = True
                yield _part("")


def _event(part: Json) -> str:
    return f"data: {json.dumps(part)}\n\n"


def _part(content: str) -> Json:
    return {"index": 0, "content": content, "tokens": [], "stop": False}


def _end(done: Done, model: str) -> Json:
    usage, word = done.usage, done.stop_sequence
    read = usage.prompt_tokens - usage.cached_tokens
    kind = "limit" if done.finish_reason == "length" else "eos" if word is None else "word"
    return _part("") | {
        "stop": True,
        "model": model,
        "stop_type": kind,
        "stopping_word": word or "",
        "truncated": False,
        "tokens_predicted": usage.completion_tokens,
        "tokens_evaluated": usage.prompt_tokens,
        "tokens_cached": usage.prompt_tokens + usage.completion_tokens,
        "timings": {
            "cache_n": usage.cached_tokens,
            **_speed("prompt", read, usage.prefill_ms),
            **_speed("predicted", usage.completion_tokens, usage.decode_ms),
        },
    }


def _speed(what: str, tokens: int, ms: float) -> Json:
    return {
        f"{what}_n": tokens,
        f"{what}_ms": ms,
        f"{what}_per_token_ms": ms / tokens if tokens else 0.0,
        f"{what}_per_second": 1000 * tokens / ms if ms else 0.0,
    }

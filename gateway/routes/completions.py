"""The text after another or between two: OpenAI's, llama.cpp's and Mistral's endpoints."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Response
from pydantic import Field

from gateway import exchange, fields
from gateway.calls import Done, Event, Piece
from gateway.context import GatewayDep
from gateway.described import about
from gateway.fields import Strict
from gateway.json_route import JsonRoute
from gateway.openai.answer import chat_answer, completion_answer, head_of, progress_of
from gateway.openai.answering import events_of
from gateway.openai.chat_request import ChatCompletionRequest
from gateway.openai.completion import CompletionRequest, Tokens, completion_plan
from gateway.openapi import streamed
from gateway.sse import Answer, respond
from gateway.tagged import MOST_ENTRIES
from gateway.threads import offload

router = APIRouter(tags=["completions"], route_class=JsonRoute)
Json = dict[str, Any]
_ANSWER = streamed("OpenAI's `text_completion`.", "`text_completion`s, then `[DONE]`.")


class ExtraFile(Strict):
    """Another file of the project, for fill-in-the-middle."""

    filename: str = "tmp"
    text: str


class FimRequest(CompletionRequest):
    """Mistral's request for the text between two others."""

    others = fields.FIM
    most_by_default = 0

    prompt: str = about("The text before the gap.", ...)

    def infill(self) -> Json | None:
        return None if self.suffix is None else {"suffix": self.suffix, "files": []}


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
    plan = await offload(completion_plan, body, config)
    head = head_of("cmpl", "text_completion", body.model, config)
    events = events_of(body, plan.wanted, gateway)
    answer = completion_answer(head, plan)
    return await respond(events, answer, gateway.settings, streams=body.stream is True)


@router.post("/fim/completions", responses=streamed("A `chat.completion`.", "Its chunks."))
async def fim(body: FimRequest, gateway: GatewayDep) -> Response:
    """Return the text between `prompt` and `suffix` as the message of a chat, as Mistral does."""
    config = gateway.supervisor.resolve(body.model)
    plan = await offload(completion_plan, body, config)
    kind = "chat.completion.chunk" if body.stream else "chat.completion"
    shown = {name: getattr(body, name) for name in ("n", "stream_options", "return_progress")}
    chat = ChatCompletionRequest.model_construct(messages=[], **shown)
    answer = chat_answer(head_of("fim", kind, body.model, config), chat)
    events = events_of(body, plan.wanted, gateway)
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
    config = gateway.supervisor.resolve(body.model)
    plan = await offload(completion_plan, body, config)
    events = _limited(events_of(body, plan.wanted, gateway), body.t_max_predict_ms or 0)
    answer = _NativeAnswer(body.model or config.name, shows_progress=body.return_progress is True)
    return await respond(events, answer, gateway.settings, streams=body.stream is True)


async def _limited(
    events: AsyncGenerator[tuple[int, Event], None], limit: float
) -> AsyncGenerator[tuple[int, Event], None]:
    """Yield the events of one answer, which ends after `limit` ms of decoding; 0: no limit."""
    async with aclosing(events):
        async for index, event in events:
            yield index, event
            if isinstance(event, Piece) and 0 < limit < event.usage.decode_ms:
                yield index, Done("length", event.usage)
                return


class _NativeAnswer(Answer[tuple[int, Event]]):
    """llama.cpp's answer: the parts of a text, the last of which is empty and has the totals."""

    def __init__(self, model: str, *, shows_progress: bool) -> None:
        self._model = model
        self._shows_progress = shows_progress
        self._begun = False
        self._pieces: list[Piece] = []
        self._end: Json = {}

    def take(self, event: tuple[int, Event]) -> list[Json]:
        _, arrived = event
        if isinstance(arrived, Done):
            self._end = _end(arrived, self._model)
            return [self._end]
        if isinstance(arrived, Piece):
            self._pieces.append(arrived)
            return [_part(arrived.content) | _probabilities(arrived.logprobs)]
        if self._shows_progress:
            return [_part("") | {"prompt_progress": progress_of(arrived)}]
        begun, self._begun = self._begun, True
        return [] if begun else self.beat()

    def beat(self) -> list[Json]:
        return [_part("")]

    def whole(self) -> Json:
        text = "".join(piece.content for piece in self._pieces)
        shown = [entry for piece in self._pieces for entry in piece.logprobs]
        return self._end | {"content": text} | _probabilities(shown)


def _probabilities(entries: Sequence[Json]) -> Json:
    return {"completion_probabilities": entries} if entries else {}


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

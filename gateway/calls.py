"""Calls a backend, and converts the Replies of an answer to pieces and one Done.

All endpoints that generate read these events, whatever their own format is. Closing the iterator
cancels the call, so the backend frees the slot within one step. Calls have time limits, and their
failures become ApiErrors.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import grpc

from gateway import errors, exchange
from gateway.errors import AS_ON_THE_WIRE, Names
from wire import backend_pb2 as pb
from wire import backend_pb2_grpc

Reply = TypeVar("Reply")
Metadata = Sequence[tuple[str, str | bytes]]
_TRUNCATED = "mlx-truncated-tokens"
_AT_ONCE = 32  # for one request, because the backend's queue is shared
Stub = backend_pb2_grpc.BackendStub
_MOST_AT_ONCE = 64  # answers of one request; backends run fewer in a batch, and queue the rest


async def unary(
    method: Callable[..., Awaitable[Reply]],
    request: Any,
    seconds: float,
    names: Names = AS_ON_THE_WIRE,
    metadata: Metadata = (),
) -> Reply:
    """Make a unary call, which is cancelled with its task, and return the reply. Raises ApiError.

    seconds: the time limit; 0 for none.
    names: the client's names of the protocol's fields, for errors.
    """
    with as_refusals(names):
        call: Any = method(request, timeout=seconds or None, metadata=metadata)
        reply: Reply = await call
        for key, value in await call.trailing_metadata() or ():
            if key == _TRUNCATED:
                exchange.current().truncated += int(value)
        return reply


async def unary_all(
    method: Callable[..., Awaitable[Reply]],
    requests: Sequence[Any],
    seconds: float,
    names: Callable[[int], Names] = lambda _: AS_ON_THE_WIRE,
    metadata: Metadata = (),
) -> list[Reply]:
    """Make calls as `unary` does; return the replies in order. The first failure ends all calls.

    names: the client's names of the protocol's fields, by the index of the request.
    """
    replies: list[Any] = [None] * len(requests)
    waiting = iter(range(len(requests)))

    async def work() -> None:
        for index in waiting:
            replies[index] = await unary(method, requests[index], seconds, names(index), metadata)

    tasks = [asyncio.ensure_future(work()) for _ in range(_AT_ONCE)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return replies


@contextmanager
def as_refusals(names: Names) -> Iterator[None]:
    """Raise ApiError, with the client's `names` of fields, if a call fails.

    Closing a channel cancels its calls, and their readers get a CancelledError. Only the
    cancellation of the task itself is raised as such.
    """
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise errors.of_rpc(error, names) from None
    except grpc.aio.UsageError:  # the channel was closed before the call began
        raise errors.backend_gone() from None
    except asyncio.CancelledError:
        if is_cancelled():
            raise
        raise errors.backend_gone(died=True) from None


def is_cancelled() -> bool:
    """Return whether the current task is being cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


@dataclass(frozen=True, slots=True)
class ToolCallPiece:
    """Part of one call: id and name once, arguments (JSON text) in pieces."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Usage:
    """The tokens and milliseconds of one answer.

    cached_tokens: prompt tokens that were not computed.
    reasoning_tokens: completion tokens that are reasoning; if the backend does not report them, all
        up to the last piece of reasoning.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Piece:
    """The next part of an answer.

    logprobs: the log-probabilities of its tokens, if they were requested; each is {id, token,
        bytes, logprob, top_logprobs}, as in Reply.logprobs.
    usage: the usage so far, without the counts that are known only at the end.
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallPiece, ...] = ()
    logprobs: tuple[dict[str, Any], ...] = ()
    usage: Usage = Usage()


@dataclass(frozen=True, slots=True)
class Done:
    """The end of an answer."""

    finish_reason: Literal["stop", "length"]
    usage: Usage
    stop_sequence: str | None = None
    prompt_logprobs: tuple[dict[str, Any], ...] | None = None  # None unless requested


@dataclass(frozen=True, slots=True)
class Progress:
    """How much of the prompt is prefilled, in tokens.

    The first event of this type means that the backend has accepted the request.
    """

    total: int
    cached: int
    processed: int
    ms: float  # since prefill began

    @property
    def usage(self) -> Usage:
        return Usage(self.total)


Event = Progress | Piece | Done


async def generate(
    stub: Stub,
    options: pb.PredictOptions,
    *,
    seconds: float | None = None,
    names: Names = AS_ON_THE_WIRE,
) -> AsyncGenerator[Event, None]:
    """Yield the events of one answer. Raises ApiError for any status but OK.

    If parallel calls are off, the answer ends where a second call begins, because backends
    guarantee a single call only if calls are enforced.

    seconds: the time limit of the answer; 0 or None for none.
    names: the client's names for the protocol's fields.
    """
    options.CorrelationId = exchange.current().request_id
    options.Metadata["mlx.stream_progress"] = "true"
    single = options.Metadata.get("mlx.parallel_tool_calls") == "false"
    last = pb.Reply()
    thought = 0
    bare: list[int] = []
    prompt_logprobs: tuple[dict[str, Any], ...] | None = None
    trailing: Iterable[tuple[str, Any]] = ()
    with as_refusals(names):
        call = stub.PredictStream(options, timeout=seconds or None)
        try:
            async for reply in call:
                found: dict[str, Any] = json.loads(reply.logprobs) if reply.logprobs else {}
                if "progress" in found:
                    yield Progress(**found["progress"], ms=reply.timing_prompt_processing)
                    continue
                if found:  # log-probabilities, which take long to write
                    exchange.current().long = True
                if "prompt" in found:
                    prompt_logprobs = tuple(found["prompt"])
                piece = _piece(reply, tuple(found.get("content", ())))
                over = single and piece is not None and any(part.index for part in piece.tool_calls)
                if over and (piece := _first_call(piece)) is None:
                    break
                last = reply
                if piece is not None:
                    if piece.reasoning:
                        thought = reply.tokens
                    yield replace(piece, tool_calls=tuple(_filled(piece.tool_calls, bare)))
                if over:
                    break
            else:
                trailing = await call.trailing_metadata() or ()
        finally:
            call.cancel()
    done = _done(options, last, thought, dict(trailing), prompt_logprobs)
    if bare and done.finish_reason == "stop":
        yield Piece(tool_calls=(ToolCallPiece(bare[0], arguments="{}"),))
    exchange.current().count_tokens(done.usage.prompt_tokens, done.usage.completion_tokens)
    yield done


async def generate_all(
    stub: Stub,
    wanted: Sequence[pb.PredictOptions],
    *,
    seconds: float | None = None,
    names: Callable[[int], Names] = lambda _: AS_ON_THE_WIRE,
) -> AsyncGenerator[tuple[int, Event], None]:
    """Yield the events of several answers, each with the index of its answer.

    The backend runs the answers in a batch, but at most `_MOST_AT_ONCE` of them at a time, so that
    they do not fill its queue. The first failure ends all of them, and is raised.

    names: as for `generate`, by the index of the answer.
    """
    if len(wanted) == 1:
        only = generate(stub, wanted[0], seconds=seconds, names=names(0))
        async with aclosing(only) as answer:
            async for event in answer:
                yield 0, event
        return
    arrivals: asyncio.Queue[tuple[int, Event | Exception | None]] = asyncio.Queue(2 * len(wanted))
    waiting = iter(range(len(wanted)))

    async def read() -> None:
        for index in waiting:
            try:
                replies = generate(stub, wanted[index], seconds=seconds, names=names(index))
                async with aclosing(replies) as events:
                    async for event in events:
                        await arrivals.put((index, event))
                await arrivals.put((index, None))
            except Exception as failure:  # it is raised by the reader of the events
                await arrivals.put((index, failure))

    tasks = [asyncio.ensure_future(read()) for _ in range(min(_MOST_AT_ONCE, len(wanted)))]
    try:
        running = len(wanted)
        while running:
            index, arrival = await arrivals.get()
            if isinstance(arrival, Exception):
                raise arrival
            if arrival is None:
                running -= 1
            else:
                yield index, arrival
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _piece(reply: pb.Reply, logprobs: tuple[dict[str, Any], ...]) -> Piece | None:
    content = reasoning = ""
    calls: tuple[ToolCallPiece, ...] = ()
    for delta in reply.chat_deltas:
        content += delta.content
        reasoning += delta.reasoning_content
        calls += tuple(ToolCallPiece(c.index, c.id, c.name, c.arguments) for c in delta.tool_calls)
    if not (content or reasoning or calls or logprobs):
        return None
    return Piece(content, reasoning, calls, logprobs, _usage(reply))


def _usage(reply: pb.Reply) -> Usage:
    return Usage(
        reply.prompt_tokens,
        reply.tokens,
        prefill_ms=reply.timing_prompt_processing,
        decode_ms=reply.timing_token_generation,
    )


def _filled(parts: Iterable[ToolCallPiece], bare: list[int]) -> Iterator[ToolCallPiece]:
    """Yield the parts, and `{}` for a call without arguments, which some backends leave empty.

    bare: the index of the call that has begun, while it has no arguments.
    """
    for part in parts:
        if bare and bare[0] != part.index:
            yield ToolCallPiece(bare.pop(), arguments="{}")
        bare[:] = [] if part.arguments else [part.index] if part.name else bare
        yield part


def _first_call(piece: Piece | None) -> Piece | None:
    """Return what a piece adds to the first call; None if that is nothing."""
    parts = tuple(part for part in piece.tool_calls if part.index == 0) if piece else ()
    return replace(piece, tool_calls=parts) if piece and parts else None


def _done(
    options: pb.PredictOptions,
    last: pb.Reply,
    thought: int,
    trailing: Mapping[str, Any],
    prompt_logprobs: tuple[dict[str, Any], ...] | None,
) -> Done:
    usage = replace(
        _usage(last),
        cached_tokens=int(trailing.get("mlx-cached-tokens", 0)),
        reasoning_tokens=int(trailing.get("mlx-reasoning-tokens", thought)),
    )
    # Other backends do not report a finish reason; then LocalAI's rule applies.
    cut = 0 < options.Tokens <= last.tokens
    reason = trailing.get("mlx-finish-reason", "length" if cut else "stop")
    stop = trailing.get("mlx-stop-sequence-bin")
    return Done(reason, usage, None if stop is None else stop.decode(), prompt_logprobs)

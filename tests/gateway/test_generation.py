"""How a backend's Replies are read, however it divides its answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from gateway.blocks import Blocks, consume
from gateway.calls import Done, Event, Piece, generate, generate_all
from gateway.errors import BACKEND_GONE, ApiError
from tests.gateway.requests_begun import begun
from wire import backend_pb2 as pb
from wire import backend_pb2_grpc

FIRST = pb.ToolCallDelta(index=0, id="call_a", name="look", arguments="{}")
SECOND = pb.ToolCallDelta(index=1, id="call_b", name="look", arguments="{}")


class Backend(backend_pb2_grpc.BackendServicer):
    """Answers with fixed Replies, one list for each call."""

    def __init__(self, *replies: list[pb.ToolCallDelta]) -> None:
        self._replies = replies

    async def PredictStream(
        self, _request: pb.PredictOptions, _context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncIterator[pb.Reply]:
        for count, calls in enumerate(self._replies):
            yield pb.Reply(
                chat_deltas=[pb.ChatDelta(tool_calls=calls)], tokens=count + 1, prompt_tokens=3
            )


async def events_of(backend: Backend, options: pb.PredictOptions | None = None) -> list[Event]:
    server = grpc.aio.server()
    backend_pb2_grpc.add_BackendServicer_to_server(backend, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = backend_pb2_grpc.BackendStub(channel)
            single = pb.PredictOptions(Metadata={"mlx.parallel_tool_calls": "false"})
            options = single if options is None else options
            return [event async for event in generate(stub, options)]
    finally:
        await server.stop(None)


@pytest.mark.parametrize(
    ("replies", "tokens"),
    [([[FIRST, SECOND]], 1), ([[FIRST], [SECOND]], 1), ([[FIRST], [], [SECOND]], 2)],
)
async def test_a_single_call_is_reported_also_if_two_arrive_together(
    replies: list[list[pb.ToolCallDelta]], tokens: int
) -> None:
    *pieces, done = await events_of(Backend(*replies))
    assert isinstance(done, Done)
    assert (done.finish_reason, done.usage.completion_tokens) == ("stop", tokens)
    calls = [call for piece in pieces if isinstance(piece, Piece) for call in piece.tool_calls]
    assert [(call.index, call.id, call.arguments) for call in calls] == [(0, "call_a", "{}")]


class Sure(Backend):
    """Answers with log-probabilities."""

    async def PredictStream(
        self, _request: pb.PredictOptions, _context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncIterator[pb.Reply]:
        yield pb.Reply(tokens=1, logprobs=b'{"content": [{"token": "a"}]}')


@pytest.mark.parametrize("backend", [Backend([FIRST]), Sure()])
async def test_an_answer_with_log_probabilities_counts_as_long(backend: Backend) -> None:
    request = begun()
    await events_of(backend)
    assert request.long is isinstance(backend, Sure)


def _call(index: int, name: str, arguments: str = "") -> pb.ToolCallDelta:
    return pb.ToolCallDelta(index=index, id=f"call_{index}", name=name, arguments=arguments)


@pytest.mark.parametrize(
    ("calls", "tokens", "found"),
    [
        ([_call(0, "a")], 0, ["{}"]),
        ([_call(0, "a"), _call(1, "b")], 0, ["{}", "{}"]),
        ([_call(0, "a"), _call(0, "", "{")], 0, ["{"]),
        ([_call(0, "a"), _call(1, "b", "{}"), _call(2, "c")], 0, ["{}", "{}", "{}"]),
        # The length limit may have cut the last one.
        ([_call(0, "a"), _call(1, "b")], 1, ["{}", ""]),
    ],
)
@pytest.mark.parametrize("together", [True, False])
async def test_a_call_without_arguments_has_none(
    calls: list[pb.ToolCallDelta], tokens: int, found: list[str], together: bool
) -> None:
    """Some backends send an empty text for them."""
    replies = [calls] if together else [[call] for call in calls]
    events = await events_of(Backend(*replies), pb.PredictOptions(Tokens=tokens))
    parts = [call for each in events if isinstance(each, Piece) for call in each.tool_calls]
    assert [part.index for part in parts] == sorted(part.index for part in parts)
    texts = ["".join(p.arguments for p in parts if p.index == at) for at in range(len(found))]
    assert texts == found
    blocks = Blocks()
    for event in events:
        consume(blocks, event)
    assert [call.text for call in blocks.calls] == [text for text in found if text == "{}"]


class Holding(Backend):
    """Sends one piece, and then nothing more."""

    async def PredictStream(
        self, _request: pb.PredictOptions, _context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncIterator[pb.Reply]:
        yield pb.Reply(chat_deltas=[pb.ChatDelta(content="a")], tokens=1, prompt_tokens=3)
        await asyncio.Event().wait()


@pytest.mark.parametrize("answers", [1, 2])
async def test_a_closed_channel_is_not_taken_for_a_disconnect(answers: int) -> None:
    """A CancelledError would end the answer silently, and two of them would wait for ever."""
    server = grpc.aio.server()
    backend_pb2_grpc.add_BackendServicer_to_server(Holding(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
    stub = backend_pb2_grpc.BackendStub(channel)
    events = generate_all(stub, [pb.PredictOptions() for _ in range(answers)])
    try:
        for _ in range(answers):
            assert isinstance((await anext(events))[1], Piece)
        await channel.close()
        with pytest.raises(ApiError) as raised:
            await anext(events)
        assert (raised.value.status, raised.value.code) == (503, BACKEND_GONE)
        with pytest.raises(ApiError) as raised:
            await anext(generate(stub, pb.PredictOptions()))
        assert raised.value.code == BACKEND_GONE
    finally:
        await server.stop(None)


async def test_thousands_of_answers_are_not_all_begun_at_once() -> None:
    """Beginning a task for each would hold the event loop, and every other stream."""
    answers = 1000
    server = grpc.aio.server()
    backend_pb2_grpc.add_BackendServicer_to_server(Backend([FIRST]), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = backend_pb2_grpc.BackendStub(channel)
            ended, most = [], 0
            async for index, event in generate_all(stub, [pb.PredictOptions()] * answers):
                most = max(most, len(asyncio.all_tasks()))
                if isinstance(event, Done):
                    ended.append(index)
    finally:
        await server.stop(None)
    assert sorted(ended) == [*range(answers)]
    assert most < answers // 2

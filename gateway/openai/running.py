"""A request that was understood, run: the model is leased and everything is asked at once."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from functools import partial

from gateway import exchange
from gateway.asking import ask
from gateway.context import Gateway
from gateway.generation import Event, generate_all
from gateway.metrics import AnswerTimes
from gateway.openai.chat_request import ChatCompletionRequest
from gateway.openai.completion_request import CompletionRequest
from gateway.openai.field_names import names_of
from gateway.supervisor.supervisor import Lease
from wire import backend_pb2 as pb


async def events_of(
    request: ChatCompletionRequest | CompletionRequest,
    wanted: Sequence[pb.PredictOptions],
    gateway: Gateway,
) -> AsyncGenerator[tuple[int, Event], None]:
    """The events of the answers, each with its choice. Raises ApiError in the client's words."""

    def lend() -> AbstractAsyncContextManager[Lease]:
        return gateway.supervisor.lease(request.model, request.adapters, request.draft_model)

    since = exchange.current().started

    async def send(lease: Lease) -> AsyncGenerator[tuple[int, Event], None]:
        for options in wanted:
            options.ModelIdentity = lease.identity
        times = [AnswerTimes(gateway.metrics, lease.config.name, since) for _ in wanted]
        limit = gateway.settings.request_timeout
        names = partial(names_of, request)
        answers = generate_all(lease.stub, wanted, seconds=limit, names=names)
        async with aclosing(answers) as events:
            async for index, event in events:
                times[index].take(event)
                yield index, event

    async with aclosing(ask(lend, send, request)) as answers:
        async for answer in answers:
            yield answer

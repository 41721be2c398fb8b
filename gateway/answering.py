"""A translated request on its way through a backend: the events of its one answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from gateway.asking import ask
from gateway.context import Gateway
from gateway.errors import ApiError
from gateway.generation import Done, Event, generate
from gateway.openai.chat_to_wire import predict_options
from gateway.openai.field_names import names_of
from gateway.supervisor.supervisor import Lease
from gateway.translation import Translation


async def answer(
    translation: Translation,
    gateway: Gateway,
    *,
    prompt_only: bool = False,
    count_only: bool = False,
) -> AsyncGenerator[Event, None]:
    """The events; the model is held until the last of them. Raises ApiError in the client's terms.

    prompt_only: read the prompt into the prefix cache, count it, and generate nothing.
    count_only: compute nothing at all; the prompt may be longer than the context.
    """

    async def send(lease: Lease) -> AsyncGenerator[Event, None]:
        options = (await predict_options(translation.chat, lease, gateway))[0]
        if prompt_only:
            options.Metadata["mlx.prompt_only"] = "true"
        if count_only:
            options.Metadata["mlx.count_only"] = "true"
        seconds = gateway.settings.request_timeout
        names = names_of(translation.chat)
        replies = generate(lease.stub, options, seconds=seconds, names=names)
        async with aclosing(replies) as events:
            async for event in events:
                yield event

    try:
        said = ask(lambda: gateway.supervisor.lease(translation.chat.model), send)
        async with aclosing(said) as events:
            async for event in events:
                yield event
    except ApiError as error:
        raise translation.named(error) from None


async def count_prompt(translation: Translation, gateway: Gateway) -> int:
    """Tokens of the prompt as the model's chat template renders it. Raises ApiError."""
    counted = 0
    async with aclosing(answer(translation, gateway, count_only=True)) as events:
        async for event in events:
            if isinstance(event, Done):
                counted = event.usage.prompt_tokens
    return counted

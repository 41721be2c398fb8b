"""Collects the prompts to read after a load: those of the model's file, then the most used ones."""

from __future__ import annotations

import logging

from gateway.context import Gateway
from gateway.errors import ApiError
from gateway.models.config import ModelConfig
from gateway.openai.answering import translate
from gateway.openai.chat_request import options_of
from gateway.used_prompts import beginning
from wire import backend_pb2 as pb

_log = logging.getLogger("gateway.models")


async def warm_prompts(config: ModelConfig, gateway: Gateway) -> list[pb.PredictOptions]:
    """Return requests that generate nothing. A prompt of the file that is refused is left out."""
    found: list[pb.PredictOptions] = []
    for at, given in enumerate(config.warm_prompts):
        system = [{"role": "system", "content": given.system}] if given.system else []
        chat = {"messages": [*system, {"role": "user", "content": "."}], "tools": given.tools}
        try:
            translated = translate(chat, {"messages[0]": "system"})
            (options,) = await options_of(translated.chat, config, gateway)
        except ApiError as problem:
            _log.warning("%s: warm_prompts[%d] is left out: %s", config.name, at, problem)
            continue
        if prompt := beginning(options, 1):
            found.append(prompt)
    return [*found, *(each for each in gateway.prompts.of(config.name) if each not in found)]

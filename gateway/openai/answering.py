"""Asks a backend for the answers to chats, and to the requests of other APIs as chats.

A translation stores where each part of the chat request came from: chat path → path in the client's
own body. The longest path that is a prefix of an error's `param` identifies the field.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any

from common.field_names import named
from common.wording import shown
from gateway import exchange
from gateway.asking import ask
from gateway.calls import Done, Event, Piece, Usage, generate_all
from gateway.context import Gateway
from gateway.errors import ApiError, bad_field, found_in
from gateway.metrics import AnswerTimes
from gateway.models.config import ModelConfig
from gateway.openai.chat_request import ChatCompletionRequest, options_of
from gateway.openai.field_names import AnyRequest, names_of, names_of_choice
from gateway.openai.sampling import Lora
from gateway.refusals import validated
from gateway.supervisor import failures
from gateway.supervisor.supervisor import Lease
from gateway.threads import offload
from gateway.used_prompts import beginning
from wire import backend_pb2 as pb

Json = dict[str, Any]
_log = logging.getLogger("gateway.models")


class Conversation:
    """Chat messages so far, each with the path in the client's body that it came from."""

    def __init__(self) -> None:
        self.messages: list[Json] = []
        self.places: dict[str, str] = {}

    def system(self, texts: Sequence[str], place: str) -> None:
        """Add one system message of several texts, because many templates allow only one."""
        self.add({"role": "system", "content": "\n\n".join(texts)}, place)

    def add(self, message: Json, place: str, content: str = "content") -> None:
        """Add a message.

        place: the path of the message in the client's body.
        content: the name of the content there.
        """
        here = f"messages[{len(self.messages)}]"
        self.places[here] = place
        if isinstance(message["content"], list):
            self._note(message["content"], f"{here}.content", f"{place}.{content}")
        self.messages.append(message)

    def _note(self, parts: Sequence[Json], here: str, place: str) -> None:
        for at, part in enumerate(parts):
            self.places[f"{here}[{at}]"] = f"{place}[{at}]"
            self._note(part.get("content", ()), f"{here}[{at}].content", f"{place}[{at}].content")


@dataclass(frozen=True, slots=True)
class Translation:
    """A chat request, and where in the client's body its parts came from."""

    chat: ChatCompletionRequest
    places: Mapping[str, str]


@contextmanager
def client_paths(places: Mapping[str, str]) -> Iterator[None]:
    """Replace paths in a chat request, in ApiErrors and ignored fields, by the client's.

    places: the client's path for each path, and for the end of a path, such as
        `.reasoning_content` or `[image_url]`, what the client calls it.
    """

    def name_of(path: str) -> str:
        name, rest = found_in(places, path)
        return name + places.get(rest, rest)

    here = exchange.current()
    before, here.name_of = here.name_of, name_of
    try:
        yield
    except ApiError as error:
        raise placed(error, places) from None
    finally:
        here.name_of = before


def placed(error: ApiError, places: Mapping[str, str]) -> ApiError:
    """Return an error about a chat request with paths in the client's body."""

    def name_of(path: str) -> str:
        name, rest = found_in(places, path)
        return name + places.get(rest, "")

    return error.renamed(name_of)


def translate(fields: Mapping[str, Any], places: Mapping[str, str]) -> Translation:
    """Validate the fields of a chat request; null counts as absent. Raises ApiError.

    Tools are distinguished by name, so every name must be unique.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    with client_paths(places):
        chat = validated(ChatCompletionRequest, given)
        seen: set[str] = set()
        for index, name in enumerate(tool.function.name for tool in chat.tools or ()):
            if name in seen:
                place = named(f"tools[{index}].function.name")
                raise bad_field(
                    f"{place} is {shown(name)}, the name of another tool as well: rename one"
                )
            seen.add(name)
    return Translation(chat, places)


def events_of(
    request: AnyRequest, wanted: Sequence[pb.PredictOptions], gateway: Gateway
) -> AsyncGenerator[tuple[int, Event], None]:
    """Return the answers' events, each with its choice. Raises ApiError with the client's names."""

    config = gateway.supervisor.resolve(request.model)
    adapter = adapter_of(request, config, gateway.supervisor.default_adapter(config))
    if adapter:
        for options in wanted:
            options.Metadata["mlx.adapter"] = adapter
    lend = functools.partial(gateway.supervisor.lease, request.model, request.draft_model)
    since = exchange.current().started

    async def send(lease: Lease) -> AsyncGenerator[tuple[int, Event], None]:
        for options in wanted:
            options.ModelIdentity = lease.identity
        times = AnswerTimes(gateway.metrics, lease.config.name, since)
        limit = gateway.settings.request_timeout
        names = functools.partial(names_of_choice, request, await offload(names_of, request))
        answers = generate_all(lease.stub, wanted, seconds=limit, names=names)
        async with aclosing(answers) as events:
            noted = bool(adapter)
            async for index, event in events:
                if not noted:  # the backend has accepted the prompt
                    gateway.prompts.note(lease.config.name, wanted[0])
                    noted = True
                times.take(index, event)
                yield index, event

    return ask(lend, send, request)


def adapter_of(request: AnyRequest, config: ModelConfig, default: str) -> str:
    """Return the adapter of the model that a request uses; '' if none. Raises ApiError.

    Requests name it in `adapters` as for mlx_lm.server, in `lora` as for llama.cpp, or in `model`
    as for vLLM.

    default: the adapter of requests that name none.
    """
    names = list(config.adapters)
    if request.adapters:
        if request.adapters not in names:
            raise failures.not_listed("adapters", request.adapters, names)
        return request.adapters
    if request.lora is not None:
        return chosen_by("lora", request.lora, names)
    return request.model if request.model in names else default


def chosen_by(field: str, scales: Sequence[Lora], names: Sequence[str]) -> str:
    """Return the adapter to which llama.cpp's `scales` give 1; '' if they give 1 to none.

    Raises ApiError.
    """
    used = {entry.id for entry in scales if entry.scale}
    if any(entry.id >= len(names) for entry in scales):
        raise bad_field(
            f"{named(field)} has an id that /lora-adapters does not list: the model"
            f" has {len(names)} adapters"
        )
    if any(entry.scale not in (0, 1) for entry in scales):
        raise bad_field(
            f"{named(field)} has a scale other than 0 and 1: send 1 for the adapter to use, else 0"
        )
    if len(used) > 1:
        raise bad_field(f"{named(field)} uses {len(used)} adapters: use one for each request")
    return names[used.pop()] if used else ""


@dataclass(frozen=True, slots=True)
class Question:
    """A validated and translated request, and the options that the backend gets for it."""

    translation: Translation
    config: ModelConfig
    options: pb.PredictOptions

    @property
    def model(self) -> str:
        return self.translation.chat.model or self.config.name


async def question_of(
    translation: Translation,
    gateway: Gateway,
    *,
    prompt_only: bool = False,
    count_only: bool = False,
) -> Question:
    """Translate a request to the backend's, before any model is loaded.

    Raises ApiError with the client's field names.

    prompt_only: read the prompt into the prefix cache, count it, and generate nothing.
    count_only: compute nothing at all; the prompt may be longer than the context.
    """
    config = gateway.supervisor.resolve(translation.chat.model)
    with client_paths(translation.places):
        options = (await options_of(translation.chat, config, gateway))[0]
    if prompt_only:
        options.Metadata["mlx.prompt_only"] = "true"
    if count_only:
        options.Metadata["mlx.count_only"] = "true"
    return Question(translation, config, options)


async def answer(question: Question, gateway: Gateway) -> AsyncGenerator[Event, None]:
    """Yield the events of the answer (see `events_of`). Raises ApiError with the client's names."""
    translation = question.translation
    with client_paths(translation.places):
        stream = events_of(translation.chat, [question.options], gateway)
        async with aclosing(stream) as events:
            async for _, event in events:
                yield event


async def whole_answer(question: Question, gateway: Gateway) -> tuple[str, Usage]:
    """Return the content and the usage of the answer. Raises ApiError."""
    texts: list[str] = []
    used = Usage()
    async with aclosing(answer(question, gateway)) as events:
        async for event in events:
            if isinstance(event, Piece):
                texts.append(event.content)
            elif isinstance(event, Done):
                used = event.usage
    return "".join(texts), used


async def count_prompt(translation: Translation, gateway: Gateway) -> int:
    """Return the tokens of the prompt as the model's chat template renders it. Raises ApiError."""
    question = await question_of(translation, gateway, count_only=True)
    return (await whole_answer(question, gateway))[1].prompt_tokens


async def warm_prompts(config: ModelConfig, gateway: Gateway) -> list[pb.PredictOptions]:
    """Return the requests that read a model's warm prompts; those that are refused are left out."""
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

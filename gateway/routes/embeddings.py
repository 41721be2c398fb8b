"""`/embeddings`, as OpenAI defines it."""

from __future__ import annotations

import asyncio
import base64
import math
from array import array
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Response
from fastapi.responses import StreamingResponse
from pydantic import (
    AliasChoices,
    BeforeValidator,
    Field,
    PlainValidator,
    ValidationInfo,
    model_validator,
)
from pydantic_core import to_json

from common.field_names import named
from gateway import exchange
from gateway.asking import ask_once
from gateway.calls import unary_all
from gateway.context import Gateway, GatewayDep
from gateway.described import about
from gateway.errors import Names, bad_field
from gateway.fields import EMBEDDINGS, Request
from gateway.json_route import JsonRoute
from gateway.openai.sampling import agreed
from gateway.supervisor.supervisor import Lease
from gateway.threads import offload
from wire import backend_pb2 as pb

router = APIRouter(tags=["embeddings"], route_class=JsonRoute)
Text = str | list[int]  # as text, or as token ids
_MOST_INPUTS = 2048  # OpenAI's
_TOKENS = 1 << 31
TRUNCATE = "Whether an input that is too long loses its end, or is an error; default: by the model."


def read_input(value: Any) -> list[Text]:
    """Return the inputs of a request: a text, texts, token ids, or lists of them.

    Raises ValueError.
    """
    inputs = [value] if isinstance(value, str | dict) or _is_tokens(value) else value
    if not isinstance(inputs, list) or not inputs:
        raise ValueError("send a text, a list of texts, token ids, or a list of lists of ids")
    if len(inputs) > _MOST_INPUTS:
        raise ValueError(f"it has {len(inputs)} entries: send at most {_MOST_INPUTS}")
    # Jina's form of a text.
    inputs = [
        entry["text"] if isinstance(entry, dict) and entry.keys() == {"text"} else entry
        for entry in inputs
    ]
    for place, entry in enumerate(inputs):
        if not (isinstance(entry, str) or _is_tokens(entry)):
            raise ValueError(f"entry {place} is neither text nor a list of token ids")
        if not entry:
            raise ValueError(f"entry {place} is empty")
    return inputs


def _is_tokens(value: Any) -> bool:
    # Without a Python loop, because there may be millions.
    if not isinstance(value, list) or set(map(type, value)) != {int}:
        return False
    return bool(min(value) >= 0 and max(value) < _TOKENS)


Input = Annotated[
    list[Text],
    PlainValidator(
        read_input, json_schema_input_type=str | list[str] | list[int] | list[list[int]]
    ),
]


# True if the texts have another server's name: `content`, llama.cpp's (Tabby), or `texts`, TEI's.
Sent = Annotated[bool, BeforeValidator(lambda _: True, json_schema_input_type=Input)]


def prefer(name: str, other: str) -> Any:
    """Return a validator for two names of a field. If both are sent, `other` is ignored."""

    def check(body: Any) -> Any:
        if not isinstance(body, dict) or not {name, other} <= body.keys():
            return body
        if exchange.current().strict:
            raise bad_field(f"{named(other)} and {name} are both given: send one of them")
        exchange.current().ignore(other)
        return {key: body[key] for key in body if key != other}

    return model_validator(mode="before")(check)


def _read_truncate(value: Any) -> Any:
    """Read a flag, or the word of Cohere and NIM for one. Raises ValueError."""
    words = {"none": False, "end": True}
    if not isinstance(value, str):
        return value
    if value.lower() not in words:
        raise ValueError("send true, false, END (the same as true) or NONE (the same as false)")
    return words[value.lower()]


# Whether the end of an input that is longer than the model reads is cut off.
Truncate = Annotated[
    bool | None, BeforeValidator(_read_truncate, json_schema_input_type=bool | str | None)
]


def truncation(truncate: bool | None) -> list[tuple[str, str | bytes]]:
    """Return the metadata of a call for a request's `truncate`."""
    return [] if truncate is None else [("mlx-truncate", str(truncate).lower())]


def usage_of(tokens: int, total: int) -> dict[str, int]:
    """Return the usage of an answer; `truncated_tokens` only if there are any."""
    truncated = exchange.current().truncated
    cut = {"truncated_tokens": truncated} if truncated else {}
    return {"prompt_tokens": tokens, "total_tokens": total} | cut


def _read_input_type(value: Any, info: ValidationInfo) -> Any:
    """Read what an input is, as Cohere, Voyage, NVIDIA and Jina name it.

    Returns None for other uses, such as classification, which have no effect and are listed as
    ignored. Raises ValueError for these with `--strict`.
    """
    if not isinstance(value, str):
        return value
    uses = {"query": "query", "passage": "document", "document": "document"}
    use = uses.get(value.rpartition("_")[2].rpartition(".")[2])
    if use is None and value:
        here = exchange.current()
        if here.strict:
            raise ValueError("send the use of a query or of a document, or leave it out")
        here.ignore(info.field_name or "")
    return use


InputType = Annotated[
    Literal["query", "document"] | None,
    BeforeValidator(_read_input_type, json_schema_input_type=str | None),
]


class EmbeddingRequest(Request):
    """Texts, under OpenAI's name `input` or llama.cpp's `content`."""

    others = EMBEDDINGS

    _named = prefer("input", "content")
    input: Input = Field(validation_alias=AliasChoices("input", "content"))
    in_llama_form: Sent = Field(False, validation_alias="content")
    encoding_format: Literal["float", "base64"] | None = about("base64: little-endian floats.")
    dimensions: int | None = about("Keep so many values, normalised to length 1 again.", ge=1)
    output_dimension: int | None = about("Voyage's name of dimensions.", ge=1)
    truncate: Truncate = about(TRUNCATE)
    truncation: bool | None = about("Voyage's name of truncate.")
    input_type: InputType = about(
        "query or document: the model's prompt for it is put in front, if it has one."
    )
    task: InputType = about("Jina's name of input_type, such as retrieval.query.")
    prompt_name: str | None = about(
        "Which of the model's prompts is put in front of each text.", max_length=256
    )


@router.post("/embedding", include_in_schema=False)
@router.post("/embeddings")
async def embeddings(body: EmbeddingRequest, gateway: GatewayDep) -> Response:
    """Return the vectors of texts, each a separate call, which the backend may batch."""
    vectors, tokens = await vectors_of(body, gateway)
    if body.in_llama_form:
        encoded = (_encoded(vector, body.encoding_format) for vector in vectors)
        return in_parts("", ({"index": i, "embedding": [v]} for i, v in enumerate(encoded)), {})
    entries = (
        {"object": "embedding", "index": place, "embedding": _encoded(vector, body.encoding_format)}
        for place, vector in enumerate(vectors)
    )
    model = body.model or gateway.supervisor.resolve(body.model).name
    others = {"object": "list", "model": model, "usage": usage_of(tokens, tokens)}
    return in_parts("data", entries, others)


class TeiRequest(Request):
    """Texts, in the form of Text Embeddings Inference."""

    inputs: Input
    normalize: bool = Field(True, description="Whether vectors are scaled to length 1.")
    truncate: Truncate = about(TRUNCATE)
    prompt_name: str | None = about("As for /embeddings.", max_length=256)
    dimensions: int | None = about("As for /embeddings.", ge=1)


@router.post("/embed")
async def embed(body: TeiRequest, gateway: GatewayDep) -> Response:
    """Return the vectors of texts in the form of Text Embeddings Inference."""
    fields = body.model_dump(exclude={"inputs", "normalize"})
    given = {"input": body.inputs, **fields}
    asked = await offload(EmbeddingRequest.model_validate, given)
    vectors, _ = await vectors_of(asked, gateway, "inputs")
    return in_parts("", (list(_scaled(each) if body.normalize else each) for each in vectors), {})


async def vectors_of(
    asked: EmbeddingRequest, gateway: Gateway, name: str = "input"
) -> tuple[Iterator[Sequence[float]], int]:
    """Return the vectors, shortened if requested, and the tokens of all texts. Raises ApiError.

    name: the client's name for the texts.
    """
    fields = {str: "Embeddings", list: "EmbeddingTokens"}
    texts: list[Any] = [{fields[type(text)]: text} for text in asked.input]

    async def embed(lease: Lease) -> list[pb.EmbeddingResult]:
        requests = [pb.PredictOptions(ModelIdentity=lease.identity, **each) for each in texts]
        seconds = gateway.settings.request_timeout
        return await unary_all(lease.stub.Embedding, requests, seconds, names, metadata)

    def names(index: int) -> Names:
        place = f"{name}[{index}]" if len(asked.input) > 1 else name
        return {"Embeddings": place, "EmbeddingTokens": place}

    metadata = truncation(agreed(("truncate", asked.truncate), ("truncation", asked.truncation)))
    dimensions = agreed(
        ("dimensions", asked.dimensions), ("output_dimension", asked.output_dimension)
    )
    if use := agreed(("input_type", asked.input_type), ("task", asked.task)):
        metadata.append(("mlx-input-type", use))
    if asked.prompt_name is not None:
        metadata.append(("mlx-prompt-name-bin", asked.prompt_name.encode()))

    model = gateway.supervisor.catalogue.model_named(asked.model).name
    replies = await ask_once(lambda: gateway.supervisor.lease(model), embed, asked)
    for reply in replies:
        _require_fitting(reply, dimensions)
    tokens = sum(reply.prompt_tokens for reply in replies)
    exchange.current().count_tokens(tokens, 0)
    return (_cut(reply.embeddings, dimensions) for reply in replies), tokens


def in_parts(name: str, entries: Iterable[Any], others: dict[str, Any]) -> Response:
    """Stream a JSON object that begins with the list `name`; if name is "", only the list.

    One item is written at a time: millions of numbers at once would block all streams for seconds.
    """

    async def written() -> AsyncIterator[bytes]:
        separator = f'{{"{name}":['.encode() if name else b"["
        for entry in entries:
            yield separator + to_json(entry)
            separator = b","
            await asyncio.sleep(0)
        yield b"]," + to_json(others)[1:] if name else b"]"

    return StreamingResponse(written(), media_type="application/json")


def _require_fitting(reply: pb.EmbeddingResult, dimensions: int | None) -> None:
    if reply.layout == pb.EMBEDDING_LAYOUT_PER_TOKEN:
        message = "this model returns a vector for every token, but none for the text"
        raise bad_field(message, "unsupported", param="model")
    if dimensions is not None and dimensions > len(reply.embeddings):
        length = len(reply.embeddings)
        raise bad_field(
            f"{named('dimensions')} is {dimensions}: this model's vectors have {length}"
        )


def _cut(vector: Sequence[float], dimensions: int | None) -> Sequence[float]:
    if dimensions is None or dimensions == len(vector):
        return vector
    return _scaled(vector[:dimensions])


def _scaled(vector: Sequence[float]) -> Sequence[float]:
    length = math.sqrt(math.fsum(value * value for value in vector))
    return [value / length for value in vector] if length else vector


def _encoded(vector: Sequence[float], form: str | None) -> list[float] | str:
    if form != "base64":
        return list(vector)
    return base64.b64encode(array("f", vector).tobytes()).decode()

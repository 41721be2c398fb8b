"""The fuzzing targets: each takes any bytes, and may raise only what its callers expect."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

import numpy as np
from google.protobuf.message import DecodeError

from backend.engine.constraints import compiler
from backend.engine.constraints.compiler import ConstraintCompiler
from backend.engine.constraints.constraint import words
from backend.engine.constraints.schema import read_schema
from backend.engine.constraints.spec import ConstraintSpec
from backend.engine.errors import EngineError, Incomplete, InvalidRequest, NotQuick
from backend.engine.loading.shards import read_header
from backend.engine.media.audio import decode_audio
from backend.engine.media.image import decode_image
from backend.engine.media.items import BadItem
from backend.engine.settings import Settings
from backend.rpc.load_options import load_request, parse_settings
from backend.rpc.request_limits import require_bounded
from backend.rpc.requests import generation_request
from backend.rpc.tools import parse_tool_choice, parse_tools
from common.chat_events import ChatMessage, message_of
from common.chat_format import ChatFormat
from common.chat_parser import ChatParser, parse_chat
from common.formats.families import BY_NAME
from common.formats.reading import FinishReason
from common.gbnf import GbnfError, gbnf_to_lark
from gateway.models import reading
from tests.common.grammar_walks import byte_tokenizer
from tests.fuzz import calls
from tests.fuzz.kept_trial import KeptTrial
from tests.fuzz.messages import fill
from tests.rpc.fake_engine import SERVED
from wire import backend_pb2 as pb

Target = Callable[[bytes], None]
_TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
    },
)
_REASONS: tuple[FinishReason, ...] = get_args(FinishReason)
_BYTES = byte_tokenizer()
_LARK_PIECES = (
    "start: ", "a: ", "B: ", "a ", "B ", "\n", " | ", "* ", "+ ", "? ", "{2,5} ", "~3..4 ", "(",
    ")", "[", "]", '"x"', '"é"i ', "/[a-z]+/ ", "/(?s:.*)/ ", " & ", "~", "%ignore ", "%json {",
    "}", "%llguidance ", "<|the-end|>", "<[3-9]>", "[stop=", "[max_tokens=2]", "[lazy]",
    "[capture]", "%regex {", '"substring_words": ', "_", "$", "-> b", ".. ", "// ", "::= ",
    "%import common.INT\n",
)  # fmt: skip
_MOST_PIXELS, _MOST_SECONDS = 1 << 16, 2


def gbnf(given: bytes) -> None:
    with contextlib.suppress(GbnfError):
        gbnf_to_lark(_text(given))


def schema(given: bytes) -> None:
    with contextlib.suppress(EngineError):
        read_schema(_text(given))


def lark(given: bytes) -> None:
    """Each non-ASCII byte is replaced by a piece of a grammar."""
    text = "".join(
        chr(byte) if byte < 128 else _LARK_PIECES[byte % len(_LARK_PIECES)] for byte in given
    )
    with contextlib.suppress(InvalidRequest, NotQuick):
        constraint = _compiler().compile(ConstraintSpec("lark", text), quick=True)
        mask = np.zeros(words(_BYTES.size), np.uint32)
        for _ in range(8):
            constraint.fill(mask)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            constraint.accept(int(allowed[len(allowed) // 2]))


def chat(given: bytes) -> None:
    """Any split of an answer gives the same as the whole, and partial calls as well unless the
    length limit cuts one. Three bytes choose how it is parsed.
    """
    if len(given) < 3:
        return
    format_ = ChatFormat.named(sorted(BY_NAME)[given[0] % len(BY_NAME)])
    reason = _REASONS[given[1] % len(_REASONS)]
    text = _text(given[3:])
    cut = given[2] % (len(text) + 1)
    for partial_calls in (False, True):
        parser = ChatParser(format_, tools=_TOOLS, partial_calls=partial_calls)
        pieces = [*parser.feed(text[:cut]), *parser.feed(text[cut:]), *parser.finish(reason)]
        if not partial_calls or reason == "stop":
            whole = parse_chat(text, format_, tools=_TOOLS, reason=reason)
            assert _without_ids(message_of(pieces)) == _without_ids(whole)


def tools(given: bytes) -> None:
    for read in (parse_tools, parse_tool_choice):
        with contextlib.suppress(InvalidRequest):
            read(_text(given))


def options(given: bytes) -> None:
    *lines, arguments = _text(given).split("\n")
    with contextlib.suppress(EngineError):
        values, _ = parse_settings(lines, arguments)
        Settings.from_values(values)


def yaml(given: bytes) -> None:
    folder = Path(_folder().name)
    file = folder / "model.yaml"
    file.write_bytes(given)
    reading.read_folder(folder)


def picture(given: bytes) -> None:
    with contextlib.suppress(BadItem):
        decode_image(given, _MOST_PIXELS, _MOST_PIXELS)


def sound(given: bytes) -> None:
    with contextlib.suppress(BadItem):
        decode_audio(given, _MOST_SECONDS, _MOST_SECONDS)


def predict(given: bytes) -> None:
    with contextlib.suppress(EngineError):
        generation_request(_filled(pb.PredictOptions(), given), SERVED)


def load(given: bytes) -> None:
    with contextlib.suppress(EngineError):
        load_request(_filled(pb.ModelOptions(), given))


def wire(given: bytes) -> None:
    with contextlib.suppress(EngineError, DecodeError):
        require_bounded(pb.PredictOptions, given)
        generation_request(pb.PredictOptions.FromString(given), SERVED)


def rpc(given: bytes) -> None:
    calls.call(given)


def weights(given: bytes) -> None:
    with contextlib.suppress(Incomplete):
        read_header("model.safetensors", BytesIO(given), len(given))


TARGETS: dict[str, Target] = {
    target.__name__: target
    for target in (
        gbnf, schema, lark, chat, tools, options, yaml, picture, sound, predict, load, wire, rpc,
        weights,
    )
}  # fmt: skip


def _filled(message: Any, given: bytes) -> Any:
    fill(message, given)
    return message


def _text(given: bytes) -> str:
    return given.decode("utf-8", "replace")


def _without_ids(message: ChatMessage) -> tuple[object, ...]:
    """The answer without the random ids of its calls."""
    calls = [(call.name, call.arguments) for call in message.tool_calls]
    return message.content, message.reasoning_content, calls


@cache
def _compiler() -> ConstraintCompiler:
    made = ConstraintCompiler(_BYTES, _BYTES.size, [_BYTES.end], ChatFormat.named("plain"))
    with patch.object(compiler, "Trial", KeptTrial):
        made.compile(ConstraintSpec("lark", 'start: "a"'))
    return made


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Removed when the process ends."""
    return tempfile.TemporaryDirectory(prefix="fuzz-")

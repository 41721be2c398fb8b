"""Calls addressed to a tool by name: Functionary 3.2, Muse Glimmer and Inkling."""

from __future__ import annotations

import re

from common.formats.answer import Call
from common.formats.cursor import Wait
from common.formats.json_calls import read_arguments, read_json_calls
from common.formats.reading import CallSyntax, Reading, begins_line, no_content_yet
from common.formats.shapes import invoked
from common.formats.tag_spelling import closings, openings
from common.formats.tagged_text import TaggedText

_TO, _ALL = ">>>", "all\n"
_NAME, _RECIPIENT = re.compile(r"[\w.:/-]*"), re.compile(r"[^\s<]*")


def _read_functionary(reading: Reading) -> Wait[None]:
    """Read the name of a tool on a line of its own, and its arguments."""
    yield from reading.accept(_TO)
    name = yield from reading.run(_NAME)
    yield from reading.expect("\n", "\r\n")
    if not name or (yield from reading.peek()) != "{":
        raise reading.unreadable()
    reading.begin(name)
    reading.call(Call(name, (yield from read_arguments(reading, (_TO,)))))


class Addressed(TaggedText):
    """If the prompt ends with `>>>`, the answer begins with a recipient; `all` is the user."""

    def read(self, reading: Reading) -> Wait[None]:
        if reading.prompt_tail.endswith(_TO) and not (yield from reading.accept(_ALL)):
            yield from reading.drop_cut((_ALL,))
            if reading.tools:
                yield from self._calls(reading, self.calls[0], "")
        yield from TaggedText.read(self, reading)


FUNCTIONARY_CALLS = (
    CallSyntax((_TO,), _read_functionary),
    CallSyntax((), _read_functionary, begins=no_content_yet, by_name=True),
)
MUSE = invoked("atem:", "function_calls", undeclared="guess")
_ATEM = MUSE.tags
_TO_TOOL = " to="


def _read_glimmer(reading: Reading) -> Wait[None]:
    """Read calls, which may be the text of a message to a tool, ` to=NAME<|message|>`."""
    reading.begun = True
    if (yield from reading.accept(_TO_TOOL)):
        yield from reading.space()
        name = yield from reading.run(_RECIPIENT)
        reading.begun = any(offered.startswith(name) for offered in reading.tools.names)
        yield from reading.space()
        yield from reading.expect("<|message|>")
        yield from reading.space()
    yield from _ATEM.read(reading)


GLIMMER_CALLS = (
    CallSyntax(_ATEM.openers, _read_glimmer, _ATEM.closers, no_content_yet),
    CallSyntax((_TO_TOOL,), _read_glimmer, _ATEM.closers, begins_line),
)
_INVOKE_JSON, _MODEL, _END = "<|content_invoke_tool_json|>", "<|message_model|>", "<|end_message|>"


def _read_inkling(reading: Reading) -> Wait[None]:
    """Skip a message's header with the tool's name, and read the call as JSON, which repeats it."""
    yield from reading.accept(*openings(_MODEL))
    if not (yield from reading.more()):
        return
    if not (yield from reading.accept(*openings(_INVOKE_JSON))):
        yield from reading.run(_NAME)
        yield from reading.expect(*openings(_INVOKE_JSON))
    yield from read_json_calls(reading, closings(_END))
    yield from reading.accept_after_space(*closings(_END))


INKLING_SILENT = (
    _MODEL,
    "<|content_text|>",
    "<|content_invoke_tool_text|>",
    "<|content_tool_error|>",
    _END,
    "<|content_model_end_sampling|>",
)
INKLING_CALLS = (
    CallSyntax((_MODEL, _INVOKE_JSON), _read_inkling, (_END,)),
    CallSyntax((), _read_inkling, begins=no_content_yet, by_name=True),
)

"""Which chat format a loaded model's answers are read in: what the user named, else detected."""

from __future__ import annotations

import logging
from collections.abc import Collection

from common.chat_format import ChatFormat

_log = logging.getLogger(__name__)


def chat_format(
    chat_template: str | None,
    vocabulary: Collection[str],
    tool_parser: str = "",
    reasoning_parser: str = "",
) -> ChatFormat:
    """The format. A parser name that nobody knows is logged, and detection decides instead.

    Hosts write parser names into configurations from tables of their own (contract 2.2.2), so an
    unknown one is no reason to refuse a model.
    """
    detected = ChatFormat.detect(chat_template, vocabulary)
    try:
        if tool_parser and reasoning_parser:
            return ChatFormat.named(tool_parser, reasoning_parser)
        if tool_parser:
            return ChatFormat.named(tool_parser).with_reasoning_of(detected)
        if reasoning_parser:
            return detected.with_reasoning_of(ChatFormat.named(None, reasoning_parser))
    except ValueError as unknown:
        _log.warning("%s; the format is detected from the model instead", unknown)
    return detected

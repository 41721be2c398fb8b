"""The chat format for a loaded model: the one that the options name, or else detected."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

from common.chat_format import ChatFormat
from common.formats.families import lenient
from common.formats.response_template import described

_log = logging.getLogger(__name__)


def chat_format(
    chat_template: str | None,
    vocabulary: Collection[str],
    tool_parser: str = "",
    reasoning_parser: str = "",
    response_template: Any = None,
) -> ChatFormat:
    """Return the chat format. If a parser name is unknown, it is logged and the format is detected.

    response_template: the description of answers in tokenizer_config.json, if there is one; it
    gives the tags of reasoning, and the calls of a model of no known family.

    A model is not refused for an unknown name, because LocalAI's importer writes names from a table
    of its own into model files.
    """
    detected = ChatFormat.detect(chat_template, vocabulary)
    family = described(response_template)
    if family is not None:
        answers = ChatFormat("response_template", lenient(family), family.shape)
        if detected.name == "plain" and family.shape:
            detected = answers.with_reasoning_of(detected)
        else:
            detected = detected.with_reasoning_of(answers)
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

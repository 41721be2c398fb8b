"""Chooses the chat format of a loaded model: as the options name it, or else as detected."""

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
    """Return the chat format of a model.

    If the name of a parser is unknown, the format is detected, and the name is logged. The model is
    not refused, because LocalAI's importer writes names from another table into model files.

    chat_template: the source of the model's template; None if it has none.
    vocabulary: all tokens.
    tool_parser, reasoning_parser: the options; '' if not set.
    response_template: the description of answers in tokenizer_config.json; None if there is none.
        Its tags of reasoning are used, and its calls if the model's family is unknown.
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

"""Predicts how many tokens of a chat prompt later prompts will share.

A cache that cannot be truncated can be reused only at lengths where a snapshot was taken, so these
lengths must be known before the prompt is computed. Chat templates do not only append to a prompt:
with the next question, they remove the text that begins an answer, remove reasoning, and move
tools. So this module renders the usual continuations of a conversation with the template. The
length that the prompt shares with a continuation is a position for a snapshot.
"""

from __future__ import annotations

import itertools
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.prefixes import common_prefix

Message = Mapping[str, Any]

# A noncharacter of Unicode, which never occurs in text.
_OTHER_TEXT = "\ufdee"
_CALL = {"id": "call00001", "type": "function", "function": {"name": "call", "arguments": {}}}
_LONGEST_STRETCH = 1 << 16  # maximum number of characters that are tokenised again for a cut


def continuations(
    messages: tuple[Message, ...], *, lists: bool = False, calls: bool = False
) -> Iterator[tuple[Message, ...]]:
    """Yield conversations that share a prefix with this conversation, the likeliest first.

    They are: the next question; more messages in the same turn, as in an agent's loop; another
    conversation with the same system prompt and tools; and the conversation with its last message
    changed.

    lists: whether the content of every message must be a list of parts.
    calls: whether the model may call tools. Some templates begin calls differently from answers.
    """
    content: Any = [{"type": "text", "text": _OTHER_TEXT}] if lists else _OTHER_TEXT
    question = {"role": "user", "content": content}
    answer = {"role": "assistant", "content": content}
    last = messages[-1] if messages else question
    answered = messages if last.get("role") == "assistant" else (*messages, answer)
    yield (*answered, question)
    if calls and answered is not messages:
        answer = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
        yield (*messages, answer)
    else:
        yield answered
    yield (*itertools.takewhile(_instructs, messages), question)
    yield (*messages[:-1], {**last, "content": content})


def _instructs(message: Message) -> bool:
    return message.get("role") in ("system", "developer")


@dataclass(eq=False)
class TokenPositions:
    """Maps positions in a prompt's text to numbers of tokens, without tokenising all of the text.

    Tokenizers split text at control tokens first, so the text after a control token does not change
    the tokens before it. The control strings in the text are matched in order with the control
    tokens in the prompt.
    """

    text: str  # the rendered prompt
    tokens: Sequence[int]  # the tokens of the rendered prompt
    control: Mapping[str, int]  # the ids of the control strings
    encode: Callable[[str], list[int]]  # tokenises a piece of text

    def __post_init__(self) -> None:
        text, tokens, control = self.text, self.tokens, self.control
        known = {token: string for string, token in control.items()}
        at = [index for index, token in enumerate(tokens) if token in known]
        strings = sorted({known[tokens[index]] for index in at}, key=len, reverse=True)
        found = list(re.finditer("|".join(map(re.escape, strings)), text)) if strings else []
        # If this is False, the tokenizer does not simply split at control strings.
        self._paired = [control[match[0]] for match in found] == [tokens[index] for index in at]
        self._ends = [0, *(match.end() for match in found)]
        self._lengths = [0, *(index + 1 for index in at)]

    def of(self, cuts: Iterable[int]) -> tuple[int, ...]:
        """Return, for each cut, how many tokens before the cut do not depend on the text after it.

        Zeros and repeated numbers are left out.

        cuts: positions in the text.
        """
        if not self._paired:
            return ()
        return tuple(dict.fromkeys(length for cut in cuts if (length := self._length(cut))))

    def _length(self, cut: int) -> int:
        nearest = bisect_left(self._ends, cut + 1) - 1
        length, between = self._lengths[nearest], self.text[self._ends[nearest] : cut]
        if len(between) > _LONGEST_STRETCH:
            return length
        pieces = self.encode(between)
        same = common_prefix(self.tokens[length : length + len(pieces)], pieces)
        # The last token may merge with text after the cut.
        return length + max(min(same, len(pieces) - 1), 0)

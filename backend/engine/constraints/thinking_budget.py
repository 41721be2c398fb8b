"""Limits the number of reasoning tokens in an answer.

The chat parser decides where reasoning begins and ends, so a budget means the same for every model
family. When the budget is used up, the mask forces the closing marker, one token per step. The
tokens of the marker are part of the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from backend.engine.constraints.constraint import AnswerRule, bits_of
from backend.engine.token_text import TextStream
from common.chat_format import ChatFormat
from common.chat_parser import ChatParser
from common.formats.reading import Tags
from common.prefixes import common_prefix

_LONGEST_CHARACTER = 4  # tokens, one for each byte
_ALL = 0xFFFFFFFF


def openings(
    chat_format: ChatFormat, encode: Callable[[str], list[int]], control: Collection[int]
) -> dict[tuple[int, ...], tuple[int, Tags]]:
    """Return the tokens that must not come next if reasoning is to stay closed, with their tags.

    Such a token is the first in which the tag that begins reasoning differs from all other
    markers. The keys are the tag's tokens before that token.

    encode: tokenises a marker.
    control: the ids of control tokens. A tag that begins with any other token is ordinary text,
        which cannot be forbidden.
    """
    grammar = chat_format.grammar
    markers = (*grammar.openers, *grammar.closers, *grammar.silent)
    others = [encode(marker) for marker in markers]
    found: dict[tuple[int, ...], tuple[int, Tags]] = {}
    for tags in grammar.tags:
        tokens = encode(tags.opening)
        if not tokens or tokens[0] not in control:
            continue
        shared = max((common_prefix(tokens, other) for other in others), default=0)
        at = min(shared, len(tokens) - 1)
        found[tuple(tokens[:at])] = tokens[at], tags
    return found


@dataclass(eq=False)
class ThinkingBudget:
    """An `AnswerRule` that limits reasoning.

    Created on a prompt thread, then used only by the engine thread.
    """

    most: int  # maximum number of reasoning tokens in the whole answer
    new_parser: Callable[[], ChatParser]  # creates the parser for the answer
    new_text: Callable[[], TextStream]  # creates the decoder for the answer
    encode: Callable[[str], list[int]]  # tokenises text, which may contain control tokens
    # The result of `openings`. Once the budget has ended the reasoning, none of these tokens may
    # open reasoning again.
    forbidden: Mapping[tuple[int, ...], tuple[int, Tags]]
    rule: AnswerRule | None = None  # another constraint on the answer

    def __post_init__(self) -> None:
        self._longest = max(map(len, self.forbidden), default=0)
        self._begin()

    @property
    def ended(self) -> bool:
        return self.rule is not None and self.rule.ended

    def restart(self, tokens: Sequence[int]) -> None:
        if self.rule is not None:
            self.rule.restart(tokens)
        self._begin()
        for token in tokens:
            self._follow(token)

    def fill(self, allowed: np.ndarray) -> None:
        if self.rule is None:
            allowed[:] = _ALL
        else:
            self.rule.fill(allowed)
        if self._forced:
            only = bits_of(self._forced[:1], len(allowed))
        elif self._closed and (opening := self._opening()):
            only = ~bits_of(opening, len(allowed))
        else:
            return
        # If the other rule allows none of these tokens, the other rule takes precedence.
        if (allowed & only).any():
            allowed &= only

    def accept(self, token: int) -> None:
        """Advance by a sampled token. Raises the other rule's exceptions."""
        if self.rule is not None:
            self.rule.accept(token)
        self._follow(token)

    def look_ahead(self, draft_tokens: Sequence[int], allowed: np.ndarray) -> int:  # noqa: ARG002
        return 0  # the parser that counts reasoning tokens cannot be copied

    def _begin(self) -> None:
        self._parser = self.new_parser()
        self._parser.feed("")  # the prompt may have opened reasoning
        self._text = self.new_text()
        self._spent = 0
        self._closed = False
        self._latest: tuple[int, ...] = ()
        self._forced = self._end("")

    def _follow(self, token: int) -> None:
        thought = self._parser.reasoning
        text = self._text.add(token)
        if text:
            self._parser.feed(text)
        self._latest = (*self._latest, token)[-self._longest :] if self._longest else ()
        if self._forced and self._forced[0] == token:
            self._forced = self._forced[1:]
            self._closed = not self._forced
            return
        self._spent += thought
        self._forced = self._end(text)

    def _end(self, latest: str) -> list[int]:
        """Return the tokens that close the reasoning if it must end now, else [].

        latest: the text that the latest token completed.
        """
        grace = _LONGEST_CHARACTER - 1 if self._spent and not latest else 0
        if self._spent < self.most + grace:
            return []
        end = self._parser.reasoning_end
        return self.encode(end) if end else []

    def _opening(self) -> list[int]:
        """Return the tokens that would open reasoning again if they came next."""
        return [
            token
            for before, (token, tags) in self.forbidden.items()
            if self._latest[len(self._latest) - len(before) :] == before
            and self._parser.may_open(tags)
        ]

"""Random answers that a constraint allows, written without a model."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from backend.engine.constraints.compiler import ConstraintCompiler
from backend.engine.constraints.constraint import AnswerRule, words
from backend.engine.constraints.matching import TokenizerSource
from backend.engine.constraints.table import source_of
from backend.engine.constraints.trial import Trial
from common.chat_format import ChatFormat
from tests.common.grammar_walks import BYTES, ByteTokenizer


def compiler_for(tokenizer: ByteTokenizer, chat_format: ChatFormat) -> ConstraintCompiler:
    return ConstraintCompiler(tokenizer, tokenizer.size, [tokenizer.end], chat_format)


def quick_compiler_for(tokenizer: ByteTokenizer, chat_format: ChatFormat) -> ConstraintCompiler:
    """Do the same, with the process that earlier compilers of an equal tokenizer have started.

    That process forks for each grammar, and takes longer to start than most grammars to compile.
    """
    compiler = compiler_for(tokenizer, chat_format)
    source = source_of(tokenizer.backend_tokenizer, tokenizer.size, [tokenizer.end])
    compiler._trial = _trial_of(source)
    return compiler


@cache
def _trial_of(source: TokenizerSource) -> Trial:
    return Trial(source)


def allowed_ids(constraint: AnswerRule, vocabulary: int) -> list[int]:
    mask = np.zeros(words(vocabulary), np.uint32)
    constraint.fill(mask)
    return ids_of(mask)


def ids_of(mask: np.ndarray) -> list[int]:
    return [int(i) for i in np.nonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))[0]]


@dataclass
class Walk:
    """Chooses bytes at random, and more and more often those that lead to the end of the answer.

    closers: texts that close something; they are preferred when the answer should end.
    """

    tokenizer: ByteTokenizer
    choose: random.Random
    closers: Sequence[str] = ('"', "}", "]")

    def text(self, constraint: AnswerRule, patience: int = 200, longest: int = 3000) -> str:
        """An answer, without the token that ends it."""
        found: list[int] = []
        while not constraint.ended:
            assert len(found) < longest, self.tokenizer.text(found)
            ids = allowed_ids(constraint, self.tokenizer.size)
            if self.tokenizer.end in ids:
                if self.choose.random() < 0.5:
                    break
                ids.remove(self.tokenizer.end)
            hurried = self.choose.random() < (len(found) / patience) ** 3
            token = self._closing(found, ids) if hurried else None
            found.append(self.choose.choice(ids) if token is None else token)
            constraint.accept(found[-1])
        return self.tokenizer.text(found)

    def _closing(self, found: list[int], ids: list[int]) -> int | None:
        """The token that continues the closing text of which most has been written."""
        tail = bytes(token if token < BYTES else 0 for token in found[-40:])
        steps: list[tuple[int, int]] = []
        for closer in map(str.encode, self.closers):
            for written in range(len(closer) - 1, -1, -1):
                if tail.endswith(closer[:written]) and closer[written] in ids:
                    steps.append((written, closer[written]))
                    break
        furthest = [step for step in steps if step[0] == max(steps)[0]]
        markers = [token for token in ids if token >= BYTES]
        if markers and (not steps or self.choose.random() < 0.5):
            return self.choose.choice(markers)
        return self.choose.choice(furthest)[1] if furthest else None


def byte_walk(tokenizer: ByteTokenizer, seed: int, *closers: str) -> Walk:
    return Walk(tokenizer, random.Random(seed), (*closers, '"', "}", "]"))

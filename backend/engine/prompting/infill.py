"""Builds fill-in-the-middle prompts, for text between a prefix and a suffix."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from backend.engine.request import InfillPrompt
from common.infill_tokens import FAMILIES, Family

Encode = Callable[[str], list[int]]
_REPOSITORY = "myproject\n"
_FILE = "filename\n"
_SNIPPET = "\n\n--- snippet ---\n\n"
_LEAD = "☺"  # a character that no tokenizer joins to the next


class Infill:
    """Builds fill-in-the-middle prompts for a model.

    ends: tokens that end such an answer, in addition to the model's end tokens.
    """

    def __init__(self, family: Family, vocabulary: Mapping[str, int]) -> None:
        self._family = family
        self._vocabulary = vocabulary
        self._repository = self._first(family.repository)
        self._file = self._first(family.file)
        others = (self._first((name,)) for name in family.ends)
        found = (self._repository, self._file, *others)
        self.ends = frozenset(token for token in found if token is not None)

    def tokens(self, prompt: InfillPrompt, encode: Encode) -> list[int]:
        """Return the tokens of a prompt, without a BOS token.

        encode: tokenises a text, and reads no control tokens in it.
        """
        family = self._family
        prefix = [self._vocabulary[family.prefix], *encode(prompt.prefix)]
        suffix = [self._vocabulary[family.suffix], *self._bare(prompt.suffix, encode)]
        parts = suffix + prefix if family.suffix_first else prefix + suffix
        middle = [self._vocabulary[family.middle]] if family.middle else []
        return [*self._files(prompt, encode), *parts, *middle]

    def _bare(self, text: str, encode: Encode) -> list[int]:
        """Return the tokens of a text without the space that SentencePiece writes before a text.

        CodeLlama and Codestral were trained without this space, because the suffix continues in the
        middle of a line.
        """
        lead = encode(_LEAD)
        if not lead or lead[0] != self._vocabulary.get("▁"):
            return encode(text)
        return encode(_LEAD + text)[len(lead) :]

    def _files(self, prompt: InfillPrompt, encode: Encode) -> Iterator[int]:
        """Yield the tokens of other files of the repository, in llama.cpp's form."""
        if not prompt.files:
            return
        if self._repository is not None and self._file is not None:
            yield self._repository
            yield from encode(_REPOSITORY)
        for name, text in prompt.files:
            if self._file is not None:
                yield self._file
                yield from encode(f"{name}\n")
            else:
                yield from encode(_SNIPPET)
            yield from encode(text)
        if self._file is not None:
            yield self._file
            yield from encode(_FILE)

    def _first(self, names: tuple[str, ...]) -> int | None:
        return next((self._vocabulary[name] for name in names if name in self._vocabulary), None)


def infill_of(vocabulary: Mapping[str, int]) -> Infill | None:
    """Return a prompt builder if the vocabulary has all tokens of a family; otherwise None."""
    for family in FAMILIES:
        needed = (family.prefix, family.suffix, *([family.middle] if family.middle else []))
        if all(name in vocabulary for name in needed):
            return Infill(family, vocabulary)
    return None

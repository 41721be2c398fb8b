"""Fill-in-the-middle prompts: the model writes the text between a prefix and a suffix.

Models that were trained for it have special tokens that mark the parts. Sources of the names:
llama.cpp's list (`src/llama-vocab.cpp`), the added tokens in the published tokenizers of
Qwen2.5-Coder, CodeGemma, Granite 4 and DeepSeek-Coder, transformers' tokenizer of CodeLlama,
mistral-common for Codestral, and the Seed-Coder report. The order of the parts comes from the same
sources and from each model's card. A model is recognised by its token names alone. Two models use
the names of a family but were trained with the suffix first, and still get the family's order:
Mellum (StarCoder's names) and CodeGeeX4 (GLM's names).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from backend.engine.request import InfillPrompt

Encode = Callable[[str], list[int]]
_REPOSITORY = "myproject\n"
_FILE = "filename\n"
_SNIPPET = "\n\n--- snippet ---\n\n"
_LEAD = "☺"  # a character that no tokenizer joins to the next


@dataclass(frozen=True, slots=True)
class Family:
    """The special tokens before the prefix, the suffix and the middle (the text to write).

    suffix_first: whether the suffix comes before the prefix. middle: '' for models that continue
    the prefix without such a token. repository, file: tokens before the name of a repository and of
    each of its files; the first that the model has is used. ends: additional tokens that end an
    answer.
    """

    prefix: str
    suffix: str
    middle: str
    suffix_first: bool = False
    repository: tuple[str, ...] = ()
    file: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()


FAMILIES = (
    # Qwen2.5-Coder, Qwen3-Coder, CodeGemma, Granite 4
    Family(
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        repository=("<|repo_name|>", "<|reponame|>"),
        file=("<|file_sep|>", "<|filename|>"),
        ends=("<|fim_pad|>", "<|file_separator|>"),
    ),
    # StarCoder and StarCoder2, Granite code, StableCode
    Family(
        "<fim_prefix>",
        "<fim_suffix>",
        "<fim_middle>",
        repository=("<repo_name>", "<reponame>"),
        file=("<file_sep>", "<filename>"),
        ends=("<fim_pad>",),
    ),
    Family("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ends=("<fim-pad>",)),  # SantaCoder
    Family("▁<PRE>", "▁<SUF>", "▁<MID>", ends=("▁<EOT>",)),  # CodeLlama
    Family("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    Family("[PREFIX]", "[SUFFIX]", "", suffix_first=True),  # Codestral
    Family("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", suffix_first=True),  # Seed-Coder
    Family("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM-4.5
    Family("<|prefix|>", "<|suffix|>", "<|middle|>"),  # Falcon-H1-Tiny-Coder
)


class Infill:
    """Builds fill-in-the-middle prompts for one model.

    ends: tokens that end such an answer in addition to the model's end tokens.
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
        """The prompt, without a BOS token. encode: tokenises text without control tokens."""
        family = self._family
        prefix = [self._vocabulary[family.prefix], *encode(prompt.prefix)]
        suffix = [self._vocabulary[family.suffix], *self._bare(prompt.suffix, encode)]
        parts = suffix + prefix if family.suffix_first else prefix + suffix
        middle = [self._vocabulary[family.middle]] if family.middle else []
        return [*self._files(prompt, encode), *parts, *middle]

    def _bare(self, text: str, encode: Encode) -> list[int]:
        """The text without the space that SentencePiece puts before every text.

        CodeLlama and Codestral were trained without it, because the suffix continues in the middle
        of a line.
        """
        lead = encode(_LEAD)
        if not lead or lead[0] != self._vocabulary.get("▁"):
            return encode(text)
        return encode(_LEAD + text)[len(lead) :]

    def _files(self, prompt: InfillPrompt, encode: Encode) -> Iterator[int]:
        """Other files of the same repository, the way llama.cpp writes them."""
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
    """The prompt builder for a model whose vocabulary has all tokens of a family; else None."""
    for family in FAMILIES:
        needed = (family.prefix, family.suffix, *([family.middle] if family.middle else []))
        if all(name in vocabulary for name in needed):
            return Infill(family, vocabulary)
    return None

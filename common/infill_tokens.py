"""Lists the special tokens of models that fill in the text between a prefix and a suffix.

Sources of the names: llama.cpp's list (`src/llama-vocab.cpp`), the added tokens in the published
tokenizers of Qwen2.5-Coder, CodeGemma, Granite 4 and DeepSeek-Coder, transformers' tokenizer of
CodeLlama, mistral-common for Codestral, and the Seed-Coder report. The order of the parts comes
from the same sources and from each model's card. A model is recognised by its token names alone.
Two models use the names of a family but were trained with the suffix first, and still get the
family's order: Mellum (StarCoder's names) and CodeGeeX4 (GLM's names).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Family:
    """The special tokens of a family for filling in the middle.

    prefix: the token before the prefix.
    suffix: the token before the suffix.
    middle: the token before the text to generate; '' for models that continue the prefix.
    suffix_first: whether the suffix comes before the prefix.
    repository: tokens before the name of a repository; the first that a model has is used.
    file: tokens before the name of a file; the first that a model has is used.
    ends: additional tokens that end an answer.
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

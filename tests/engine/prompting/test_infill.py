"""Fill-in-the-middle prompts, in the format of each family that supports them."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from tokenizers import Tokenizer, models, normalizers

from backend.engine.prompting.infill import infill_of
from backend.engine.request import InfillPrompt
from common.infill_tokens import FAMILIES

# Special tokens of real tokenizers, with other ids.
QWEN = "<|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> <|repo_name|> <|file_sep|>"
STARCODER2 = "<fim_prefix> <fim_middle> <fim_suffix> <fim_pad> <repo_name> <file_sep>"
GRANITE = "<fim_prefix> <fim_middle> <fim_suffix> <fim_pad> <filename> <reponame>"
CODEGEMMA = "<|fim_prefix|> <|fim_suffix|> <|fim_middle|> <|file_separator|>"
CODELLAMA = "▁<PRE> ▁<SUF> ▁<MID> ▁<EOT>"
DEEPSEEK = "<｜fim▁begin｜> <｜fim▁hole｜> <｜fim▁end｜>"
CODESTRAL = "[INST] [PREFIX] [MIDDLE] [SUFFIX]"
FILES = (("a.py", "X"),)


def vocabulary_of(tokens: str) -> dict[str, int]:
    return {name: 1000 + place for place, name in enumerate(tokens.split())}


def written(tokens: str, files: tuple[tuple[str, str], ...] = ()) -> str:
    """The prompt as text, with the name of every special token."""
    vocabulary = vocabulary_of(tokens)
    infill = infill_of(vocabulary)
    assert infill is not None
    names: Mapping[int, str] = {token: name for name, token in vocabulary.items()}
    found = infill.tokens(InfillPrompt("before", "after", files), lambda text: list(map(ord, text)))
    return "".join(names.get(token) or chr(token) for token in found)


@pytest.mark.parametrize(
    ("tokens", "prompt"),
    [
        (QWEN, "<|fim_prefix|>before<|fim_suffix|>after<|fim_middle|>"),
        (STARCODER2, "<fim_prefix>before<fim_suffix>after<fim_middle>"),
        (GRANITE, "<fim_prefix>before<fim_suffix>after<fim_middle>"),
        (CODEGEMMA, "<|fim_prefix|>before<|fim_suffix|>after<|fim_middle|>"),
        (CODELLAMA, "▁<PRE>before▁<SUF>after▁<MID>"),
        (DEEPSEEK, "<｜fim▁begin｜>before<｜fim▁hole｜>after<｜fim▁end｜>"),
        (CODESTRAL, "[SUFFIX]after[PREFIX]before"),
    ],
)
def test_each_family_has_its_format(tokens: str, prompt: str) -> None:
    assert written(tokens) == prompt


@pytest.mark.parametrize(
    ("tokens", "files"),
    [
        (QWEN, "<|repo_name|>myproject\n<|file_sep|>a.py\nX<|file_sep|>filename\n"),
        (GRANITE, "<reponame>myproject\n<filename>a.py\nX<filename>filename\n"),
        (DEEPSEEK, "\n\n--- snippet ---\n\nX"),
    ],
)
def test_other_files_come_first(tokens: str, files: str) -> None:
    assert written(tokens, FILES) == files + written(tokens)


def test_a_token_that_would_begin_another_file_ends_the_answer() -> None:
    vocabulary = vocabulary_of(QWEN)
    infill = infill_of(vocabulary)
    assert infill is not None
    ends = {"<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"}
    assert infill.ends == {vocabulary[name] for name in ends}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.prefix)
def test_one_token_of_three_is_not_enough(family: object) -> None:
    assert infill_of({FAMILIES[0].prefix: 1, FAMILIES[1].suffix: 2}) is None
    names = [name for name in (getattr(family, n) for n in ("prefix", "suffix", "middle")) if name]
    assert infill_of(dict.fromkeys(names, 1)) is not None
    assert infill_of(dict.fromkeys(names[1:], 1)) is None


def sentencepiece(names: list[str]) -> Tokenizer:
    """Tokenises like CodeLlama's tokenizer.json, which puts a space before a text, written as ▁."""
    characters = ["▁", "☺", *"abcdefghijklmnopqrstuvwxyz"]
    merges = [("▁", "a"), ("▁a", "f")]
    pieces = [*characters, *("".join(merge) for merge in merges), *names]
    vocabulary = {piece: place for place, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    return tokenizer


def test_a_suffix_gets_no_added_space() -> None:
    tokenizer = sentencepiece(CODELLAMA.split())
    infill = infill_of(tokenizer.get_vocab())
    assert infill is not None

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text).ids)

    for suffix, pieces in (("after", list("after")), (" after", ["▁af", *"ter"]), ("", [])):
        found = infill.tokens(InfillPrompt("before", suffix, ()), encode)
        names = [tokenizer.id_to_token(token) for token in found]
        assert names == ["▁<PRE>", "▁", *"before", "▁<SUF>", *pieces, "▁<MID>"]

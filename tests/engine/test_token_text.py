"""Token ids to text: whole characters, nothing lost, nothing that a host stumbles over."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from backend.engine.token_text import TextStream, TokenTexts, byte_level_alphabet


class _Wrapped:
    """The part of mlx-lm's TokenizerWrapper that TokenTexts reads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.backend_tokenizer = tokenizer


def _byte_level() -> Tokenizer:
    alphabet = sorted(byte_level_alphabet())
    vocabulary = {piece: token for token, piece in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<think>"), AddedToken("<é>")])
    return tokenizer


def _sentencepiece() -> Tokenizer:
    vocabulary = {"<unk>": 0, "▁Hi": 1, "▁there": 2, "▁": 3}
    vocabulary |= {f"<0x{value:02X}>": 4 + value for value in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


BYTE_LEVEL = _byte_level()
VOCABULARY = BYTE_LEVEL.get_vocab()
STREAMS = TokenTexts(_Wrapped(BYTE_LEVEL)).stream


def _read(stream: TextStream, tokens: list[int]) -> list[str]:
    return [*(stream.add(token) for token in tokens), stream.finish()]


@given(st.text(st.characters(exclude_characters="\ufffd", exclude_categories=["Cs"])))
def test_every_text_is_restored_and_no_piece_splits_a_character(text: str) -> None:
    tokens = BYTE_LEVEL.encode(text, add_special_tokens=False).ids
    pieces = _read(STREAMS(False), tokens)
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)


@given(st.lists(st.integers(0, 257)))
def test_any_tokens_give_text_that_a_host_can_show(tokens: list[int]) -> None:
    text = "".join(_read(STREAMS(False), tokens))
    assert "\ufffd" not in text
    assert text.encode().decode() == text


def test_a_space_at_the_start_and_a_lone_space_are_sent_at_once() -> None:
    tokens = BYTE_LEVEL.encode(" a  b", add_special_tokens=False).ids
    assert _read(STREAMS(False), tokens) == [" ", "a", " ", " ", "b", ""]


def test_the_text_of_added_tokens_is_literal() -> None:
    ids = [VOCABULARY["<think>"], VOCABULARY["<é>"]]
    assert _read(STREAMS(False), ids) == ["<think>", "<é>", ""]


def test_an_unfinished_character_is_dropped_and_the_next_one_is_complete() -> None:
    alphabet = {value: piece for piece, value in byte_level_alphabet().items()}
    ids = [VOCABULARY[alphabet[value]] for value in b"\xf0\x9f\x98A\xe4"]
    assert "".join(_read(STREAMS(False), ids)) == "A"


def test_sentencepiece_bytes_are_joined_and_the_first_space_is_dropped() -> None:
    stream = TokenTexts(_Wrapped(_sentencepiece())).stream(False)
    cjk = [4 + value for value in "好".encode()]
    assert _read(stream, [1, 2, *cjk, 3]) == ["Hi", " there", "", "", "好", " ", ""]


def test_the_continuation_of_a_prompt_keeps_its_first_space() -> None:
    stream = TokenTexts(_Wrapped(_sentencepiece())).stream(True)
    assert _read(stream, [1, 2]) == [" Hi", " there", ""]


def test_ids_beyond_the_vocabulary_have_no_text() -> None:
    assert STREAMS(False).add(10_000) == ""


@pytest.mark.parametrize("tokenizer", [_byte_level(), _sentencepiece()])
def test_streams_of_one_model_share_nothing(tokenizer: Tokenizer) -> None:
    new = TokenTexts(_Wrapped(tokenizer)).stream
    first, second = new(False), new(False)
    first.add(len("half a character") + 200)
    assert second.finish() == ""


class _Counted:
    """A tokenizer that counts how many tokens are read from it. Only its look-ups are counted."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.read = 0

    def id_to_token(self, token: int) -> str | None:
        self.read += 1
        return self._tokenizer.id_to_token(token)

    def get_vocab(self, *_: object, **__: object) -> dict[str, int]:
        raise AssertionError("the whole vocabulary was read")

    def __getattr__(self, name: str) -> object:
        return getattr(self._tokenizer, name)


@pytest.mark.parametrize("tokenizer", [_byte_level(), _sentencepiece()])
def test_only_the_tokens_that_are_written_are_read(tokenizer: Tokenizer) -> None:
    counted = _Counted(tokenizer)
    stream = TokenTexts(_Wrapped(counted)).stream(False)  # type: ignore[arg-type]
    assert counted.read == 0
    stream.add(1)
    assert counted.read == 1

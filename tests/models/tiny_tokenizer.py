"""The byte-level tokenizer of the tiny model.

Merges are learned from ASCII text only, so every Chinese character and every emoji takes
several tokens: tests of streaming need characters that are cut in the middle. A capitalised
word never swallows the space before it, so a city has the same tokens in a question and
between the quotes of a tool call, and copying it is copying tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

VOCABULARY_SIZE = 512
MAX_POSITIONS = 8192
END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
TURN_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
TEXT_MARKERS = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>",
)  # fmt: skip
TEMPLATE = Path(__file__).with_name("tiny_chat_template.jinja")

_SPLIT = r" ?\p{Ll}+|\p{Lu}\p{Ll}*|\p{L}|\p{N}| ?[^\s\p{L}\p{N}]+|\n+|[^\S\n]+(?=[^\S\n])|[^\S\n]"


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Learn the merges; markers keep low, fixed ids."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[*TURN_TOKENS, *TEXT_MARKERS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text for text in texts if text.isascii()), trainer)
    # Reasoning and tool markers are part of the text a server parses: they must survive
    # decoding with skip_special_tokens, so they are added tokens but not special ones.
    document = json.loads(tokenizer.to_str())
    for token in document["added_tokens"]:
        token["special"] = token["content"] in TURN_TOKENS
    return Tokenizer.from_str(json.dumps(document))


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Write the files that make `AutoTokenizer` load exactly this tokenizer.

    `TokenizersBackend` takes tokenizer.json as it is; the classes of known model families
    would put their own pre-tokenizer in its place.
    """
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "backend": "tokenizers",
        "clean_up_tokenization_spaces": False,
        "eos_token": TURN_END,
        "extra_special_tokens": [TURN_START],
        "model_max_length": MAX_POSITIONS,
        "pad_token": END_OF_TEXT,
        "tokenizer_class": "TokenizersBackend",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
    (directory / "chat_template.jinja").write_text(TEMPLATE.read_text())


def check_round_trip(directory: Path) -> None:
    """Fail when the loaded tokenizer differs from the raw one or loses a byte."""
    from transformers import AutoTokenizer

    raw = Tokenizer.from_file(str(directory / "tokenizer.json"))
    loaded = AutoTokenizer.from_pretrained(directory)
    samples = [
        "Hello, world!", "  two  spaces \n\n new\tline ", '{"city": "São Paulo"}', "Zürich ﬁ ½ ²",
        "你好，世界", "👨‍👩‍👧‍👦🇫🇷", "e\u0301 \u212b", "<think>\nx\n</think>", "مرحبا עולם",
        "".join(map(chr, range(1, 400))),
    ]  # fmt: skip
    for sample in samples:
        ids = raw.encode(sample, add_special_tokens=False).ids
        if loaded.encode(sample, add_special_tokens=False) != ids:
            raise ValueError(f"AutoTokenizer encodes {sample!r} in its own way")
        if loaded.decode(ids) != sample or raw.decode(ids, skip_special_tokens=False) != sample:
            raise ValueError(f"{sample!r} does not survive a round trip")
    for character in "你好世界日本🚀🍎안":
        if len(loaded.encode(character, add_special_tokens=False)) < 2:
            raise ValueError(f"{character!r} is a single token")

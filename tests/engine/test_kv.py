"""Sequences in batches of every history, against each of them alone on its own row cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.engine import kv
from tests.engine.kv_models import MODELS, kv_model, words

TOGETHER = [kind for kind in MODELS if kind != "convolved attention"]


@pytest.fixture(autouse=True)
def _no_compiler() -> Iterator[None]:
    mx.disable_compile()
    yield
    mx.enable_compile()


@dataclass
class Text:
    """A prompt and what the model said to it; the first `fed` tokens are in some cache."""

    prompt: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    fed: int = 0

    def __post_init__(self) -> None:
        self.tokens = self.tokens or list(self.prompt)

    @property
    def unread(self) -> int:
        """Tokens of the prompt before its last, which decoding feeds."""
        return max(len(self.prompt) - 1 - self.fed, 0)

    def copy(self) -> Text:
        return Text(self.prompt, list(self.tokens), self.fed)


@cache
def _alone(kind: str, prompt: tuple[int, ...], count: int) -> list[int]:
    """The prompt and `count` greedy tokens, on a row cache of mlx-lm's own where it has one."""
    model, row, tokens = kv_model(kind), kv.new_row(kv_model(kind)), list(prompt)
    for start in range(0, len(prompt) - 1, 32):
        model(mx.array([prompt[start : min(start + 32, len(prompt) - 1)]]), cache=row)
    for _ in range(count):
        logits = model(mx.array([tokens[-1:]]), cache=row)
        tokens.append(int(mx.argmax(logits[0, -1]).item()))
    return tokens


class Floor:
    """Where texts are: read in one group, decoded in another, or stored."""

    def __init__(self, kind: str) -> None:
        self.model = kv_model(kind)
        self.group, self.reading = kv.BatchCache(), list[Text]()
        self.batch, self.running = kv.BatchCache(), list[Text]()
        self.stored: list[tuple[Text, kv.RowCache]] = []
        self.gone: list[Text] = []

    def arrive(self, texts: Sequence[Text]) -> None:
        self.group.join([kv.new_row(self.model) for _ in texts])
        self.reading += texts

    def read(self, most: Sequence[int]) -> None:
        """A chunk of each prompt; those that are through go on to the batch."""
        done = [at for at, text in enumerate(self.reading) if not text.unread]
        self.batch.absorb(self.group, done)
        self.running += [self.reading[at] for at in done]
        self.reading = [text for text in self.reading if text.unread]
        if not self.reading:
            return
        counts = [min(text.unread, most[at % len(most)]) for at, text in enumerate(self.reading)]
        chunks = [
            text.prompt[text.fed : text.fed + count] + (0,) * (max(counts) - count)
            for text, count in zip(self.reading, counts, strict=True)
        ]
        with self.group.prefill(counts) as layers:
            self.model(mx.array(chunks), cache=layers)
        for text, count in zip(self.reading, counts, strict=True):
            text.fed += count

    def step(self) -> None:
        if self.running:
            fed = mx.array([[text.tokens[-1]] for text in self.running])
            logits = self.model(fed, cache=self.batch.layers)
            for text, token in zip(
                self.running, mx.argmax(logits[:, -1], -1).tolist(), strict=True
            ):
                text.fed += 1
                text.tokens.append(token)

    def store(self, place: int) -> None:
        self.stored.append((self.running[place].copy(), self.batch.extract(place)))

    def leave(self, places: Sequence[int]) -> None:
        self.gone += [self.running[place] for place in places]
        self.batch.leave(places)
        self.running = [text for at, text in enumerate(self.running) if at not in places]

    def return_(self, places: Sequence[int]) -> None:
        """Go on from stored texts, which stay stored."""
        self.batch.join([kv.clone(self.stored[place][1]) for place in places])
        self.running += [self.stored[place][0].copy() for place in places]


@pytest.mark.parametrize("kind", TOGETHER)
@settings(max_examples=25)
@given(st.data())
def test_a_sequence_says_what_it_says_alone(kind: str, data: st.DataObject) -> None:
    floor = Floor(kind)
    lengths = st.lists(st.sampled_from([1, 2, 9, 30, 45]), min_size=1, max_size=3)
    for _ in range(data.draw(st.integers(4, 16))):
        match data.draw(st.sampled_from("arrive read read step step step leave return".split())):
            case "arrive":
                starts = st.integers(1, 3)
                prompts = [words(count, data.draw(starts)) for count in data.draw(lengths)]
                floor.arrive([Text(tuple(prompt)) for prompt in prompts])
            case "read":
                floor.read(data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=3)))
            case "step":
                for _ in range(data.draw(st.sampled_from([1, 1, 5]))):
                    floor.step()
            case "leave" if floor.running:
                places = data.draw(st.sets(st.integers(0, len(floor.running) - 1), max_size=2))
                for place in places:
                    if data.draw(st.booleans()):
                        floor.store(place)
                floor.leave(sorted(places))
            case "return" if floor.stored:
                places = st.lists(st.integers(0, len(floor.stored) - 1), min_size=1, max_size=2)
                floor.return_(data.draw(places))
    while floor.reading:
        floor.read([17])
    floor.step()
    floor.step()
    for text in [*floor.gone, *floor.running, *(text for text, _ in floor.stored)]:
        said = len(text.tokens) - len(text.prompt)
        assert text.tokens == _alone(kind, text.prompt, said)
        assert text.fed == len(text.prompt) - 1 + said or text.unread

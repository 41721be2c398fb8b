"""Sequences in batches of every history, each compared with itself alone on its own row cache."""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import ArraysCache, CacheList

from backend.engine.caching import kv
from backend.engine.caching.gather import gathered
from backend.engine.caching.layer_kv import LayerKV, WindowKV
from backend.engine.caching.quantized_kv import Bits, Packing, QuantizedKV
from tests.engine.kv_models import MODELS, kv_model, words
from tests.long import TEST_LONG

ATTENTION = ("attention", "window", "latent", "quantised")


@dataclass
class Text:
    """A prompt and the model's tokens after it; the first `fed` of them are in a cache."""

    prompt: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    fed: int = 0

    def __post_init__(self) -> None:
        self.tokens = self.tokens or list(self.prompt)

    @property
    def unread(self) -> int:
        """Prompt tokens that prefill has yet to feed; the last one is left to the decode step."""
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
        tokens += _best(logits)
    return tokens


def _best(logits: mx.array) -> list[int]:
    best: Any = mx.argmax(logits[:, -1], axis=-1).tolist()
    return list(best)


class Batches:
    """Prefills texts in one group, decodes them in another, and stores them."""

    def __init__(self, kind: str) -> None:
        self.model = kv_model(kind)
        self.ragged = kv.can_prefill_together(self.model)
        self.group, self.reading = kv.BatchCache(), list[Text]()
        self.batch, self.running = kv.BatchCache(), list[Text]()
        self.stored: list[tuple[Text, kv.RowCache]] = []
        self.gone: list[Text] = []

    def arrive(self, texts: Sequence[Text]) -> None:
        self.group.join([(kv.new_row(self.model), 0) for _ in texts])
        self.reading += texts

    def read(self, most: Sequence[int]) -> None:
        """Prefill a chunk of each prompt; finished ones join the batch."""
        done = [at for at, text in enumerate(self.reading) if not text.unread]
        order = self.batch.absorb(self.group, done)
        self.running += [self.reading[at] for at in done]
        self.reorder(order)
        self.reading = [text for text in self.reading if text.unread]
        if not self.reading:
            return
        counts = [min(text.unread, most[at % len(most)]) for at, text in enumerate(self.reading)]
        if not self.ragged:
            counts = [min(counts)] * len(counts)
        chunks = [
            text.prompt[text.fed : text.fed + count] + (0,) * (max(counts) - count)
            for text, count in zip(self.reading, counts, strict=True)
        ]
        with self.group.prefill(counts) as layers:
            self.model(mx.array(chunks), cache=layers)
        for text, count in zip(self.reading, counts, strict=True):
            text.fed += count

    def reorder(self, order: Sequence[int]) -> None:
        self.running = [self.running[place] for place in order]

    def step(self) -> None:
        self.batch.arrange()
        if self.running:
            fed = mx.array([[text.tokens[-1]] for text in self.running])
            if rows := self.batch.pass_rows:
                fed = fed[mx.array(rows[0])]
            logits = self.model(fed, cache=self.batch.layers)
            if rows:
                logits = logits[mx.array(rows[1])]
            for text, token in zip(self.running, _best(logits), strict=True):
                text.fed += 1
                text.tokens.append(token)

    def store(self, place: int) -> None:
        self.stored.append((self.running[place].copy(), self.batch.extract(place)))

    def leave(self, places: Sequence[int]) -> None:
        self.gone += [self.running[place] for place in places]
        self.batch.leave(places)
        self.running = [text for at, text in enumerate(self.running) if at not in places]

    def return_(self, places: Sequence[int]) -> None:
        """Add copies of stored sequences to the batch."""
        order = self.batch.arrange([(kv.clone(self.stored[place][1]), 0) for place in places])
        self.running += [self.stored[place][0].copy() for place in places]
        self.reorder(order)


@pytest.mark.parametrize("kind", MODELS)
@settings(max_examples=25)
@given(st.data())
def test_a_sequence_gets_the_same_tokens_as_alone(kind: str, data: st.DataObject) -> None:
    batches = Batches(kind)
    lengths = st.lists(st.sampled_from([1, 2, 9, 30, 45]), min_size=1, max_size=3)
    for _ in range(data.draw(st.integers(4, 16))):
        batches.batch.rows = data.draw(st.sampled_from([0, 2, 4, 8]))
        batches.batch.keeps_unused = data.draw(st.booleans())
        match data.draw(st.sampled_from("arrive read read step step step leave return".split())):
            case "arrive":
                starts = st.integers(1, 3)
                prompts = [words(count, data.draw(starts)) for count in data.draw(lengths)]
                batches.arrive([Text(tuple(prompt)) for prompt in prompts])
            case "read":
                batches.read(data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=3)))
            case "step":
                for _ in range(data.draw(st.sampled_from([1, 1, 5]))):
                    batches.step()
            case "leave" if batches.running:
                leaving = data.draw(st.sets(st.integers(0, len(batches.running) - 1), max_size=2))
                for place in leaving:
                    if data.draw(st.booleans()):
                        batches.store(place)
                batches.leave(sorted(leaving))
            case "return" if batches.stored:
                anyone = st.integers(0, len(batches.stored) - 1)
                batches.return_(data.draw(st.lists(anyone, min_size=1, max_size=2)))
    while batches.reading:
        batches.read([17])
    batches.step()
    batches.step()
    for text in [*batches.gone, *batches.running, *(text for text, _ in batches.stored)]:
        generated = len(text.tokens) - len(text.prompt)
        assert text.tokens == _alone(kind, text.prompt, generated)
        assert text.fed == len(text.prompt) - 1 + generated or text.unread


@pytest.mark.parametrize("kind", MODELS)
def test_padding_is_skipped_if_the_model_can(kind: str) -> None:
    assert kv.can_prefill_together(kv_model(kind)) is (kind != "convolved attention")


def _filled(kind: str, count: int, start: int = 1, **changes: Any) -> kv.RowCache:
    model = kv_model(kind, **changes)
    row = kv.new_row(model)
    mx.eval(model(mx.array([words(count, start)]), cache=row))
    return row


def _masks(batch: kv.BatchCache, tokens: int) -> list[Any]:
    return [layer.make_mask(tokens, window_size=None) for layer in batch.layers]


@pytest.mark.parametrize("kind", ATTENTION)
def test_a_mask_is_an_array_only_where_lengths_differ(kind: str) -> None:
    """An array keeps MLX from its fused decode kernels."""
    batch = kv.BatchCache([_filled(kind, 9), _filled(kind, 9, 2)])
    assert _masks(batch, 1) == [None, None]
    assert _masks(batch, 3) == ["causal", "causal"]
    batch.join([(_filled(kind, 5), 0)])
    assert all(isinstance(mask, mx.array) for mask in _masks(batch, 1) + _masks(batch, 3))
    batch.leave([2])
    assert _masks(batch, 1) == [None, None]


def test_a_full_window_needs_no_mask() -> None:
    batch = kv.BatchCache([_filled("window", 40), _filled("window", 60)])
    window, whole = _masks(batch, 1)
    assert window is None
    assert isinstance(whole, mx.array)


def test_a_lone_sequence_keeps_its_own_row() -> None:
    row = _filled("attention", 9)
    group, batch = kv.BatchCache([row]), kv.BatchCache()
    assert group.layers is row
    batch.absorb(group, [0])
    assert batch.layers is row
    assert not len(group)
    batch.join([(_filled("attention", 5), 0)])
    batch.leave([1])
    assert [type(layer) for layer in batch.layers] == [type(layer) for layer in row]
    assert batch.nbytes == 9 * kv.cost(kv_model("attention")).per_token


def test_caches_for_one_sequence_are_not_batched() -> None:
    model = kv_model("compressed")
    batch = kv.BatchCache([kv.new_row(model)])
    with pytest.raises(ValueError, match="one sequence at a time"):
        batch.join([(kv.new_row(model), 0)])
    with batch.prefill([3]) as layers:
        model(mx.array([[1, 2, 3]]), cache=layers)
    assert batch.extract(0)[0].offset == 3
    assert not kv.can_prefill_together(model)


@pytest.mark.parametrize("counts", [[1], [1, 0], [1, 2, 3]])
def test_every_sequence_of_a_prefill_gets_at_least_one_token(counts: list[int]) -> None:
    batch = kv.BatchCache([_filled("attention", 3), _filled("attention", 4)])
    with pytest.raises(ValueError, match="2 sequences do not accept"), batch.prefill(counts):
        pass


@pytest.mark.parametrize("kind", MODELS)
def test_joining_and_leaving_copies_once_and_does_not_wait(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The running step continues while sequences come and go."""
    batch = kv.BatchCache([_filled(kind, 3 + at) for at in range(4)])
    joining, made = _filled(kind, 5), []

    def counted(members: Any, rows: int) -> Any:
        made.append(members)
        return gathered(members, rows)

    def wait(*_: Any) -> None:
        raise AssertionError("the host waited for the device")

    monkeypatch.setattr("backend.engine.caching.kv.gathered", counted)
    for name in ("tolist", "item"):
        monkeypatch.setattr(mx.array, name, wait)
    monkeypatch.setattr(mx, "eval", wait)
    batch.extract(1)
    batch.leave([1])
    assert not made
    batch.join([(joining, 0)])
    assert len(made) == len(batch.layers) == len(joining)
    batch.leave([0, 3])
    assert len(batch.layers) == len(joining)
    assert len(made) == 2 * len(joining)


def test_a_failed_join_changes_nothing() -> None:
    model = kv_model("attention")
    batch, twin = (
        kv.BatchCache([_filled("attention", 9), _filled("attention", 5, 2)]) for _ in range(2)
    )
    alien = _filled("attention", 4)
    alien[1].keys = mx.zeros((1, 3, 4, 8))  # of a model with three heads
    with pytest.raises(ValueError, match="broadcast"):
        batch.join([(_filled("attention", 7), 0), (alien, 0)])
    assert len(batch) == 2
    fed = mx.array([[3], [4]])
    assert mx.array_equal(model(fed, cache=batch.layers), model(fed, cache=twin.layers))


LARGE: dict[str, dict[str, Any]] = {
    "attention": {"num_key_value_heads": 4, "head_dim": 128},
    "window": {"num_key_value_heads": 4, "head_dim": 256, "sliding_window": 60},
    "state space": {"num_heads": 32, "head_dim": 64, "state_size": 64, "ssm_state_size": 64},
    "latent": {"kv_lora_rank": 512, "qk_rope_head_dim": 64},
}


@pytest.mark.usefixtures("exact_buffers")
@pytest.mark.parametrize("kind", LARGE)
@pytest.mark.parametrize("seed", range(3 if TEST_LONG else 1))
def test_what_is_stored_holds_the_bytes_that_are_counted(kind: str, seed: int) -> None:
    dice, stored = random.Random(seed), list[kv.RowCache]()
    model = kv_model(kind, **LARGE[kind])
    _fill_store(model, dice, stored[:], 1)  # MLX keeps some memory after the first run
    gc.collect()
    mx.synchronize()
    before = mx.get_active_memory()
    _fill_store(model, dice, stored, 25)
    gc.collect()
    mx.synchronize()
    held = mx.get_active_memory() - before
    counted = sum(map(kv.nbytes, stored))
    assert counted > 3_000_000
    assert held == pytest.approx(counted, rel=0.03)


def _fill_store(model: Any, dice: random.Random, stored: list[kv.RowCache], rounds: int) -> None:
    """Store rows from the middle of a prefill, and from a batch that they leave."""
    batch = kv.BatchCache()
    for _ in range(rounds):
        lengths = [dice.randrange(20, 120) for _ in range(dice.choice([0, 1, 3]))]
        if lengths:
            group = kv.BatchCache([kv.new_row(model) for _ in lengths])
            tokens = [words(max(lengths), dice.randrange(9)) for _ in lengths]
            with group.prefill(lengths) as layers:
                mx.eval(model(mx.array(tokens), cache=layers))
            stored.append(group.extract(0))
            batch.absorb(group, range(len(group)))
        if stored and dice.random() < 0.3:
            batch.join([(kv.clone(dice.choice(stored)), 0)])
        for _ in range(dice.choice([0, 1, 4])):
            if len(batch):
                mx.eval(model(mx.array([[5]] * len(batch)), cache=batch.layers))
        while len(batch) > 3:
            place = dice.randrange(len(batch))
            stored.append(batch.extract(place))
            batch.leave([place])


@pytest.mark.parametrize("kind", [*MODELS, "compressed"])
def test_a_row_costs_what_was_estimated(kind: str) -> None:
    """The estimate may be exceeded by unused columns, and in a full window by one chunk."""
    model = kv_model(kind)
    cost, row = kv.cost(model), kv.new_row(model)
    for tokens in range(100, 1300, 100):
        mx.eval(model(mx.zeros((1, 100), mx.int32), cache=row))
        window = sum(size for size, _ in cost.windowed) * 99
        assert kv.nbytes(row) <= cost.of(tokens + 255) + window
    assert cost.of(1200) < 1.4 * kv.nbytes(row)


@pytest.mark.parametrize("length", [3, 30])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("kind", MODELS)
def test_a_pass_that_is_taken_back_leaves_no_trace(kind: str, rows: int, length: int) -> None:
    """Rows keep all, some or none of what they were fed; what they lose is fed again."""
    model = kv_model(kind)
    if not kv.can_prefill_together(model):
        rows = 1  # side by side, they cannot be fed different numbers of tokens
    texts = [words(length + 12, start) for start in range(rows)]
    filled = [_fed(model, own[:length]) for own in texts]
    batch = kv.BatchCache([kv.clone(row) for row in filled])
    done = [length] * rows
    for want in (2, 4, 0, 1):
        counts = [max(4 - place, 1) for place in range(rows)]
        wrong = [
            [*own[at : at + min(want, count)], *[9] * (count - min(want, count)), *[0] * 4][:4]
            for own, at, count in zip(texts, done, counts, strict=True)
        ]
        fed = [row[: max(counts)] for row in wrong]
        mx.eval(model(mx.array(fed), cache=batch.begin(counts)))
        kept = batch.end([min(want, count) for count in counts])
        done = [at + count for at, count in zip(done, kept, strict=True)]
    after = model(mx.array([[own[at]] for own, at in zip(texts, done, strict=True)]), batch.layers)
    for row, (own, at) in enumerate(zip(texts, done, strict=True)):
        expected = model(mx.array([own[at : at + 1]]), _fed(model, own[:at]))
        assert mx.allclose(after[row], expected[0], atol=1e-3)
    assert max(done) > length


def _fed(model: Any, tokens: Sequence[int]) -> kv.RowCache:
    row = kv.new_row(model)
    mx.eval(model(mx.array([tokens]), cache=row))
    return row


def _addresses(layers: Sequence[Any]) -> list[int]:
    mx.eval([layer.state for layer in layers])
    parts = [part for layer in layers for part in layer.parts]
    return [np.asarray(part).__array_interface__["data"][0] for part in parts]


GROWING = ("attention", "latent", "quantised")  # whose KV grows with every token


@pytest.mark.parametrize("kind", GROWING)
def test_a_sequence_that_joins_takes_the_row_of_one_that_has_left(kind: str) -> None:
    model = kv_model(kind)
    texts = [words(count, count) for count in (240, 250, 245, 235)]
    batch = kv.BatchCache([_fed(model, own) for own in texts])
    batch.rows = 4
    before = _addresses(batch.layers)
    batch.leave([1])
    texts = [*texts[:1], *texts[2:], words(20, 7)]
    order = batch.arrange([(_fed(model, texts[3]), 0)])
    assert order == [0, 3, 1, 2]
    assert _addresses(batch.layers) == before
    texts = [texts[place] for place in order]
    for token in range(12):  # beyond the end of the buffers, which grow by 256 tokens
        texts = [[*own, token] for own in texts]
        after = model(mx.array([[token]] * 4), cache=batch.layers)[:, -1]
    for row, own in enumerate(texts):
        assert mx.allclose(after[row], model(mx.array([own]), kv.new_row(model))[0, -1], atol=1e-3)


@pytest.mark.parametrize("kind", [*GROWING, "window"])
def test_passes_of_different_lengths_are_written_in_place(kind: str) -> None:
    """Also those whose last tokens are taken back."""
    model = kv_model(kind)
    batch = kv.BatchCache([_filled(kind, 3), _filled(kind, 30, 2)])
    before = _addresses(batch.layers)
    for fed, counts, kept in (
        ([[5, 6, 7], [8, 0, 0]], [3, 1], [1, 1]),
        ([[6, 7], [9, 4]], [2, 2], [2, 0]),
        ([[3], [4]], [1, 1], [1, 1]),
    ):
        mx.eval(model(mx.array(fed), cache=batch.begin(counts)))
        assert batch.end(kept) == kept
    assert _addresses(batch.layers) == before


def test_a_full_window_takes_back_only_the_latest_pass() -> None:
    model = kv_model("window")
    batch = kv.BatchCache([_filled("window", 30), _filled("window", 3)])
    mx.eval(model(mx.array([[5], [6]]), cache=batch.layers))
    with pytest.raises(ValueError, match="a full window cannot remove 1 tokens"):
        batch.drop([0, 1])


@pytest.mark.parametrize("kind", GROWING)
def test_a_leave_copies_nothing_until_a_quarter_of_the_rows_is_waste(kind: str) -> None:
    batch = kv.BatchCache([_filled(kind, 9, start) for start in range(8)])
    batch.rows, batch.keeps_unused = 8, True
    before = _addresses(batch.layers)
    row_bytes = batch.nbytes // 8
    for leaving, rows in ((2, [0, 1, 3, 4, 5, 6, 7]), (6, [0, 1, 3, 4, 5, 6])):
        batch.leave([leaving])
        assert batch.arrange() == [*range(len(rows))]
        assert batch.pass_rows is None or batch.pass_rows[1] == rows
        assert _addresses(batch.layers) == before
    batch.leave([1])
    assert batch.arrange() == [*range(5)]
    assert batch.pass_rows is None
    assert batch.nbytes == 8 * row_bytes, "made anew, with the rows that it may have"
    batch.rows = 6
    assert batch.arrange() == [*range(5)]
    assert batch.nbytes == 6 * row_bytes


def test_the_rows_of_a_pass_do_not_depend_on_the_kinds_of_the_layers() -> None:
    """A rank of a pipeline may have layers of one kind only, and feeds the same rows as the others.

    Otherwise the ranks would misread the bytes that they send each other.
    """
    for seed in range(40):
        attention = _rows_of_passes(LayerKV, seed)
        for layer in (
            lambda: WindowKV(16),
            lambda: ArraysCache(1),
            lambda: QuantizedKV(Packing(Bits(8, 4), 32)),
            lambda: CacheList(WindowKV(16), ArraysCache(1)),
        ):
            assert _rows_of_passes(layer, seed) == attention, (seed, layer())


def _rows_of_passes(layer: Callable[[], Any], seed: int) -> list[Any]:
    """The order of the sequences and the rows of the pass after each of some joins and leaves."""
    dice = random.Random(seed)
    batch, found = kv.BatchCache(), list[Any]()
    for _ in range(20):
        batch.leave([place for place in range(len(batch)) if dice.random() < 0.2])
        joining = []
        for _ in range(dice.choice([0, 0, 1, 1, 3])):
            joining.append(([layer()], 0))
            _append(joining[-1][0][0], dice.choice([3, 9, 300]))
        batch.rows = dice.randrange(len(batch) + len(joining) + 3)
        batch.keeps_unused = dice.random() < 0.8
        found += [batch.arrange(joining), batch.pass_rows]
    return found


def _append(layer: Any, tokens: int) -> None:
    if isinstance(layer, CacheList):
        for inner in layer.caches:
            _append(inner, tokens)
    elif isinstance(layer, ArraysCache):
        layer[0] = mx.zeros((1, 2))
    else:
        layer.update_and_fetch(*[mx.zeros((1, 1, tokens, 32))] * 2)


@pytest.mark.parametrize("kind", MODELS)
def test_a_row_that_was_left_does_not_change_the_others(kind: str) -> None:
    """Runs passes of every kind, also with tokens that are removed again, beside an unused row."""
    model = kv_model(kind)
    texts = [words(count, count) for count in (9, 30, 12, 9)]
    filled = [_fed(model, own) for own in texts]
    batch = kv.BatchCache([kv.clone(row) for row in filled])
    batch.rows, batch.keeps_unused = 4, True
    assert batch.arrange() == [0, 1, 2, 3]
    batch.leave([1])
    del texts[1]
    assert batch.arrange() == [0, 1, 2]
    rows = batch.pass_rows
    assert rows == ([0, 0, 1, 2], [0, 2, 3])
    counts = [3, 1, 2] if kv.can_prefill_together(model) else [1, 1, 1]
    fed = [[5, 6, 7][:count] + [0] * (max(counts) - count) for count in counts]
    mx.eval(model(mx.array([fed[place] for place in rows[0]]), cache=batch.begin(counts)))
    kept = batch.end([1, 1, 1])
    texts = [[*own, 5][: len(own) + count] for own, count in zip(texts, kept, strict=True)]
    order = batch.arrange([(_fed(model, words(7, 1)), 0)])
    assert order == [0, 3, 1, 2]
    texts = [[*texts, words(7, 1)][place] for place in order]
    after = model(mx.array([[8]] * 4), cache=batch.layers)[:, -1]
    for row, own in enumerate(texts):
        alone = model(mx.array([[*own, 8]]), kv.new_row(model))[0, -1]
        assert mx.allclose(after[row], alone, atol=1e-3)


@pytest.mark.parametrize("kind", [*GROWING, "window"])
def test_a_row_that_a_longer_sequence_has_left_needs_no_columns(kind: str) -> None:
    model = kv_model(kind)
    batch = kv.BatchCache([_filled(kind, length) for length in (20, 600, 20, 20)])
    batch.rows, batch.keeps_unused = 5, True
    batch.arrange()
    batch.leave([1])
    batch.arrange()
    assert batch.pass_rows == ([0, 0, 1, 2], [0, 2, 3])
    assert kv.nbytes(batch.layers) <= 5 * kv.nbytes(_filled(kind, 20))
    assert all(mask is None for mask in _masks(batch, 1))
    logits = model(mx.array([[5]] * 4), cache=batch.layers)
    alone = model(mx.array([[5]]), cache=_filled(kind, 20))
    assert mx.allclose(logits[mx.array([0, 2, 3])], alone, atol=1e-3)


def test_a_longer_sequence_gets_larger_buffers() -> None:
    batch = kv.BatchCache([_filled("attention", 300), _filled("attention", 9)])
    batch.rows = 2
    nbytes = batch.nbytes
    batch.leave([0])
    batch.arrange([(_filled("attention", 9), 0)])
    assert batch.nbytes == nbytes // 2, "no sequence needs the columns of the one that left"
    batch.leave([0])
    batch.arrange([(_filled("attention", 300), 0)])
    assert batch.nbytes == nbytes


@pytest.mark.parametrize("kind", ATTENTION)
@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=3),
    passes=st.lists(st.tuples(st.integers(1, 90), st.integers(0, 90)), max_size=12),
    leaves=st.integers(0, 12),
)
@settings(max_examples=20, deadline=None)
def test_a_pass_that_was_announced_finds_room(
    kind: str, lengths: list[int], passes: list[tuple[int, int]], leaves: int
) -> None:
    """Also after tokens were removed again, and after a sequence has left."""
    model = kv_model(kind)
    batch = kv.BatchCache([_filled(kind, length) for length in lengths])
    for at, (tokens, removed) in enumerate(passes):
        if at == leaves and len(batch) > 1:
            batch.leave([0])
            batch.arrange()
        batch.reserve(tokens)
        grows = [leaf.reserve(tokens) for leaf in kv.leaves(batch.layers) if leaf.parts]
        assert not any(grows)
        counts = [tokens] * len(batch)
        model(mx.array([[1] * tokens] * len(batch)), cache=batch.begin(counts))
        batch.end([max(tokens - removed, 0)] * len(batch))


def test_values_of_one_that_left_do_not_reach_one_that_joins() -> None:
    """Attention multiplies what it does not see by zero, which leaves NaN as it is."""
    model = kv_model("attention")
    broken = _filled("attention", 30)
    for layer in broken:
        layer.keys, layer.values = layer.keys * math.nan, layer.values * math.nan
    batch = kv.BatchCache([broken, _filled("attention", 30, 2)])
    batch.rows = 2
    before = _addresses(batch.layers)
    batch.leave([0])
    batch.arrange([(_filled("attention", 4), 0)])
    assert _addresses(batch.layers) == before
    after = model(mx.array([[3], [3]]), cache=batch.layers)
    assert mx.allclose(after[0], model(mx.array([[3]]), _filled("attention", 4))[0], atol=1e-3)
    batch.leave([0])
    batch.arrange([(kv.new_row(model), 0)])
    after = model(mx.array([[3], [3]]), cache=batch.layers)
    assert mx.allclose(after[0], model(mx.array([[3]]), kv.new_row(model))[0], atol=1e-3)


def test_a_sequence_that_waits_for_a_pass_does_not_cause_a_copy_of_the_kv() -> None:
    model = kv_model("attention")
    batch = kv.BatchCache([_filled("attention", 9), _filled("attention", 9, 2)])
    mx.eval([layer.state for layer in batch.layers])
    before = _addresses(batch.layers)
    for _ in range(3):
        # Reads of the KV that are still queued would cause a copy, too.
        mx.eval(model(mx.array([[3, 4], [5, 6]]), cache=batch.layers))
        mark = batch.marker()
        mx.eval(mark)
        model(mx.array([[7], [8]]), cache=batch.layers)
        mx.eval([layer.keys for layer in batch.layers], [layer.values for layer in batch.layers])
        del mark
    assert _addresses(batch.layers) == before


def test_a_batch_that_is_taken_over_as_a_whole_is_not_copied() -> None:
    group = kv.BatchCache([_filled("attention", 9), _filled("attention", 5)])
    layers = group.layers
    batch = kv.BatchCache()
    batch.absorb(group, [0, 1])
    assert batch.layers is layers
    assert not len(group)

"""The buffers of KV that passes of the engine use."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from backend.engine.caching import kv, quantized_kv
from backend.engine.caching.layer_kv import STEP
from tests.engine.kv_models import kv_model
from tests.engine.rounds import Rounds, engine_model

pytestmark = pytest.mark.usefixtures("each_order")


class Watched:
    """A model that notes rows, tokens, and columns of the KV's buffers, after each pass."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.passes: list[tuple[int, int, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        logits: mx.array = self._model(tokens, cache=cache)
        keys = cache[0].keys
        part = keys[0] if isinstance(keys, tuple) else keys
        self.passes.append((*tokens.shape, part.shape[2]))
        return logits


def watched(kind: str) -> tuple[Rounds, Watched]:
    model = engine_model(kv_model(kind), end_tokens=frozenset(), prefill_chunk=96)
    model.model = seen = Watched(model.model)
    return Rounds(model), seen


def tokens(count: int, salt: int = 0) -> list[int]:
    return [(at * at + 7 * at + salt) % 90 + 1 for at in range(count)]


@pytest.mark.parametrize("kind", ["attention", "quantised"])
def test_decode_passes_have_whole_steps_of_columns(kind: str) -> None:
    """Also after a prefix hit, a cut, and the join and leave of another sequence."""
    rounds, seen = watched(kind)
    text = tokens(330)
    for ticket in range(1, 4):
        rounds.submit(ticket, text, 20)
        rounds.drain()
        text += [*rounds.received[ticket].tokens, *tokens(45, ticket)]
    rounds.submit(4, [*text[:290], 5, 6, 7], 30)
    for _ in range(8):
        rounds.step()
    rounds.submit(5, tokens(20, 3), 6)
    rounds.drain()
    decoded = [one for one in seen.passes if one[1] == 1]
    assert {rows for rows, *_ in decoded} == {1, 2}
    assert [one for one in decoded if one[2] % STEP] == []


@pytest.fixture(params=[True])
def views(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device whose quantised products take slices, so that unused columns cost nothing."""
    monkeypatch.setattr(quantized_kv, "reads_views", lambda: request.param)


@pytest.mark.usefixtures("views")
@pytest.mark.parametrize("kind", ["attention", "quantised"])
def test_the_kv_of_a_long_prompt_gets_its_room_at_once(kind: str) -> None:
    rounds, seen = watched(kind)
    rounds.submit(1, tokens(1500), 2)
    rounds.drain()
    assert len(seen.passes) > 10
    assert {columns for *_, columns in seen.passes} == {1536}


@pytest.mark.usefixtures("views")
@pytest.mark.parametrize("views", [False], indirect=True)
def test_packed_kv_has_columns_for_the_next_tokens_only() -> None:
    """Where the products take no slices, each pass reads all columns."""
    rounds, seen = watched("quantised")
    rounds.submit(1, tokens(1500), 2)
    rounds.drain()
    assert len(seen.passes) > 10
    read = 0
    for _, count, columns in seen.passes:
        read += count
        assert columns == -(-read // STEP) * STEP


@pytest.mark.usefixtures("views")
@pytest.mark.parametrize("kind", ["attention", "quantised"])
def test_the_kv_of_prompts_that_share_passes_gets_its_room_at_once(kind: str) -> None:
    model = kv_model(kind)
    seen = Watched(model)
    batch = kv.BatchCache([kv.new_row(model), kv.new_row(model)])
    batch.expect(1200)
    for counts in ([96, 96], [300, 300], [96, 3]):
        with batch.prefill(counts) as layers:
            seen(mx.array([tokens(max(counts), row) for row in range(2)]), layers)
    assert {columns for *_, columns in seen.passes} == {1280}

"""The trial: a model that fails in a batch or from stored KV is served another way.

The references are forward passes of mlx-lm's models.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache

from backend.engine.caching import kv
from backend.engine.drafting.draft_loading import Drafting
from backend.engine.drafting.drafter import LookupDrafter
from backend.engine.errors import ModelRejected
from backend.engine.executing.executor_sequence import ExecutorSequence
from backend.engine.executing.speculation import Speculation
from backend.engine.loading.serving_trial import ServingTrial, Verdict, reference_pass
from backend.engine.model import EngineModel
from tests.architectures.comparison import TOKENS, compare
from tests.architectures.shapes import configuration, tiny_model
from tests.engine.kv_models import kv_model
from tests.engine.loading_models import write_model
from tests.engine.loads import at_once
from tests.engine.rounds import engine_model
from tests.engine.vision.seeing import answer_to, asking, seeing
from tests.long import TEST_LONG

FAIL_IN_COMPANY = ["gpt_bigcode", *(["phi3small"] if TEST_LONG else [])]
WORDS = range(1, 60)


def tried(model: Any, **changes: Any) -> tuple[EngineModel, Verdict]:
    """A model after its trial, and the verdict."""
    served = engine_model(model, batches=kv.can_batch(kv.new_row(model)), **changes)
    return served, at_once(ServingTrial("it", reference_pass(model), WORDS, ()).run(served))


@pytest.mark.parametrize("model_type", FAIL_IN_COMPANY)
def test_a_model_that_fails_in_a_batch_is_served_one_request_at_a_time(
    model_type: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        found = compare(tiny_model(model_type), model_type)
    assert found.right
    assert not found.batched
    assert f"model '{model_type}': requests in one batch get other answers" in caplog.text


@pytest.mark.parametrize("model_type", ["gemma2", "minimax_m3_vl", "afm7"])
def test_a_model_whose_masks_are_fitted_is_right_in_a_batch(model_type: str) -> None:
    found = compare(tiny_model(model_type), model_type)
    assert found.right
    assert found.batched


@pytest.mark.parametrize("kind", ["attention", "window", "gated delta", "state space", "latent"])
def test_a_model_that_is_right_in_a_batch_loses_nothing(kind: str) -> None:
    before = engine_model(kv_model(kind))
    served, verdict = tried(kv_model(kind))
    assert verdict == Verdict()
    for what in ("slots", "batches", "together", "prompt_cache_bytes"):
        assert getattr(served, what) == getattr(before, what)


class _Around:
    """Wraps a model, so that a subclass can change a pass."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class _ForgetsOnReturn(_Around):
    """Ignores the KV before a pass of several tokens."""

    def __call__(self, tokens: mx.array, cache: Sequence[Any]) -> Any:
        if tokens.shape[1] > 1 and isinstance(offset := cache[0].offset, int) and offset:
            return self._model(tokens, cache=kv.new_row(self._model))
        return self._model(tokens, cache=cache)


def test_a_model_that_fails_with_stored_kv_prefills_whole_prompts() -> None:
    served, verdict = tried(_ForgetsOnReturn(kv_model("attention")), together=False)
    assert verdict.right
    assert served.prompt_cache_bytes == 0


class _Repeats(_Around):
    """Sees only the last token when it decodes."""

    def __call__(self, tokens: mx.array, cache: Sequence[Any]) -> Any:
        if tokens.shape[1] == 1:
            return self._model(tokens, cache=kv.new_row(self._model))
        return self._model(tokens, cache=cache)


def test_a_row_that_is_wrong_alone_is_reported() -> None:
    served, verdict = tried(_Repeats(kv_model("attention")), slots=1)
    assert not verdict.right
    assert served.slots == 1


class _ForgetsAlone(_Around):
    """Loses each generated token of a lone row, as a model does that replaces its caches."""

    def __call__(self, tokens: mx.array, cache: Sequence[Any]) -> Any:
        logits = self._model(tokens, cache=cache)
        if tokens.shape == (1, 1) and isinstance(cache[0].offset, int):
            for layer in cache:
                layer.trim(1)
        return logits


def test_a_row_that_loses_its_generated_tokens_is_reported() -> None:
    _, verdict = tried(_ForgetsAlone(kv_model("attention")))
    assert not verdict.right


class _NarrowOnly(_Around):
    """Wrong in passes as wide as those that check guesses, and right in those of prompts."""

    def __call__(self, tokens: mx.array, cache: Sequence[Any]) -> Any:
        logits = self._model(tokens, cache=cache)
        return -logits if 1 < tokens.shape[1] <= 3 else logits


class _KeepsGuesses(_Around):
    """Does not remove wrong guesses from its KV."""

    def __call__(self, tokens: mx.array, cache: Sequence[Any]) -> Any:
        return self._model(tokens, cache=cache)

    def make_cache(self) -> list[Any]:
        return [_Untrimmed() for _ in self._model.layers]


class _Untrimmed(KVCache):  # type: ignore[misc]  # mlx-lm is untyped
    def trim(self, n: int) -> int:
        return n


LOOKING = Drafting(4, lambda: [LookupDrafter()], weights_bytes=7)


@pytest.mark.parametrize("kind", ["attention", "window", "latent", "short convolution"])
def test_a_model_that_takes_wrong_guesses_back_drafts(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: Counter[str] = Counter()

    def record(self: Speculation, one: ExecutorSequence, proposed: int, accepted: int) -> None:
        seen["right"] += accepted
        seen["wrong"] += proposed - accepted

    monkeypatch.setattr(Speculation, "record", record)
    served, verdict = tried(kv_model(kind), drafting=LOOKING)
    assert verdict.right
    assert served.drafting is LOOKING
    assert seen["right"]
    assert seen["wrong"]


@pytest.mark.parametrize("wrong", [_NarrowOnly, _KeepsGuesses])
def test_a_model_whose_answers_with_guesses_are_wrong_is_served_without_drafting(
    wrong: type[_Around], caplog: pytest.LogCaptureFixture
) -> None:
    served, verdict = tried(wrong(kv_model("attention")), drafting=LOOKING, weights_bytes=107)
    assert verdict.right
    assert served.drafting is None
    assert served.weights_bytes == 100
    assert "so it is served without drafting" in caplog.text


def test_what_memory_does_not_suffice_to_try_is_not_done() -> None:
    served, verdict = tried(kv_model("attention"), memory_limit=1)
    assert verdict == Verdict("in turn, not stored", complete=False)
    assert (served.slots, served.prompt_cache_bytes) == (1, 0)


def test_a_trial_that_fails_allows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise ValueError("secret")

    monkeypatch.setattr(ServingTrial, "_all_right", broken)
    served, verdict = tried(kv_model("attention"), drafting=LOOKING)
    assert not verdict.complete
    assert (served.slots, served.prompt_cache_bytes, served.drafting) == (1, 0, None)


async def test_a_limit_without_room_beside_the_vision_cache_is_refused() -> None:
    with pytest.raises(ModelRejected, match=r"256 MiB of vision_cache_mib.* limit is 80 MiB"):
        async with seeing(memory_limit_mib=80):
            pass
    async with seeing(memory_limit_mib=80, vision_cache_mib=8) as engine:
        assert (await answer_to(engine, asking("word"))).tokens


async def test_a_checkpoint_that_cannot_be_batched_answers_many_at_once(tmp_path: Path) -> None:
    config = configuration("gpt_bigcode") | {"vocab_size": 259}
    path = write_model(tmp_path / "bigcode", dtype="float32", **config)
    requests = [asking("word " * count, max_tokens=TOKENS) for count in (2, 9, 4)]
    async with seeing(path) as engine:
        alone = [await answer_to(engine, request) for request in requests]
        together = await asyncio.gather(*(answer_to(engine, request) for request in requests))
    assert [answer.tokens for answer in together] == [answer.tokens for answer in alone]


async def test_the_trial_can_be_turned_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = configuration("gpt_bigcode") | {"vocab_size": 259}
    path = write_model(tmp_path / "bigcode", dtype="float32", **config)
    with caplog.at_level(logging.WARNING):
        async with seeing(path, load_trial=False):
            assert "in one batch" not in caplog.text
        async with seeing(path):
            assert "in one batch" in caplog.text

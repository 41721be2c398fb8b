"""A row whose logits are NaN or infinite ends with an error; other rows are unaffected."""

from __future__ import annotations

import importlib
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_map

from backend.engine.drafting.draft_loading import Drafting
from backend.engine.drafting.drafter import LookupDrafter
from backend.engine.engine import Engine
from backend.engine.errors import ModelRejected, NotFinite
from backend.engine.executing.score_plan import Continuation, ScorePlan
from backend.engine.load_request import LoadRequest
from backend.engine.request import Sampling
from tests.engine.loading_models import write_model
from tests.engine.random_models import CONFIGS, VOCABULARY, random_model
from tests.engine.rounds import Rounds, alone, engine_model
from tests.engine.test_parity import Strides

pytestmark = pytest.mark.usefixtures("each_order", "small_grammars")
POISON = 90
DRAWN = Sampling(temperature=1.0, top_p=0.9, seed=4)
WELL: dict[int, tuple[list[int], dict[str, Any]]] = {
    1: ([5, 6, 7], {}),
    2: ([8, 9], {"sampling": DRAWN}),
    3: ([8, 9, 10, 11], {"logprobs": 2}),
    4: ([12, 13], {"grammar": True}),
}
ILL: dict[str, tuple[list[int], dict[str, Any]]] = {
    "prompt": ([5, POISON, 7], {}),
    "last": ([5, 6, POISON], {"sampling": DRAWN}),
    "generated": ([14, 15], {"sampling": Sampling(logit_bias=((POISON, 1e4),))}),
    "drawn": ([14, 15], {"sampling": replace(DRAWN, logit_bias=((POISON, 1e4),))}),
    "logprobs": ([5, POISON], {"logprobs": 1}),
    "grammar": ([5, POISON], {"grammar": True}),
    "echo": ([5, POISON, 6, 7], {"prompt_logprobs": 1, "prompt_only": True}),
}


@cache
def poisoned(value: float = float("nan")) -> Any:
    """A model whose logits are NaN after one chosen token."""
    config = CONFIGS["full"] | {"tie_word_embeddings": False}
    architecture = importlib.import_module("mlx_lm.models.qwen3")
    model = architecture.Model(architecture.ModelArgs.from_dict(config))
    model.update(tree_map(lambda _: _, random_model("full").parameters()), strict=False)
    model.lm_head.weight = 0.3 * mx.random.normal(model.lm_head.weight.shape, key=mx.random.key(3))
    weights = model.model.embed_tokens.weight
    model.model.embed_tokens.weight = mx.where(
        (mx.arange(VOCABULARY) == POISON)[:, None], value, weights
    )
    mx.eval(model.parameters())
    return model


def fresh(request: dict[str, Any]) -> dict[str, Any]:
    """A copy of the request with a grammar of its own."""
    return {**request, "grammar": Strides(3, 10)} if "grammar" in request else request


@pytest.mark.parametrize("case", ILL)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_it_ends_alone(case: str, value: float) -> None:
    model = engine_model(poisoned(value))
    # No correct model generates the token by chance.
    kept = ((POISON, -1e4),)
    well = {}
    for ticket, (prompt, more) in WELL.items():
        sampling = replace(more.get("sampling", Sampling()), logit_bias=kept)
        well[ticket] = (prompt, {**more, "sampling": sampling})
    expected = {
        ticket: alone(model, prompt, 20, ignore_eos=True, **fresh(more))
        for ticket, (prompt, more) in well.items()
    }
    rounds = Rounds(model)
    for ticket, (prompt, more) in well.items():
        rounds.submit(ticket, prompt, 20, ignore_eos=True, **fresh(more))
    for _ in range(4):
        rounds.step()
    prompt, more = ILL[case]
    rounds.submit(9, prompt, 20, ignore_eos=True, **fresh(more))
    rounds.drain()
    assert isinstance(rounds.received[9].error, NotFinite)
    assert not rounds.faults
    for ticket, received in expected.items():
        assert received.error is None
        assert rounds.received[ticket].text == received.text
        assert rounds.received[ticket].finished


def test_nan_scores_are_an_error() -> None:
    rounds = Rounds(engine_model(poisoned()))
    rounds.score(1, ScorePlan([5, 6, 7], (Continuation((8, POISON, 9)), Continuation((8, 9)))))
    rounds.score(2, ScorePlan([5, POISON, 7], (Continuation((8,)),)))
    rounds.score(3, ScorePlan([5, 6, 7], (Continuation((8, 9)),)))
    rounds.drain()
    assert isinstance(rounds.received[1].error, NotFinite)
    assert isinstance(rounds.received[2].error, NotFinite)
    assert rounds.received[3].error is None


@pytest.mark.usefixtures("guesses_always")
def test_guesses_are_checked_too() -> None:
    drafting = Drafting(4, lambda: [LookupDrafter()])
    rounds = Rounds(engine_model(poisoned(), drafting=drafting))
    bias = Sampling(logit_bias=((POISON, 1e4),))
    rounds.submit(1, [5, 6, 5, 6, 5, 6], 20, ignore_eos=True, sampling=bias)
    rounds.submit(2, [5, POISON, 5, POISON], 20, ignore_eos=True)
    rounds.drain()
    assert isinstance(rounds.received[1].error, NotFinite)
    assert isinstance(rounds.received[2].error, NotFinite)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
async def test_a_model_without_a_finite_logit_is_not_loaded(value: float, tmp_path: Path) -> None:
    good, bad = write_model(tmp_path / "good"), write_model(tmp_path / "bad")
    weights = mx.load(str(bad / "model.safetensors"))
    assert isinstance(weights, dict)
    name = "model.layers.0.mlp.down_proj.weight"
    mx.save_safetensors(
        str(bad / "model.safetensors"), weights | {name: mx.full(weights[name].shape, value)}
    )
    engine = Engine()
    engine.start()
    try:
        await engine.load(LoadRequest("good", str(good)))
        with pytest.raises(ModelRejected, match="not finite"):
            await engine.load(LoadRequest("bad", str(bad)))
        assert engine.require_model().name == "good"
    finally:
        await engine.stop(10)

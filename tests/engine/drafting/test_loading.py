"""A draft model that fails to load changes nothing."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import pytest_asyncio

from backend.engine.caching.kv import new_row
from backend.engine.engine import Engine
from backend.engine.errors import EngineError, InvalidRequest, ModelNotFound, ModelRejected
from backend.engine.load_request import LoadRequest
from backend.engine.loading.early_layers import only_building
from tests.engine.drafting.tiny import MODELS, load
from tests.engine.kv_models import COMPRESSED
from tests.engine.loading_models import write_model
from tests.engine.random_models import CONFIGS

pytestmark = pytest.mark.asyncio(loop_scope="module")
TEXT = str(MODELS / "tiny_text")
DRAFT = str(MODELS / "tiny_draft")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def serving() -> AsyncIterator[Engine]:
    """An engine with a model, which stays loaded when later loads fail."""
    engine = Engine()
    engine.start()
    try:
        await engine.load(LoadRequest("first", TEXT))
        yield engine
    finally:
        await engine.stop(10)


async def _refusal(serving: Engine, request: LoadRequest) -> str:
    """The message of a load that fails."""
    with pytest.raises(EngineError) as caught:
        await serving.load(request)
    assert isinstance(caught.value, ModelRejected | ModelNotFound | InvalidRequest)
    assert serving.require_model().name == "first"
    assert await serving.tokenize("Hello")
    return str(caught.value)


def _load(**fields: Any) -> LoadRequest:
    return LoadRequest("tiny", fields.pop("model_file", TEXT), str(MODELS), **fields)


async def test_its_weights_are_reported_with_the_models() -> None:
    engine = Engine()
    engine.start()
    try:
        await engine.load(_load())
        alone = (await engine.status()).breakdown["weights"]
        await engine.load(_load(draft_model=DRAFT))
        assert (await engine.status()).breakdown["weights"] == alone + 4 * 127_424
    finally:
        await engine.stop(10)


async def test_arrays_of_an_earlier_thread_are_not_used() -> None:
    model, _ = load("tiny_draft")
    with only_building():
        model(mx.array([[0]]), cache=new_row(model))  # leaves angles that are not computed
    engine = Engine()
    engine.start()
    try:
        await engine.load(_load(draft_model=DRAFT))
    finally:
        await engine.stop(10)


async def test_a_missing_draft_model_is_refused(serving: Engine) -> None:
    message = await _refusal(serving, _load(draft_model=str(MODELS / "none")))
    assert message.startswith("DraftModel: model 'none' is neither")


async def test_a_draft_model_of_another_family_is_refused(tmp_path: Path, serving: Engine) -> None:
    other = write_model(tmp_path / "other")
    message = await _refusal(serving, _load(draft_model=str(other)))
    assert message.startswith(
        "DraftModel: model 'other' cannot draft for 'tiny', because their tokenizers differ: "
    )


async def test_a_draft_model_that_does_not_load_is_refused(tmp_path: Path, serving: Engine) -> None:
    (tmp_path / "half").mkdir()
    message = await _refusal(serving, _load(draft_model=str(tmp_path / "half")))
    assert message == "DraftModel: model 'half' cannot be loaded: the folder is empty"


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "qwen3", "architectures": ["DFlash2DraftModel"], "dflash_config": {}},
        {"model_type": "gemma4", "architectures": ["DFlashDraftModel"], "dflash_config": {}},
        {"architectures": ["DSparkModel"], "dflash_config": {"projector_type": "dspark"}},
        {
            "model_type": "qwen3",
            "architectures": ["DFlashDraftModel"],
            "dflash_config": {"markov_rank": 8},
        },
        {"model_type": "deepseek_v4_mtp"},
        {"model_type": "gemma4_assistant"},
    ],
)
async def test_a_drafter_of_an_unknown_form_is_refused_as_one(
    tmp_path: Path, config: dict[str, Any], serving: Engine
) -> None:
    drafter = write_model(tmp_path / "drafter")
    written = json.loads((drafter / "config.json").read_text())
    (drafter / "config.json").write_text(json.dumps(written | config))
    message = await _refusal(serving, _load(draft_model=str(drafter)))
    assert message.startswith("DraftModel: model 'drafter' cannot be loaded: it is a drafter (")
    assert "this version does not support its kind" in message


WINDOW: dict[str, Any] = {
    "model_type": "gemma3_text",
    "query_pre_attn_scalar": 8,
    "sliding_window": 24,
    "sliding_window_pattern": 2,
    "rope_local_base_freq": 10000.0,
}


# Recurrent layers, and layers that compress what they have read.
STATE = {name: value for name, value in CONFIGS["hybrid"].items() if name != "vocab_size"}


@pytest.mark.parametrize("config", [WINDOW, STATE], ids=["window", "state"])
async def test_a_model_with_a_window_or_a_state_can_undo_guesses(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    model = write_model(tmp_path / "model", **config)
    engine = Engine()
    engine.start()
    try:
        await engine.load(_load(model_file=str(model), settings={"prompt_lookup": True}))
        assert engine.metrics().drafting is not None
    finally:
        await engine.stop(10)


async def test_a_draft_model_that_cannot_undo_guesses_is_refused(
    tmp_path: Path, serving: Engine
) -> None:
    plain = write_model(tmp_path / "plain")
    window = write_model(tmp_path / "window", **WINDOW)
    message = await _refusal(serving, _load(model_file=str(plain), draft_model=str(window)))
    assert message.startswith("DraftModel: model 'window' cannot be loaded: it cannot remove")


@pytest.mark.parametrize(
    ("wish", "named"),
    [
        ({"draft_model": DRAFT}, "DraftModel is set"),
        ({"settings": {"prompt_lookup": True}}, "option prompt_lookup is true"),
    ],
)
async def test_a_model_that_cannot_undo_guesses_is_refused(
    tmp_path: Path, wish: dict[str, Any], named: str, serving: Engine
) -> None:
    compressed = write_model(tmp_path / "compressed", **COMPRESSED)
    message = await _refusal(serving, _load(model_file=str(compressed), **wish))
    assert message.startswith(f"{named}, but model 'tiny' cannot remove wrong draft tokens")


async def test_model_and_draft_model_share_the_memory_limit(serving: Engine) -> None:
    """2.9 MiB of weights fit into 3 MiB, and 0.5 MiB more do not."""
    settings = {"memory_limit_mib": 3, "prompt_cache_mib": 0}
    message = await _refusal(serving, _load(draft_model=DRAFT, settings=settings))
    assert "MiB with its draft model or head, but MLX may use" in message
    assert "MLX may use 3 MiB" in message

"""A model whose experts stay in its files computes what it computes with them in memory."""

from __future__ import annotations

import shutil
from pathlib import Path

import mlx.core as mx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tuner.lora import LoRASwitchLinear

from backend.engine.engine_state import ExpertCounts
from backend.engine.experts.expert_tensors import LocationFinder
from backend.engine.experts.offload import NotOffloadedError, expert_bytes, offload, slots_of
from backend.engine.experts.weight_files import WeightFiles
from backend.engine.loading.weights import cast
from backend.engine.units import MIB
from backend.engine.vision.vision_builder import _open_multimodal_model
from tests.architectures.shapes import UNBUILT, architectures, configuration, tiny_model
from tests.engine.experts.checkpoints import (
    EXPERTS,
    FORMS,
    budget_for,
    opened,
    prompt,
    same,
    with_slots,
    write_experts,
)
from tests.engine.loading_models import write_model, write_weights
from tests.engine.loads import at_once
from tests.engine.vision.families import write_family
from tests.long import TEST_LONG

QWEN = "Qwen3, one by one"
MIXTURES = [
    model_type
    for model_type in architectures()
    if model_type not in UNBUILT and "experts" in str(configuration(model_type))
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("experts")
    return {
        name: write_experts(place / str(at), form) for at, (name, form) in enumerate(FORMS.items())
    }


@pytest.mark.parametrize("slots", [1, 3, EXPERTS])
@pytest.mark.parametrize("form", FORMS)
def test_logits_are_those_of_the_resident_model(
    folders: dict[str, Path], form: str, slots: int
) -> None:
    """In long and short passes, and with more experts in a pass than there are slots."""
    resident, (cached, found) = opened(folders[form]), with_slots(folders[form], slots)
    ours, theirs = make_prompt_cache(cached), make_prompt_cache(resident)
    for length in (70, 2, 1, 1):
        tokens = mx.array([prompt(length, seed) for seed in range(2)])
        assert same(cached(tokens, cache=ours), resident(tokens, cache=theirs))
    counts = found.counts
    assert min(counts.misses, counts.read_bytes, counts.wait_seconds) > 0
    assert counts.hits or slots < EXPERTS


@pytest.mark.parametrize("model_type", MIXTURES if TEST_LONG else MIXTURES[::7])
def test_every_mixture_of_mlx_lm_computes_the_same(model_type: str, tmp_path: Path) -> None:
    resident = tiny_model(model_type)
    if not expert_bytes(resident):
        pytest.skip("its experts are not computed by mlx-lm's switch layers")
    write_weights(tmp_path, dict(tree_flatten(resident.parameters())))
    cached = tiny_model.__wrapped__(model_type)
    found = at_once(offload(cached, model_type, tmp_path, expert_bytes(cached) + MIB))
    tokens = mx.array([[5, 9, 22, 7, 44, 3, 2, 61, 33, 8, 21, 90, 13, 17, 5, 6]])
    assert same(cached(tokens), resident(tokens))
    assert found.counts.misses


@pytest.mark.parametrize("family", ["qwen3_vl_moe", "qwen3_5_moe", "gemma4_moe", "glm4v_moe"])
def test_models_of_mlx_vlm_compute_the_same(family: str, tmp_path: Path) -> None:
    folder = write_family(tmp_path / family, family)
    resident, cached = (_open_multimodal_model(folder)[0] for _ in range(2))
    for model in (resident, cached):
        cast(model, "float32")
    found = at_once(offload(cached, family, folder, expert_bytes(cached) // 3 + MIB // 2))
    tokens = mx.array([[5, 9, 22, 7, 44, 3, 2, 61, 33, 8, 21, 90, 13, 17, 5, 6]])
    ours, theirs = (model(tokens, cache=model.make_cache()) for model in (cached, resident))
    assert same(ours, theirs)
    assert found.counts.slots < found.counts.experts


@pytest.mark.parametrize("form", FORMS)
def test_only_slots_are_in_memory(folders: dict[str, Path], form: str) -> None:
    resident = opened(folders[form])
    whole = expert_bytes(resident)
    assert whole > 0
    cached, found = with_slots(folders[form], 2)
    assert found.nbytes == whole * 2 // EXPERTS
    assert expert_bytes(cached) == 0
    assert found.packed == bool(FORMS[form].quantised)


def test_an_expert_is_read_once_while_its_slot_is_not_needed(folders: dict[str, Path]) -> None:
    cached, found = with_slots(folders[QWEN], EXPERTS)
    for _ in range(3):
        mx.eval(cached(mx.array([prompt(64)])))
    layers, counts = found.counts.layers, found.counts
    assert (counts.misses, counts.hits) == (EXPERTS * layers, 2 * EXPERTS * layers)
    mx.eval(cached(mx.array([prompt(64)])))
    assert counts.misses == EXPERTS * layers


def test_fused_projections_are_read_once(folders: dict[str, Path]) -> None:
    """Their rows alternate, so that each half needs all of the bytes."""
    cached, found = with_slots(folders["gpt-oss, alternating mxfp4"], EXPERTS)
    mx.eval(cached(mx.array([prompt(64)])))
    assert found.counts.read_bytes == found.nbytes - _growth(cached)


def _growth(cached: object) -> int:
    """Bytes by which biases grow as they become float32."""
    modules = dict(cached.named_modules())  # type: ignore[attr-defined]
    switches = [each.cache for path, each in modules.items() if hasattr(each, "cache")]
    return sum(
        parameter.slots.nbytes // 2
        for cache in switches
        for parameter in cache.parameters
        if parameter.name == "bias"
    )


def test_what_cannot_stay_in_the_files_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    dense = write_model(tmp_path / "dense")
    with pytest.raises(NotOffloadedError, match="no experts"):
        at_once(offload(opened(dense), "dense", dense, 1 << 30))
    folder = folders[QWEN]
    with pytest.raises(NotOffloadedError, match="cannot hold one expert of each layer"):
        at_once(offload(opened(folder), "small", folder, 1 << 16))
    adapted = opened(folder)
    switch = adapted.layers[1].mlp.switch_mlp
    switch.up_proj = LoRASwitchLinear.from_base(switch.up_proj, r=4)
    with pytest.raises(NotOffloadedError, match=r"an adapter changes the experts of .*layers\.1"):
        at_once(offload(adapted, "adapted", folder, 1 << 30))


@example(sizes=[MIB] * 60, more=0)
@given(
    sizes=st.lists(st.integers(1, 40 * MIB), min_size=1, max_size=90),
    more=st.integers(0, 9 << 30),
)
def test_a_larger_cache_never_has_fewer_slots(sizes: list[int], more: int) -> None:
    """The least cache, which a refusal names, has one slot of each layer."""
    least = sum(sizes) + 5 * max(sizes)
    assert slots_of(least - 1, sizes)[0] < 1
    assert slots_of(least, sizes)[0] == 1
    slots, portion = slots_of(least + more, sizes)
    assert slots >= 1
    assert slots * sum(sizes) + 5 * portion <= least + more
    assert slots_of(least + more + MIB, sizes)[0] >= slots


@pytest.mark.usefixtures("exact_buffers")
def test_a_cache_that_memory_cannot_hold_is_refused_before_it_is_allocated(
    folders: dict[str, Path],
) -> None:
    model = opened(folders[QWEN])
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    whole = expert_bytes(model)
    with pytest.raises(NotOffloadedError, match="its cache takes 2 MiB, but other weights leave 0"):
        at_once(offload(model, "large", folders[QWEN], whole + MIB, whole))
    assert mx.get_peak_memory() <= before
    assert at_once(offload(model, "large", folders[QWEN], whole + MIB, whole + MIB))


def test_experts_whose_files_hold_other_values_are_refused(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """As those of a checkpoint whose weights are computed from what is stored."""
    folder = shutil.copytree(folders[QWEN], tmp_path / "changed")
    model = opened(folder)
    switch = model.layers[2].mlp.switch_mlp
    switch.down_proj.weight = mx.where(
        mx.arange(EXPERTS)[:, None, None] == 5, 2.0, switch.down_proj.weight
    )
    with pytest.raises(NotOffloadedError, match=r"do not contain .*layers\.2.*down_proj\.weight"):
        at_once(offload(model, "changed", folder, budget_for(model, 3)))


def test_values_that_are_not_numbers_are_found(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    values = mx.random.normal((4, 6, 8))
    values[2, 3] = mx.nan
    mx.save_safetensors(str(folder / "model.safetensors"), {"layers.1.up": values})
    finder = LocationFinder(WeightFiles(folder, ExpertCounts(1, 4, 1)))
    location = at_once(finder.find("layers.1.experts.up.weight", values))
    assert location is not None
    assert location.form == "whole"
    assert at_once(finder.find("layers.2.experts.up.weight", values)) is None

"""Each platform's defaults. GPUs are simulated by the figures that MLX reports on them."""

import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import mlx.core as mx
import pytest

from backend.engine.device import (
    Device,
    MemoryPlan,
    WeightType,
    apply,
    dense_budget,
    dequantizes,
    detect,
    has_fast_blas,
    memory_limit,
    memory_plan,
    multiplies_packed,
    prefill_chunk,
    return_buffers,
    starts_layers_early,
    step_timeout,
    weight_type,
)
from backend.engine.errors import EngineFailed
from backend.engine.settings import Settings
from backend.engine.units import GIB, MIB
from common.machine_memory import free_memory, machine_memory

CPU = Device("cpu", "a CPU", 16 * GIB, 14 * GIB)
METAL = Device("metal", "Apple M4 Max", 64 * GIB, 48 * GIB)
CUDA = Device("cuda", "NVIDIA H100", 80 * GIB, 78 * GIB)
ROOT = Path(__file__).parents[2]


def test_detect_describes_this_machine() -> None:
    device = detect()
    assert device.memory_bytes > 0
    assert 0 < device.usable_bytes <= device.memory_bytes
    assert device.name


def test_a_device_that_mlx_cannot_use_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise RuntimeError("CUDA driver version is insufficient\nmore")

    monkeypatch.setattr(mx, "device_info", refuse)
    with pytest.raises(EngineFailed, match=r"GPU: CUDA driver version is insufficient$"):
        detect()


@pytest.mark.parametrize(
    ("device", "wanted", "environ", "expected"),
    [
        (CPU, "auto", {}, "float32"),
        (CPU, "auto", {"MLX_BACKEND_CPU_CAST": "0"}, None),
        (CPU, "auto", {"MLX_BACKEND_CPU_CAST": "1"}, "float32"),
        (CPU, "bfloat16", {}, "bfloat16"),
        (METAL, "auto", {}, None),
        (METAL, "float16", {}, "float16"),
        (CUDA, "auto", {}, None),
        (CUDA, "float32", {"MLX_BACKEND_CPU_CAST": "0"}, "float32"),
    ],
)
def test_weights_are_cast_on_a_cpu_only_or_when_asked(
    device: Device, wanted: str, environ: dict[str, str], expected: str | None
) -> None:
    assert weight_type(device, wanted, environ) == expected


@pytest.mark.parametrize(
    ("device", "wish", "type_", "expected"),
    [
        (CPU, None, "float32", True),
        (CPU, None, "float16", False),
        (CPU, None, None, False),
        (CPU, False, "float32", False),
        (METAL, None, None, False),
        (METAL, None, "float32", False),
        (CUDA, True, None, True),
    ],
)
def test_quantised_weights_become_dense_on_a_cpu_or_when_asked(
    device: Device, wish: bool | None, type_: WeightType | None, expected: bool
) -> None:
    assert dequantizes(device, wish, type_) == expected


def test_dense_weights_leave_a_quarter_of_free_memory(tmp_path: Path) -> None:
    assert dense_budget(METAL, 48 * GIB, 8 * GIB, tmp_path) == 30 * GIB
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text(
        f"MemTotal:  {16 << 20} kB\nMemFree:  1 kB\nMemAvailable:  {8 << 20} kB\n"
    )
    assert dense_budget(CPU, 14 * GIB, 2 * GIB, tmp_path) == 6 * GIB
    assert dense_budget(CPU, 6 * GIB, 2 * GIB, tmp_path) == 3 * GIB
    assert dense_budget(CPU, 2 * GIB, 4 * GIB, tmp_path) == 0
    assert dense_budget(METAL, 48 * GIB, 8 * GIB, tmp_path) == 30 * GIB


def test_without_a_figure_of_free_memory_all_memory_counts_as_free(tmp_path: Path) -> None:
    assert free_memory(tmp_path) == machine_memory(tmp_path)
    assert 0 < free_memory() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_the_users_memory_limit_wins() -> None:
    assert memory_limit(METAL, Settings()) == 48 * GIB
    assert memory_limit(METAL, Settings(memory_limit_mib=0)) == 48 * GIB
    assert memory_limit(METAL, Settings(memory_limit_mib=1024)) == GIB


def test_memory_is_divided_by_device() -> None:
    assert memory_plan(CPU, Settings(), 2 * GIB) == MemoryPlan(14 * GIB, 0, None, 6 * GIB)
    assert memory_plan(METAL, Settings(), 16 * GIB) == MemoryPlan(
        48 * GIB, 48 * GIB, 4 * GIB, 16 * GIB
    )
    assert memory_plan(CUDA, Settings(), 6 * GIB) == MemoryPlan(78 * GIB, 0, 8 * GIB, 36 * GIB)


def test_wired_memory_never_exceeds_what_the_device_recommends() -> None:
    plan = memory_plan(METAL, Settings(memory_limit_mib=60 * 1024), 0)
    assert (plan.limit, plan.wired) == (60 * GIB, 48 * GIB)


def test_the_prompt_cache_follows_its_setting() -> None:
    assert memory_plan(CPU, Settings(prompt_cache_mib=0), 0).prompt_cache == 0
    assert memory_plan(CPU, Settings(prompt_cache_mib=64), 0).prompt_cache == 64 * MIB
    assert memory_plan(CPU, Settings(), 15 * GIB).prompt_cache == 0


def test_step_timeout_by_device_unless_set() -> None:
    timeouts = [step_timeout(device, Settings()) for device in (CPU, METAL, CUDA)]
    assert timeouts == [(60, 3600, False), (60, 600, True), (60, 600, True)]
    assert step_timeout(METAL, Settings(step_timeout=0)) == (0, 0, False)


def test_layers_start_early_on_a_cpu_only() -> None:
    assert [starts_layers_early(device) for device in (CPU, METAL, CUDA)] == [True, False, False]


@pytest.mark.skipif(
    mx.default_device() == mx.gpu or not has_fast_blas(), reason="for a CPU with a fast BLAS"
)
def test_many_rows_are_not_multiplied_by_packed_values_on_a_cpu() -> None:
    assert [multiplies_packed(rows) for rows in (1, 15, 16)] == [True, True, False]


def test_prefill_chunk_by_device_unless_set() -> None:
    assert [prefill_chunk(device, Settings()) for device in (CPU, METAL, CUDA)] == [512, 2048, 2048]
    assert prefill_chunk(CUDA, Settings(prefill_chunk=64)) == 64
    assert prefill_chunk(CPU, Settings(), selects=True) == 2048
    assert prefill_chunk(CPU, Settings(prefill_chunk=64), selects=True) == 64


def test_apply_passes_the_limits_to_mlx() -> None:
    cache_before = mx.set_cache_limit(32 * MIB)
    mx.set_cache_limit(cache_before)
    try:
        apply(MemoryPlan(3 * GIB, 0, 64 * MIB, 0))
        assert mx.get_memory_limit() == 3 * GIB
        assert mx.set_cache_limit(cache_before) == 64 * MIB
    finally:
        mx.set_cache_limit(cache_before)


needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")


@pytest.mark.skipif(detect().kind != "cpu", reason="kernels are built by a compiler on a CPU only")
@pytest.mark.parametrize(
    ("switch", "traced_again"), [("0", True), pytest.param("1", False, marks=needs_compiler)]
)
def test_compiled_functions_run_as_python_on_a_cpu(switch: str, traced_again: bool) -> None:
    code = """
import sys
import mlx.core as mx
from backend.engine import device
calls = []
@mx.compile
def double(x):
    calls.append(1)
    return x + x
device.prepare(device.detect())
for _ in range(3):
    assert double(mx.array(2)).item() == 4
print(len(calls))
"""
    result = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "MLX_BACKEND_CPU_COMPILE": switch},
    )
    assert (int(result.stdout) == 3) == traced_again


def test_importing_the_module_does_not_import_mlx() -> None:
    code = "import sys, backend.engine.device; sys.exit('mlx' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_other_threads_run_while_the_return_of_buffers_waits_for_work() -> None:
    """`mx.clear_cache` alone would hold the interpreter's lock until the work is done."""
    turns = 0
    done = threading.Event()

    def count() -> None:
        nonlocal turns
        while not done.is_set():
            turns += 1
            time.sleep(0.001)

    weights = mx.random.normal((1500, 1500))
    mx.eval(weights)
    product = weights
    for _ in range(8):
        product = product @ weights * 1e-3
    counting = threading.Thread(target=count)
    counting.start()
    mx.async_eval(product)
    before = turns
    return_buffers()
    after = turns
    done.set()
    counting.join()
    assert after > before + 5


def test_only_one_function_returns_buffers() -> None:
    files = [*(ROOT / "backend").rglob("*.py")]
    calls = [path.stem for path in files if "mx.clear_cache()" in path.read_text("utf-8")]
    assert calls == ["device"]

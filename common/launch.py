"""Starts Python in this project's environment: `launch.py -m backend --addr HOST:PORT`.

run.sh, scripts/python and the `mlx-backend` command start Python through this file, which replaces
its process by Python with the given arguments. It delays the first answer of Health, so it imports
as little as possible.

Python prints a traceback for an interrupt (Ctrl-C) that arrives while it starts and imports. For
the programs that people interrupt, SIGINT is therefore blocked until they can handle it.

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

# The folder that holds `backend`, `gateway` and the other packages.
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SWITCH = "MLX_BACKEND_OPENBLAS"
_OFF = ("0", "off", "no", "false")
_KEPT = ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX", "PYTHONFAULTHANDLER")
_INTERRUPTIBLE = ("backend", "gateway", "demo.serve")  # programs that unblock SIGINT
_OPENBLAS = "libopenblas.so.0"
_FORTRAN = "libgfortran.so.5"


def command(*arguments: str) -> list[str]:
    """The command that runs Python with these arguments in this project's environment."""
    return [sys.executable, "-I", "-S", os.path.abspath(__file__), *arguments]


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` with the changes that Python needs for the packages in ROOT.

    The host's settings for Python are replaced: some would end it at its start, and without UTF-8
    mode the libraries cannot read their own files under every locale. If OpenBLAS is preloaded, the
    variables MLX_BACKEND_LD_PRELOAD_BEFORE and MLX_BACKEND_LD_LIBRARY_PATH_BEFORE hold the original
    values, for child processes.
    """
    found = {name: value for name, value in environ.items() if name in _KEPT or not _sets(name)}
    found |= {"PYTHONPATH": ROOT, "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1", "PYTHONUTF8": "1"}
    found = _cuda_settings(found) | found
    if environ.get(SWITCH, "").lower() in _OFF:
        return found
    if folder := openblas_folder():
        # The name without a path, because the dynamic linker splits LD_PRELOAD at spaces, which a
        # path may contain.
        for variable, value in (("LD_PRELOAD", _OPENBLAS), ("LD_LIBRARY_PATH", folder)):
            before = environ.get(variable, "")
            found[f"MLX_BACKEND_{variable}_BEFORE"] = before
            found[variable] = f"{value}:{before}" if before else value
    return found


def _cuda_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Settings for MLX's CUDA build; empty if it is not installed.

    MLX 0.32.4 counts the shapes for which it prepares an attention or a graph. After twice as many
    as its cache holds, every operation with a new shape fails. A server meets new shapes for as
    long as it runs, so this check is turned off; MLX then replaces its cache's oldest entries.

    MLX compiles each kernel at its first use, more than a minute in all. By default the kernels are
    below /tmp and are lost when the machine or container restarts, so another folder is set.
    """
    for packages in sys.path:
        try:
            names = os.listdir(packages)
        except OSError:
            continue
        for name in names:
            if name.startswith("mlx_cuda_") and name.endswith(".dist-info"):
                settings = {"MLX_ENABLE_CACHE_THRASHING_CHECK": "0"}
                shared = environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
                cache = environ.get("MLX_BACKEND_CACHE") or os.path.join(shared, "mlx-backend")
                folder = os.path.join(cache, "kernels", name.removesuffix(".dist-info"))
                # If this folder cannot be used, MLX keeps its default.
                if not folder.startswith("~"):  # begins with ~ if the user has no home folder
                    try:
                        os.makedirs(folder, exist_ok=True)
                    except OSError:
                        return settings
                    if os.access(folder, os.W_OK):
                        settings["MLX_PTX_CACHE_DIR"] = folder
                return settings
    return {}


def _sets(name: str) -> bool:
    """Whether the variable is one of Python's own."""
    return name.startswith("PYTHON") and name[len("PYTHON") :].isalpha()


def openblas_folder() -> str | None:
    """The folder of OpenBLAS and the libgfortran.so.5 that it needs; None if not installed.

    The mlx-cpu package contains a libgfortran, but under another name, so links to both make a
    system package unnecessary. They are created at the first start, and are relative, so that the
    environment can be moved.
    """
    folder = os.path.join(sys.prefix, "lib", "openblas")
    if _complete(folder):
        return folder
    for packages in sys.path:
        built = os.path.join(packages, "cmeel.prefix", "lib", _OPENBLAS)
        if os.path.exists(built):
            break
    else:
        return None
    try:
        _link(folder, built, os.path.join(packages, "mlx_cpu.libs"))
    except OSError as problem:
        print(
            f"mlx-backend: OpenBLAS is not used, so a CPU computes several times more slowly:"
            f" {folder} cannot be created ({problem.strerror}); start once as a user who may write"
            " there",
            file=sys.stderr,
        )
        return None
    return folder


def _complete(folder: str) -> bool:
    """Whether the links exist and point to files."""
    return all(os.path.exists(os.path.join(folder, name)) for name in (_OPENBLAS, _FORTRAN))


def _link(folder: str, built: str, bundled: str) -> None:
    """Create `folder` atomically, because other processes may start at the same time."""
    import shutil

    targets = {_OPENBLAS: built}
    for name in os.listdir(bundled):
        if name.startswith("libgfortran"):
            targets[_FORTRAN] = os.path.join(bundled, name)
        elif name.startswith("libquadmath"):
            targets[name] = os.path.join(bundled, name)
    fresh = f"{folder}.{os.getpid()}"
    try:
        os.makedirs(fresh)
        place = os.path.realpath(fresh)
        for name, target in targets.items():
            os.symlink(os.path.relpath(os.path.realpath(target), place), os.path.join(fresh, name))
        if not _complete(folder):
            shutil.rmtree(folder, ignore_errors=True)
        os.rename(fresh, folder)
    except OSError:
        shutil.rmtree(fresh, ignore_errors=True)
        if not _complete(folder):  # otherwise another process was faster
            raise


def hold_interrupts() -> None:
    """Block SIGINT, also in the program that replaces this one, which must unblock it."""
    _signal.pthread_sigmask(_signal.SIG_BLOCK, (_signal.SIGINT,))


def run(*arguments: str) -> NoReturn:
    """Replace this process by Python in this project's environment."""
    os.execve(sys.executable, [sys.executable, *arguments], environment(os.environ))


def mlx_backend() -> NoReturn:
    """The `mlx-backend` command of the wheel."""
    if sys.argv[1:2] in (["backend"], ["serve"]):
        hold_interrupts()
    run("-m", "demo.command", *sys.argv[1:])


if __name__ == "__main__":
    if sys.argv[1:2] == ["-m"] and sys.argv[2:3] and sys.argv[2] in _INTERRUPTIBLE:
        hold_interrupts()
    if sys.flags.no_site:  # so that the time in which SIGINT is not blocked is short
        site.main()
    run(*sys.argv[1:])

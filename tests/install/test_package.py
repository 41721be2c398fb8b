"""`make package`: a directory that works wherever it is copied."""

from __future__ import annotations

import os
import py_compile
import re
import runpy
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from tests.install.shell import ROOT, clean_environment, shell
from wire import backend_pb2, backend_pb2_grpc

# Half a gigabyte is copied, and thousands of files are compiled.
pytestmark = pytest.mark.timeout(900)
TINY = ROOT / "tests" / "models" / "tiny_text"
# As root on Linux, the package is tried in a system that has bash and the C library and no more.
BARE = sys.platform == "linux" and os.geteuid() == 0
C_LIBRARY = ("libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1")


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The root folder of a bare system, or None if it cannot be entered."""
    root = tmp_path_factory.mktemp("system")
    if BARE:
        bash = "/bin/bash"
        linked = re.findall(r"(/\S+) \(0x", shell("ldd", bash).stdout)
        (libc,) = (Path(file).parent for file in linked if file.endswith("/libc.so.6"))
        for file in {bash, *linked, *(str(libc / name) for name in C_LIBRARY)}:
            place = root / file.lstrip("/")
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, place)
        (root / "tmp").mkdir()
        (root / "dev").mkdir()
        for name, minor in (("null", 3), ("zero", 5), ("urandom", 9)):
            os.mknod(root / "dev" / name, stat.S_IFCHR | 0o666, os.makedev(1, minor))
    yield root
    shutil.rmtree(root)


@pytest.fixture(scope="module")
def package(system: Path) -> Path:
    """A package that was built in one place and then moved to another, with a space in its path."""
    built = system / "built"
    result = shell(ROOT / "scripts/python", ROOT / "scripts/package.py", built)
    assert result.returncode == 0, result.stderr
    command = result.stdout.splitlines()[-1].strip()
    assert command == f"local-ai backends install {built} mlx-backend mlx"
    moved = system / "put elsewhere" / "mlx"
    moved.parent.mkdir()
    built.rename(moved)
    return moved


def test_it_has_what_a_host_needs_and_nothing_more(package: Path) -> None:
    assert (package / "run.sh").stat().st_mode & 0o111
    assert (package / "metadata.json").exists() is False  # the host creates that
    needed = {"LICENSE", "README.md", "backend", "common", "python", "run.sh", "scripts", "wire"}
    assert {path.name for path in package.iterdir()} - {"lib"} == needed
    # Debian's Python has them in python/local/lib/python3.*/dist-packages.
    packages = {path.name for path in package.glob("python/**/*-packages/*")}
    assert "mlx_lm" in packages
    assert not packages & {"mypy", "fastapi", "uvicorn", "prometheus_client", "pip", "grpc_tools"}


def test_all_links_stay_inside(package: Path) -> None:
    for path in package.rglob("*"):
        if path.is_symlink():
            assert not path.readlink().is_absolute(), path
            assert path.resolve().is_relative_to(package), path


def test_it_contains_no_path_of_the_builder(package: Path) -> None:
    places = [str(ROOT), sys.prefix, str(package.parents[1] / "built")]
    if sys.base_prefix.count("/") > 2:
        places.append(sys.base_prefix)
    named = re.compile(b"|".join(re.escape(place.encode()) for place in places))
    files = [path for path in package.rglob("*") if path.is_file() and not path.is_symlink()]
    assert len(files) > 1000
    for path in files:
        assert not named.search(path.read_bytes()), path


def test_it_works_on_a_bare_system_and_changes_none_of_its_files(
    package: Path, system: Path
) -> None:
    model = system / "tiny_text"
    shutil.copytree(TINY, model)
    before = {path: path.lstat().st_mtime_ns for path in package.rglob("*")}
    # chroot(8), because with a `preexec_fn` gRPC's fork handlers would run, and can crash or hang.
    entering = ["chroot", str(system)] if BARE else []
    inside = Path("/") if BARE else system
    run = inside / "put elsewhere" / "mlx" / "run.sh"
    process = subprocess.Popen(
        [*entering, str(run), "--addr", "127.0.0.1:0"],
        cwd="/",
        env=clean_environment(ENV_DIR="", MLX_BACKEND_OPENBLAS="1"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        listening = next(line for line in process.stderr if "event=listening" in line)
        (address,) = re.findall(r"addr=(\S+)", listening)
        with grpc.insecure_channel(address) as channel:
            stub = backend_pb2_grpc.BackendStub(channel)
            answer = stub.Health(backend_pb2.HealthMessage(), timeout=60, wait_for_ready=True)
            assert answer.message == b"OK"
            options = backend_pb2.ModelOptions(
                Model="tiny_text", ModelFile=str(inside / "tiny_text"), ContextSize=512
            )
            assert stub.LoadModel(options).success
            question = backend_pb2.Message(role="user", content="What is the capital of France?")
            request = backend_pb2.PredictOptions(
                Messages=[question], UseTokenizerTemplate=True, Tokens=20
            )
            assert b"Paris" in stub.Predict(request).message
            if sys.platform == "linux":
                maps = Path(f"/proc/{process.pid}/maps").read_text()
                libraries = {
                    Path(file) for file in re.findall(r"(/.*\.so\S*)$", maps, re.MULTILINE)
                }
                outside = {file.name for file in libraries if not file.is_relative_to(package)}
                assert outside <= {*C_LIBRARY, "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
                assert any(file.name.startswith("libmlx") for file in libraries)
        process.send_signal(signal.SIGTERM)
        _, complaints = process.communicate(timeout=240)
        assert process.returncode == 0, complaints
    finally:
        process.kill()
        process.communicate()
    assert {path: path.lstat().st_mtime_ns for path in package.rglob("*")} == before


def test_its_bytecode_stays_valid_when_copied(package: Path) -> None:
    """Each copied file gets a new date, which makes Python treat other bytecode as stale."""
    compiled = list(package.rglob("*.pyc"))
    assert len(compiled) > 1000
    for path in compiled:
        with path.open("rb") as file:
            assert file.read(8)[4:] == b"\x01\0\0\0", (
                path
            )  # validated by hash, and never compared with the source
    sources = [path for path in package.glob("backend/**/*.py") if path.stat().st_size]
    assert sources
    for source in sources:
        assert list((source.parent / "__pycache__").glob(f"{source.stem}.*.pyc")), source


def test_only_bytecode_of_the_same_source_is_used_again(tmp_path: Path) -> None:
    packaging = runpy.run_path(str(ROOT / "scripts/package.py"))
    source = tmp_path / "one.py"
    source.write_text("x = 1")
    assert packaging["compiled_before"](b"x = 1", source) is None
    py_compile.compile(str(source))
    code = packaging["compiled_before"](b"x = 1", source)
    assert packaging["relocated"](code, "elsewhere/one.py").co_filename == "elsewhere/one.py"
    assert packaging["compiled_before"](b"x = 2", source) is None
    source.write_text("x = 2")
    os.utime(source, (0, 0))
    assert packaging["compiled_before"](b"x = 2", source) is None


def test_a_folder_that_is_not_a_package_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("mine")
    for place in (str(tmp_path), "~"):  # not every shell expands it behind PACKAGE_DIR=
        result = shell(
            *(ROOT / "scripts/python", ROOT / "scripts/package.py", place),
            environment=clean_environment(HOME=str(tmp_path)),
        )
        assert result.returncode == 1
        assert f"{tmp_path} exists and is not a package" in result.stderr
    assert (tmp_path / "precious.txt").read_text() == "mine"


def test_a_folder_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    target = tmp_path / "file" / "package"
    result = shell(ROOT / "scripts/python", ROOT / "scripts/package.py", target)
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("package: nothing can be created there: ")
    assert str(target.parent) in line

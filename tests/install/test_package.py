"""`make package`: a directory that starts wherever it is put."""

import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from tests.install.shell import ROOT, clean_environment, shell
from wire import backend_pb2, backend_pb2_grpc


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A package that was laid out in one place and then moved to another, with a space in it."""
    folder = tmp_path_factory.mktemp("package")
    result = shell(ROOT / "scripts/package.sh", folder / "built")
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1].startswith(f"package: {folder}/built")
    moved = folder / "put elsewhere" / "mlx"
    moved.parent.mkdir()
    (folder / "built").rename(moved)
    yield moved
    shutil.rmtree(folder)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_it_has_what_a_host_looks_for_and_nothing_more(package: Path) -> None:
    assert (package / "run.sh").stat().st_mode & 0o111
    assert (package / "metadata.json").exists() is False  # the host writes that
    names = {path.name for path in package.iterdir()}
    needed = {"run.sh", "install.sh", "backend.proto", "backend", "common", "wire", "venv"}
    assert needed <= names
    assert names.isdisjoint({"tests", "demo", "bench", "docs", "gateway", ".git", "build"})
    for foreign in ("mypy", "fastapi", "uvicorn", "prometheus_client"):
        assert list(package.glob(f"venv/lib/python3*/site-packages/{foreign}")) == []


def test_no_link_leads_out_of_it_but_to_the_interpreter(package: Path) -> None:
    for path in package.rglob("*"):
        if path.is_symlink():
            inside = path.resolve().is_relative_to(package)
            assert inside or path.name.startswith("python"), path


def test_its_own_install_finds_nothing_to_do(package: Path) -> None:
    result = shell("./install.sh", cwd=package, environment=clean_environment(ENV_DIR=""))
    assert result.returncode == 0, result.stderr
    assert "up to date" in result.stdout


def test_it_starts_as_a_host_starts_it_and_uses_only_itself(package: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    process = subprocess.Popen(
        ["./run.sh", "--addr", address],
        cwd=package,
        env=clean_environment(ENV_DIR=""),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        with grpc.insecure_channel(address) as channel:
            stub = backend_pb2_grpc.BackendStub(channel)
            answer = stub.Health(backend_pb2.HealthMessage(), timeout=60, wait_for_ready=True)
            assert answer.message == b"OK"
            if sys.platform == "linux":
                maps = Path(f"/proc/{process.pid}/maps").read_text()
                assert str(package) in maps
                assert str(ROOT) not in maps
        process.send_signal(signal.SIGTERM)
        _, complaints = process.communicate(timeout=60)
        assert process.returncode == 0, complaints
    finally:
        process.kill()
        process.communicate()


def test_a_folder_that_is_no_package_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("mine")
    result = shell(ROOT / "scripts/package.sh", tmp_path)
    assert result.returncode == 1
    assert "is no package" in result.stderr
    assert (tmp_path / "precious.txt").read_text() == "mine"

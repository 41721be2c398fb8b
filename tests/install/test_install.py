"""install.sh from nothing, again, after an interruption, and with interpreters it cannot use.

The real locks take half a minute to install, so most of this runs on a copy of the project whose
lock holds only what generating the stubs needs.
"""

import os
import re
import shutil
import subprocess
import sys
from importlib.util import cache_from_source
from pathlib import Path

import pytest

from tests.install.shell import ROOT, clean_environment, last_line, shell, write_program

SMALL = ("grpcio", "grpcio-tools", "protobuf", "typing-extensions")
VENV = Path(os.environ.get("ENV_DIR") or ROOT) / "venv"
PROFILE = {"BUILD_TYPE": "cublas", "CUDA_MAJOR_VERSION": "12"}


def lock_of(names: tuple[str, ...]) -> str:
    text = (ROOT / "requirements" / "linux-cuda12.lock").read_text()
    blocks = re.findall(r"^[a-z0-9-]+==.*?(?=^\S|\Z)", text, re.MULTILINE | re.DOTALL)
    return "".join(block for block in blocks if block.split("==")[0] in names)


def project_copy(folder: Path) -> Path:
    (folder / "requirements").mkdir(parents=True)
    shutil.copy(ROOT / "install.sh", folder)
    shutil.copy(ROOT / "backend.proto", folder)
    (folder / "requirements" / "linux-cuda12.lock").write_text(lock_of(SMALL))
    (folder / "requirements" / "dev.lock").write_text("")
    return folder


def install(project: Path, *arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
    # Not into the venv that runs these tests, wherever ENV_DIR has put it; and bytecode of packages
    # that are imported once costs more than it saves.
    changes = PROFILE | {"ENV_DIR": "", "EXTRA_PIP_INSTALL_FLAGS": "--no-compile"} | changes
    return shell("./install.sh", *arguments, cwd=project, environment=clean_environment(**changes))


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose first installation ended at packages with another hash."""
    project = project_copy(tmp_path_factory.mktemp("fresh") / "my backend")
    lock = project / "requirements" / "linux-cuda12.lock"
    right = lock.read_text()
    lock.write_text(re.sub(r"sha256:[0-9a-f]{8}", "sha256:00000000", right))
    result = install(project)
    lock.write_text(right)
    assert result.returncode == 1
    assert "HASHES" in result.stderr
    assert last_line(result.stderr).startswith(
        "install.sh: pip could not install requirements/linux-cuda12.lock (see above): "
    )
    return project


@pytest.fixture(scope="module")
def installed(refused: Path) -> Path:
    """The same project, installed after another installation was killed.

    The environment names other folders for packages.
    """
    # The state after a kill: half the packages, no stamp, a lock without an owner, and a venv that
    # does not know its interpreter.
    (packages,) = (refused / "venv" / "lib").glob("python3*/site-packages")
    (refused / "venv" / "pyvenv.cfg").unlink()
    (packages / "google").mkdir()
    (packages / "google" / "half.py").touch()
    gone = subprocess.Popen(["true"])
    gone.wait()
    (refused / "venv.lock").mkdir()
    (refused / "venv.lock" / "pid").write_text(f"{gone.pid}\n")
    (version,) = re.findall(r"^typing-extensions==(\S+)", lock_of(SMALL), re.MULTILINE)
    elsewhere = refused.parent / "elsewhere"
    metadata = elsewhere / f"typing_extensions-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: typing_extensions\nVersion: {version}\n")
    result = install(
        refused, PYTHONPATH=str(elsewhere), PIP_TARGET=str(elsewhere / "target"), PIP_USER="1"
    )
    assert result.returncode == 0, result.stderr
    return refused


def identity(file: Path) -> tuple[int, int]:
    """The file's inode and modification time, which reading does not change."""
    status = file.stat()
    return status.st_ino, status.st_mtime_ns


def assert_usable(project: Path) -> None:
    result = shell(
        project / "venv/bin/python",
        "-c",
        "from wire import backend_pb2, backend_pb2_grpc; print(backend_pb2_grpc.BackendStub)",
        cwd=project,
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.skipif(os.uname().sysname != "Linux", reason="the copy installs a Linux profile")
class TestInstallingFromNothing:
    def test_packages_with_another_hash_are_refused(self, refused: Path) -> None:
        assert (refused / "venv" / "bin" / "python").exists()
        assert not (refused / "venv" / ".installed").exists()

    def test_leaves_a_venv_and_the_stubs_even_after_an_interrupted_install(
        self, installed: Path
    ) -> None:
        assert_usable(installed)
        (packages,) = installed.glob("venv/lib/python3*/site-packages")
        assert not (packages / "google" / "half.py").exists()
        assert not (packages / "setuptools").exists()
        assert (installed / "wire" / "backend_pb2.pyi").exists()
        assert list(installed.glob(".wire.*")) == []
        assert not (installed / "venv.lock").exists()

    def test_a_second_run_changes_nothing_and_reports_it_in_one_line(self, installed: Path) -> None:
        before = identity(installed / "venv" / ".installed")
        result = install(installed)
        assert result.returncode == 0
        (line,) = result.stdout.splitlines()
        assert line.startswith("install.sh: up to date: linux-cuda12, Python 3.")
        assert identity(installed / "venv" / ".installed") == before

    def test_settings_for_other_folders_do_not_apply(self, installed: Path) -> None:
        assert list(installed.glob("venv/lib/python3*/site-packages/typing_extensions.py"))
        assert not (installed.parent / "elsewhere" / "target").exists()

    def test_a_complete_install_needs_no_lock(self, installed: Path) -> None:
        lock = installed / "venv.lock"
        lock.mkdir()
        (lock / "pid").write_text(f"{os.getpid()}\n")
        result = install(installed)
        shutil.rmtree(lock)
        assert result.returncode == 0, result.stderr
        assert "up to date" in last_line(result.stdout)

    def test_env_dir_may_be_a_relative_path(self, installed: Path) -> None:
        result = install(installed, "--stubs", ENV_DIR=".")
        assert result.returncode == 0, result.stderr
        assert_usable(installed)

    def test_a_folder_that_cannot_be_written_is_named(self, tmp_path: Path) -> None:
        result = install(project_copy(tmp_path / "project"), ENV_DIR="/proc")
        assert result.returncode == 1
        assert last_line(result.stderr).startswith(
            "install.sh: nothing can be installed into /proc/venv: mkdir: "
        )

    def test_bytecode_is_written_even_where_python_may_not_write_it(self, installed: Path) -> None:
        shutil.rmtree(installed / "wire" / "__pycache__", ignore_errors=True)
        result = install(installed, PYTHONDONTWRITEBYTECODE="1")
        assert result.returncode == 0, result.stderr
        assert list(installed.glob("wire/__pycache__/backend_pb2.*.pyc"))

    def test_a_changed_proto_regenerates_only_the_stubs(self, installed: Path) -> None:
        stamp = identity(installed / "venv" / ".installed")
        with (installed / "backend.proto").open("a") as proto:
            proto.write("\nmessage AddedByTheTest { string text = 1; }\n")
        result = install(installed)
        assert result.returncode == 0, result.stderr
        assert "AddedByTheTest" in (installed / "wire" / "backend_pb2.pyi").read_text()
        assert identity(installed / "venv" / ".installed") == stamp

    def test_a_broken_proto_keeps_the_old_stubs(self, installed: Path) -> None:
        sound = (installed / "backend.proto").read_text()
        (installed / "backend.proto").write_text("this is no proto")
        result = install(installed)
        (installed / "backend.proto").write_text(sound)
        assert result.returncode == 1
        assert "backend.proto could not be compiled" in last_line(result.stderr)
        assert_usable(installed)


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("setpriv"), reason="changes the user: root with setpriv"
)
def test_an_install_waits_for_one_by_another_user(tmp_path: Path) -> None:
    project = project_copy(tmp_path / "project")
    lock = project / "venv.lock"
    lock.mkdir()
    (lock / "pid").write_text(f"{os.getpid()}\n")
    # The rights to files are kept, because the interpreter may be in root's home folder.
    rights = "caps=+dac_read_search,+dac_override"
    user = ("setpriv", "--reuid=54321", "--clear-groups", f"--inh-{rights}", f"--ambient-{rights}")
    waiting = subprocess.Popen(
        [*user, "./install.sh"],
        cwd=project,
        env=clean_environment(**PROFILE, ENV_DIR=""),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert waiting.stdout is not None
    with waiting.stdout:
        said = waiting.stdout.readline()
    waiting.kill()
    waiting.wait()
    assert said.startswith(f"install.sh: waiting for another install (process {os.getpid()})")


def test_the_projects_own_install_is_up_to_date_at_once() -> None:
    result = shell(ROOT / "install.sh", "--dev")
    assert result.returncode == 0, result.stderr
    assert "up to date" in last_line(result.stdout)
    assert Path(cache_from_source(str(ROOT / "backend" / "__main__.py"))).exists()
    listed = "site-packages/transformers/models/__pycache__/names-*.json"
    assert list(Path(sys.prefix).glob(f"lib/python3*/{listed}"))


@pytest.mark.skipif(
    not (VENV / "lib" / "openblas").exists(), reason="only Linux CPU installs preload a BLAS"
)
def test_kernels_of_other_sources_are_installed_again(tmp_path: Path) -> None:
    """Unless the packages are there from which the first start compiles them."""
    venv = tmp_path / "venv"
    # Without `ensurepip` an install ends where it would create a venv, which takes long.
    own = f'exec "{VENV}/bin/python" "$@"'
    write_program(venv / "bin" / "python", f"case $2 in *ensurepip*) exit 1 ;; esac\n{own}")
    shutil.copytree(VENV / "lib" / "openblas", venv / "lib" / "openblas")
    shutil.copy(VENV / ".installed", venv)
    offline = {"EXTRA_PIP_INSTALL_FLAGS": "--no-index", "PIP_FIND_LINKS": ""}
    environment = clean_environment(ENV_DIR=str(tmp_path), BUILD_TYPE="cpu", **offline)
    result = shell(ROOT / "install.sh", environment=environment)
    assert (result.returncode, result.stderr) == (0, "")
    assert "up to date: linux-cpu" in result.stdout
    (venv / "lib" / "openblas" / "origin").write_text("scipy_openblas32-0.1-00000000 0\n")
    result = shell(ROOT / "install.sh", environment=environment)
    assert result.returncode == 1
    assert "installing linux-cpu" in result.stdout
    assert "has no venv module" in last_line(result.stderr)


@pytest.mark.parametrize("version", ["3.10 64bit", "3.15 64bit", "3.12 32bit", "2.7 64bit"])
def test_an_unsupported_python_is_named(tmp_path: Path, version: str) -> None:
    python = write_program(tmp_path / "python", f'echo "{version}"')
    result = shell(ROOT / "install.sh", environment=clean_environment(PYTHON=str(python)))
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert f"Python {version} is not supported (PYTHON={python})" in line
    assert "3.11, 3.12, 3.13 or 3.14" in line


def test_a_python_that_does_not_run_is_named() -> None:
    result = shell(ROOT / "install.sh", environment=clean_environment(PYTHON="/no/python"))
    assert result.returncode == 1
    assert result.stderr == "install.sh: PYTHON=/no/python is not a working Python 3\n"


def test_without_any_supported_python_the_ones_found_are_listed(tmp_path: Path) -> None:
    project = project_copy(tmp_path / "project")
    programs = tmp_path / "programs"
    for name in ("python3", "python3.11", "python3.12", "python3.13", "python3.14"):
        write_program(programs / name, "exit 127")
    write_program(programs / "python3", 'echo "3.9 64bit"')
    result = install(project, PATH=f"{programs}:/usr/bin:/bin")
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert "python3 is 3.9 64bit" in line


def test_a_python_without_venv_names_the_missing_package(tmp_path: Path) -> None:
    project = project_copy(tmp_path / "project")
    python = write_program(
        tmp_path / "python", 'case $2 in *ensurepip*) exit 1 ;; *) echo "3.12 64bit" ;; esac'
    )
    result = install(project, PYTHON=str(python))
    assert result.returncode == 1
    assert "apt install python3.12-venv" in last_line(result.stderr)


def test_an_unknown_argument_is_refused() -> None:
    result = shell(ROOT / "install.sh", "--devel")
    assert result.returncode == 1
    assert result.stderr == "install.sh: unknown argument '--devel' (see ./install.sh --help)\n"


def test_locks_contain_no_index_and_no_path() -> None:
    for lock in (ROOT / "requirements").glob("*.lock"):
        for line in lock.read_text().splitlines():
            assert not re.search(r"://|--(index|extra|find|trusted)", line), f"{lock.name}: {line}"

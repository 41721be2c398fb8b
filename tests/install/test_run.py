"""run.sh: where it may be called from, and what it passes to Python."""

import ast
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest

from common.launch import environment
from tests.install.shell import ROOT, clean_environment, shell, write_program
from tests.unignored_signals import unignored

VENV = Path(os.environ.get("ENV_DIR") or ROOT) / "venv"

# Takes the place of the backend: prints what it was started with.
WITNESS = """
import json, os, signal, sys
print(json.dumps({
    "arguments": sys.argv[1:],
    "pid": os.getpid(),
    "cwd": os.getcwd(),
    "prefix": sys.prefix,
    "path": sys.path,
    "environment": dict(os.environ),
    "ignored": [number for number in signal.Signals if signal.getsignal(number) == signal.SIG_IGN],
}))
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project at a path with a space, around the real venv."""
    folder = tmp_path / "some where"
    folder.mkdir()
    shutil.copy(ROOT / "run.sh", folder)
    shutil.copytree(ROOT / "scripts", folder / "scripts")
    (folder / "common").mkdir()
    shutil.copy(ROOT / "common" / "launch.py", folder / "common")
    (folder / "backend").mkdir()
    (folder / "backend" / "__main__.py").write_text(WITNESS)
    return folder


def start(program: str | Path, *arguments: str, cwd: Path, **environment: str) -> dict[str, object]:
    full = clean_environment(**({"ENV_DIR": str(VENV.parent)} | environment))
    result = shell(program, *arguments, cwd=cwd, environment=full)
    assert result.returncode == 0, result.stderr
    answer: dict[str, object] = json.loads(result.stdout)
    return answer


@pytest.mark.parametrize(
    "arguments",
    [
        ["--addr", "127.0.0.1:1234"],
        ["--addr=127.0.0.1:1234"],
        ["--addr", "localhost:1", "two words", "", "*", "$HOME", 'quo"te'],
    ],
)
def test_arguments_arrive_unchanged(project: Path, arguments: list[str]) -> None:
    assert start(project / "run.sh", *arguments, cwd=project)["arguments"] == arguments


def test_it_works_from_anywhere_and_keeps_the_working_directory(
    project: Path, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "json.py").write_text("raise SystemExit('imported from the working directory')")
    for program, cwd in (
        ("./run.sh", project),
        (project / "run.sh", elsewhere),
        ("../some where/run.sh", elsewhere),
    ):
        seen = start(program, cwd=cwd)
        assert seen["cwd"] == str(cwd)
        assert seen["prefix"] == str(VENV)


def test_it_works_through_links(project: Path, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "first").symlink_to("../some where/run.sh")
    (tmp_path / "second").symlink_to(tmp_path / "bin" / "first")
    (tmp_path / "folder").symlink_to(project)
    for program in ("second", "bin/first", "folder/run.sh"):
        seen = start(f"./{program}", cwd=tmp_path)
        assert str(project) in seen["path"]  # type: ignore[operator]


def test_it_works_when_the_shell_is_named(project: Path) -> None:
    full = clean_environment(ENV_DIR=str(VENV.parent))
    assert shell("bash", "run.sh", cwd=project, environment=full).returncode == 0


def test_python_replaces_the_shell(project: Path) -> None:
    full = clean_environment(ENV_DIR=str(VENV.parent))
    command = f'echo $$; exec "{project}/run.sh"'
    lines = shell("sh", "-c", command, cwd=project, environment=full).stdout.splitlines()
    assert json.loads(lines[1])["pid"] == int(lines[0])


def test_signals_for_other_purposes_are_ignored_while_python_starts(project: Path) -> None:
    ignored = start(project / "run.sh", cwd=project)["ignored"]
    assert {signal.SIGUSR1, signal.SIGUSR2} <= set(ignored)  # type: ignore[call-overload]


def test_a_hosts_python_settings_are_not_inherited(project: Path, tmp_path: Path) -> None:
    seen = start(
        project / "run.sh",
        cwd=tmp_path,
        PYTHONHOME="/nowhere",
        PYTHONPATH="/foreign",
        PYTHONHASHSEED="none",
        PYTHONMALLOC="none",
        PYTHONUTF8="0",
        PYTHONPYCACHEPREFIX="/tmp/kept",
    )
    environment = seen["environment"]
    assert isinstance(environment, dict)
    assert {"PYTHONHOME", "PYTHONHASHSEED", "PYTHONMALLOC"}.isdisjoint(environment)
    assert environment["PYTHONUTF8"] == "1"
    assert environment["PYTHONPYCACHEPREFIX"] == "/tmp/kept"
    assert environment["PYTHONPATH"] == str(project)
    assert environment["PYTHONUNBUFFERED"] == "1"
    assert "/foreign" not in seen["path"]  # type: ignore[operator]


def test_gpu_libraries_in_the_package_come_first(project: Path) -> None:
    (project / "lib").mkdir()
    seen = start(
        project / "run.sh", cwd=project, LD_LIBRARY_PATH="/theirs", MLX_BACKEND_OPENBLAS="0"
    )
    environment = seen["environment"]
    assert isinstance(environment, dict)
    assert environment["LD_LIBRARY_PATH"] == f"{project}/lib:/theirs"


BACKEND = ("run.sh", "--addr=127.0.0.1:0")
GATEWAY = ("scripts/python", "-m", "gateway", "--port=0", "--models-dir=.")
SERVE = ("scripts/python", "-m", "cli", "serve", "--port=0", "--models-dir=.")


@pytest.mark.skipif(not Path("/proc").exists(), reason="only Linux shows the state of a process")
@pytest.mark.parametrize(
    ("command", "module", "library"),
    [
        (BACKEND, "backend", ""),
        (BACKEND, "backend", "_asyncio"),
        (BACKEND, "backend", "cygrpc"),
        (GATEWAY, "gateway", ""),
        (GATEWAY, "gateway", "pydantic_core"),
        (SERVE, "cli", ""),
        (SERVE, "gateway", ""),
    ],
)
def test_an_interrupt_while_python_imports_leaves_no_traceback(
    tmp_path: Path, command: tuple[str, ...], module: str, library: str
) -> None:
    """The interrupt is sent once Python runs `module` and has loaded `library`.

    If the library is built into the interpreter, the interrupt comes after the start.
    """
    program, *arguments = command
    with (
        unignored(signal.SIGINT),
        subprocess.Popen(
            [ROOT / program, *arguments],
            cwd=tmp_path,
            env=clean_environment(ENV_DIR=str(VENV.parent)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        ) as process,
    ):
        assert process.stderr is not None
        state = Path(f"/proc/{process.pid}")
        while process.poll() is None and not select.select([process.stderr], [], [], 0)[0]:
            words = (state / "cmdline").read_text().split("\0")
            if words[1:3] == ["-m", module] and library in (state / "maps").read_text():
                break
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate()
    # If the process had already begun to serve, it shuts down normally.
    assert process.returncode == 0 or (process.returncode, stderr) == (-signal.SIGINT, "")
    assert "Traceback" not in stderr


def test_a_missing_venv_is_one_line(project: Path, tmp_path: Path) -> None:
    environment = clean_environment(ENV_DIR=str(tmp_path))
    result = shell(project / "run.sh", cwd=project, environment=environment)
    assert result.returncode == 1
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert f"no virtual environment at {tmp_path}/venv" in line
    assert f"run {project}/install.sh" in line


def test_an_interpreter_in_the_package_comes_first(project: Path) -> None:
    write_program(project / "python" / "bin" / "python3", 'printf "%s\\n" "$0" "$@"')
    full = clean_environment(ENV_DIR=str(VENV.parent))
    result = shell(project / "run.sh", "--version", cwd=project, environment=full)
    python, *arguments = result.stdout.splitlines()
    assert python == f"{project}/python/bin/python3"
    assert arguments == ["-I", "-S", f"{project}/common/launch.py", "-m", "backend", "--version"]


def test_a_cuda_build_keeps_its_kernels_and_never_counts_shapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default MLX keeps kernels below /tmp, and its check makes new shapes fail in the end."""
    for name in ("MLX_PTX_CACHE_DIR", "MLX_ENABLE_CACHE_THRASHING_CHECK"):
        monkeypatch.delenv(name, raising=False)
    environment = tmp_path / "venv"
    venv.create(environment, symlinks=True)
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    packages = environment / "lib" / version / "site-packages"
    report = (
        "import os; print({name: os.environ.get(name)"
        " for name in ('MLX_PTX_CACHE_DIR', 'MLX_ENABLE_CACHE_THRASHING_CHECK')})"
    )

    def settings(**changes: str) -> Any:
        result = launch(environment, report, HOME=str(tmp_path / "home"), **changes)
        return ast.literal_eval(result.stdout)

    assert set(settings().values()) == {None}
    (packages / "mlx_cuda_13-0.32.4.dist-info").mkdir(parents=True)
    kernels = tmp_path / "home" / ".cache" / "mlx-backend" / "kernels" / "mlx_cuda_13-0.32.4"
    assert list(settings().values()) == [str(kernels), "0"]
    assert kernels.is_dir()
    own = settings(MLX_PTX_CACHE_DIR="/theirs", MLX_ENABLE_CACHE_THRASHING_CHECK="1")
    assert list(own.values()) == ["/theirs", "1"]
    named = settings(MLX_BACKEND_CACHE=str(tmp_path / "cache"))
    assert named["MLX_PTX_CACHE_DIR"] == str(tmp_path / "cache" / "kernels" / kernels.name)
    # Nothing can be created below a file.
    (tmp_path / "file").touch()
    unusable = settings(MLX_BACKEND_CACHE=str(tmp_path / "file"))
    assert list(unusable.values()) == [None, "0"]


@pytest.mark.usefixtures("homeless")
def test_a_user_without_a_home_keeps_no_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mlx_cuda_12-0.32.4.dist-info").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.chdir(tmp_path)
    found = environment({})
    assert found["MLX_ENABLE_CACHE_THRASHING_CHECK"] == "0"
    assert "MLX_PTX_CACHE_DIR" not in found
    assert len(list(tmp_path.iterdir())) == 1


def launch(environment: Path, code: str, **changes: str) -> subprocess.CompletedProcess[str]:
    command = [environment / "bin/python", "-I", "-S", ROOT / "common/launch.py"]
    return shell(*map(str, command), "-c", code, environment=clean_environment(**changes))


preloads = pytest.mark.skipif(
    not (VENV / "lib" / "openblas").exists(), reason="only Linux CPU installs preload a BLAS"
)


@preloads
class TestOpenBLAS:
    def test_is_preloaded_and_records_previous_values(self, project: Path) -> None:
        seen = start(project / "run.sh", cwd=project, LD_LIBRARY_PATH="/theirs")["environment"]
        assert isinstance(seen, dict)
        assert isinstance(seen["LD_PRELOAD"], str)
        assert seen["LD_PRELOAD"].split(":")[-1] == "libopenblas.so.0"
        assert seen["LD_LIBRARY_PATH"] == f"{VENV}/lib/openblas:/theirs"
        assert "OPENBLAS_NUM_THREADS" not in seen
        assert seen["MLX_BACKEND_LD_PRELOAD_BEFORE"] == ""
        assert seen["MLX_BACKEND_LD_LIBRARY_PATH_BEFORE"] == "/theirs"

    def test_keeps_the_users_number_of_threads(self, project: Path) -> None:
        seen = start(project / "run.sh", cwd=project, OPENBLAS_NUM_THREADS="3")["environment"]
        assert isinstance(seen, dict)
        assert seen["OPENBLAS_NUM_THREADS"] == "3"

    @pytest.mark.parametrize("off", ["0", "off", "False", "no"])
    def test_can_be_turned_off(self, project: Path, off: str) -> None:
        seen = start(project / "run.sh", cwd=project, MLX_BACKEND_OPENBLAS=off)["environment"]
        assert isinstance(seen, dict)
        assert "LD_PRELOAD" not in seen
        assert "OPENBLAS_NUM_THREADS" not in seen

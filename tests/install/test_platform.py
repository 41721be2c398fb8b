"""Which packages install.sh chooses, and its messages if there are none."""

import subprocess
from pathlib import Path

import pytest

from tests.install.shell import ROOT, clean_environment, shell, write_program


class Machine:
    """A machine as install.sh sees it: scripted programs at the front of PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.is_a("Linux", "x86_64")
        self.has("getconf", 'echo "glibc 2.39"')
        self.has("nvidia-smi", "exit 9")

    def has(self, program: str, script: str) -> None:
        write_program(self.folder / program, script)

    def is_a(self, system: str, processor: str) -> None:
        self.has("uname", f"case $1 in -s) echo {system} ;; -m) echo {processor} ;; esac")

    def has_nvidia_driver(self, version: str) -> None:
        self.has("nvidia-smi", f"echo {version}")

    def profile(self, **environment: str) -> str:
        result = self.ask(**environment)
        assert result.returncode == 0, result.stderr
        return result.stdout.strip()

    def refusal(self, **environment: str) -> str:
        result = self.ask(**environment)
        assert result.returncode == 1
        assert result.stdout == ""
        (line,) = result.stderr.splitlines()
        return line

    def ask(self, **environment: str) -> subprocess.CompletedProcess[str]:
        path = f"{self.folder}:/usr/bin:/bin"
        return shell(
            ROOT / "install.sh",
            "--print-profile",
            environment=clean_environment(PATH=path, **environment),
        )


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "programs")


def has_own_gpu() -> bool:
    return Path("/proc/driver/nvidia/version").exists()


@pytest.mark.skipif(has_own_gpu(), reason="this machine's own driver is found in /proc")
def test_linux_without_a_gpu_is_cpu(machine: Machine) -> None:
    assert machine.profile() == "linux-cpu"


@pytest.mark.parametrize(
    ("driver", "profile"),
    [
        ("550.54.14", "linux-cuda12"),
        ("575.57", "linux-cuda12"),
        ("580.65.06", "linux-cuda13"),
        ("610.1", "linux-cuda13"),
    ],
)
def test_the_driver_decides_the_cuda_version(machine: Machine, driver: str, profile: str) -> None:
    machine.has_nvidia_driver(driver)
    assert machine.profile() == profile


def test_an_old_driver_means_cpu_and_a_message(machine: Machine) -> None:
    machine.has_nvidia_driver("470.256.02")
    assert machine.profile() == "linux-cpu"
    result = machine.ask()
    assert "470.256.02 is too old" in result.stderr


@pytest.mark.parametrize(
    ("environment", "profile"),
    [
        ({"BUILD_TYPE": "cpu"}, "linux-cpu"),
        ({"BUILD_TYPE": "cublas", "CUDA_MAJOR_VERSION": "12"}, "linux-cuda12"),
        ({"BUILD_TYPE": "cublas", "CUDA_MAJOR_VERSION": "13"}, "linux-cuda13"),
        ({"BUILD_TYPE": "l4t", "CUDA_MAJOR_VERSION": "12"}, "linux-cuda12"),
        ({"BUILD_TYPE": "l4t", "CUDA_MAJOR_VERSION": "13"}, "linux-cuda13"),
        ({"BUILD_TYPE": "cublas"}, "linux-cuda13"),
        ({"BUILD_TYPE": "cublas13"}, "linux-cuda13"),
        ({"BUILD_TYPE": ""}, "linux-cuda13"),
    ],
)
def test_build_type_overrides_the_driver(
    machine: Machine, environment: dict[str, str], profile: str
) -> None:
    machine.has_nvidia_driver("580.65.06")
    assert machine.profile(**environment) == profile


@pytest.mark.parametrize("build_type", ["", "mps", "metal"])
def test_apple_silicon_is_metal(machine: Machine, build_type: str) -> None:
    machine.is_a("Darwin", "arm64")
    machine.has("sw_vers", "echo 15.6.1")
    assert machine.profile(BUILD_TYPE=build_type) == "macos-metal"


@pytest.mark.parametrize(
    ("environment", "complaint"),
    [
        ({"BUILD_TYPE": "hipblas"}, "BUILD_TYPE=hipblas is not supported on Linux"),
        ({"BUILD_TYPE": "mps"}, "BUILD_TYPE=mps is not supported on Linux"),
        ({"BUILD_TYPE": "cublas", "CUDA_MAJOR_VERSION": "11"}, "CUDA_MAJOR_VERSION=11"),
    ],
)
def test_impossible_build_types_are_refused(
    machine: Machine, environment: dict[str, str], complaint: str
) -> None:
    assert complaint in machine.refusal(**environment)


@pytest.mark.skipif(has_own_gpu(), reason="this machine's own driver is found in /proc")
def test_cublas_without_a_driver_requires_the_version(machine: Machine) -> None:
    assert "needs CUDA_MAJOR_VERSION=12 or 13" in machine.refusal(BUILD_TYPE="cublas")


@pytest.mark.parametrize(
    ("system", "processor", "complaint"),
    [
        ("Darwin", "x86_64", "Intel Macs are not supported"),
        ("Linux", "armv7l", "Linux on armv7l is not supported"),
        ("Linux", "i686", "Linux on i686 is not supported"),
        ("MINGW64_NT-10.0", "x86_64", "Windows is not supported: use WSL2"),
        ("FreeBSD", "amd64", "FreeBSD is not supported"),
    ],
)
def test_other_platforms_are_refused(
    machine: Machine, system: str, processor: str, complaint: str
) -> None:
    machine.is_a(system, processor)
    machine.has("sysctl", "exit 1")
    assert complaint in machine.refusal()


def test_a_shell_under_rosetta_is_refused_with_a_hint(machine: Machine) -> None:
    machine.is_a("Darwin", "x86_64")
    machine.has("sysctl", "echo 1")
    assert "arch -arm64" in machine.refusal()


def test_an_old_macos_is_refused(machine: Machine) -> None:
    machine.is_a("Darwin", "arm64")
    machine.has("sw_vers", "echo 13.7")
    assert "macOS 13.7 is too old" in machine.refusal()


def test_an_old_or_missing_glibc_is_refused(machine: Machine) -> None:
    machine.has("getconf", 'echo "glibc 2.31"')
    assert "glibc 2.31 is too old" in machine.refusal()
    machine.has("getconf", "exit 1")
    assert "has no glibc" in machine.refusal()

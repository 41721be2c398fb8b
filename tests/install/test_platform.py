"""Which packages install.sh chooses, and its messages if there are none."""

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import pytest

from tests.install.shell import ROOT, clean_environment, shell, write_program

# Where install.sh looks for a driver and its devices.
PLACES = ("/proc/driver/nvidia", "/dev/nvidia", "/usr/lib/wsl/lib", "/etc/nv_tegra_release")


@dataclass(frozen=True)
class Gpu:
    name: str
    capability: str
    uuid: str


GTX = Gpu("NVIDIA GeForce GTX 1080 Ti", "6.1", "GPU-5a000000-0000-4000-8000-000000000001")
V100 = Gpu("Tesla V100-SXM2-16GB", "7.0", "GPU-5b000000-0000-4000-8000-000000000002")
T4 = Gpu("Tesla T4", "7.5", "GPU-c0000000-0000-4000-8000-000000000003")
H100 = Gpu("NVIDIA H100 80GB HBM3", "9.0", "GPU-c1000000-0000-4000-8000-000000000004")
BLACKWELL = Gpu("NVIDIA GB10", "12.1", "GPU-d0000000-0000-4000-8000-000000000005")


class Machine:
    """A machine as install.sh sees it: scripted programs at the front of PATH.

    It runs a copy of install.sh that looks for drivers and devices below `system`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "programs"
        self.system = folder / "system"
        self.script = folder / "install.sh"
        text = (ROOT / "install.sh").read_text()
        for place in PLACES:
            assert place in text
            text = re.sub(rf"(?<=[ :]){place}", f"{self.system}{place}", text)
        self.script.write_text(text)
        self.script.chmod(0o755)
        self.is_a("Linux", "x86_64")
        self.has("getconf", 'echo "glibc 2.39"')

    def has(self, program: str, script: str) -> None:
        write_program(self.folder / program, script)

    def has_file(self, place: str, text: str = "") -> None:
        path = Path(f"{self.system}{place}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def has_driver_in_proc(self, version: str) -> None:
        self.has_file(
            "/proc/driver/nvidia/version",
            f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {version}  Wed Oct 1 2026\n"
            "GCC version:  gcc version 12.2.0\n",
        )

    def is_a(self, system: str, processor: str) -> None:
        self.has("uname", f"case $1 in -s) echo {system} ;; -m) echo {processor} ;; esac")

    def has_gpus(
        self, *gpus: Gpu, driver: str = "580.65.06", knows_capability: bool = True
    ) -> None:
        """Let `nvidia-smi` answer queries for these GPUs."""
        self.has("nvidia-smi", smi_script(gpus, driver, knows_capability))

    def profile(self, **environment: str) -> str:
        result = self.ask(**environment)
        assert result.returncode == 0, result.stderr
        return result.stdout.strip()

    def profile_and_message(self, **environment: str) -> tuple[str, str]:
        result = self.ask(**environment)
        assert result.returncode == 0, result.stderr
        (line,) = result.stderr.splitlines()
        return result.stdout.strip(), line.removeprefix("install.sh: ")

    def refusal(self, **environment: str) -> str:
        result = self.ask(**environment)
        assert result.returncode == 1
        assert result.stdout == ""
        (line,) = result.stderr.splitlines()
        return line

    def ask(self, **environment: str) -> subprocess.CompletedProcess[str]:
        path = f"{self.folder}:{self.without_smi}"
        return shell(
            self.script,
            "--print-profile",
            environment=clean_environment(PATH=path, **environment),
        )

    @cached_property
    def without_smi(self) -> Path:
        """A folder with this machine's own programs, apart from a driver's."""
        folder = self.folder.with_name("own")
        folder.mkdir()
        for program in ("bash", "dirname", "readlink", "sed", "sort", "cat", "timeout", "tr"):
            (folder / program).symlink_to(str(shutil.which(program)))
        return folder


def smi_script(gpus: Sequence[Gpu], driver: str, knows_capability: bool) -> str:
    """nvidia-smi as a program: one line of CSV a GPU, with the fields of its --query-gpu."""
    lines = []
    for index, gpu in enumerate(gpus):
        values = {"index": str(index), "uuid": gpu.uuid, "driver_version": driver}
        values |= {"name": gpu.name} | ({"compute_cap": gpu.capability} if knows_capability else {})
        lines.append(values)
    return f"""exec {sys.executable} - "$@" <<'END'
import sys
fields = next(a.partition("=")[2] for a in sys.argv if a.startswith("--query-gpu=")).split(",")
for gpu in {lines!r}:
    if unknown := [field for field in fields if field not in gpu]:
        sys.exit(print(f'Field "{{unknown[0]}}" is not a valid field to query.\\n') or 2)
    print(", ".join(gpu[field] for field in fields))
END"""


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


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
    machine.has_gpus(H100, driver=driver)
    assert machine.profile() == profile


@pytest.mark.parametrize("knows_capability", [True, False])
def test_an_old_driver_means_cpu_and_a_message(machine: Machine, knows_capability: bool) -> None:
    machine.has_gpus(T4, driver="470.256.02", knows_capability=knows_capability)
    profile, message = machine.profile_and_message()
    assert profile == "linux-cpu"
    assert "470.256.02 is too old" in message


@pytest.mark.parametrize("gpu", [T4, H100, BLACKWELL])
def test_a_gpu_of_compute_capability_7_5_or_newer_is_used(machine: Machine, gpu: Gpu) -> None:
    machine.has_gpus(gpu)
    result = machine.ask()
    assert (result.stdout, result.stderr) == ("linux-cuda13\n", "")


def test_older_gpus_mean_cpu_and_a_message(machine: Machine) -> None:
    machine.has_gpus(V100, GTX, V100)
    assert machine.profile_and_message() == (
        "linux-cpu",
        (
            "MLX needs compute capability 7.5 or newer, and CUDA programs see only"
            " NVIDIA GeForce GTX 1080 Ti (compute capability 6.1),"
            " Tesla V100-SXM2-16GB (compute capability 7.0): installing for CPU"
        ),
    )


@pytest.mark.parametrize(
    "environment",
    [
        {"BUILD_TYPE": "cublas"},
        {"BUILD_TYPE": "cublas", "CUDA_MAJOR_VERSION": "12"},
        {"BUILD_TYPE": "cublas13"},
        {"BUILD_TYPE": "l4t12"},
    ],
)
def test_a_cuda_build_for_older_gpus_only_is_refused(
    machine: Machine, environment: dict[str, str]
) -> None:
    machine.has_gpus(GTX)
    refusal = machine.refusal(**environment)
    assert f"BUILD_TYPE={environment['BUILD_TYPE']} needs a GPU of compute capability" in refusal
    assert "NVIDIA GeForce GTX 1080 Ti (compute capability 6.1)" in refusal
    assert "use BUILD_TYPE=cpu" in refusal


def test_a_cuda_build_for_another_machine_ignores_the_gpus_of_this_one(machine: Machine) -> None:
    machine.has_gpus(GTX)
    elsewhere = {"CUDA_VISIBLE_DEVICES": "", "CUDA_MAJOR_VERSION": "12"}
    assert machine.profile(BUILD_TYPE="cublas", **elsewhere) == "linux-cuda12"


def test_a_machine_with_older_and_newer_gpus_is_told_which_to_use(machine: Machine) -> None:
    machine.has_gpus(V100, T4, GTX, H100)
    assert machine.profile_and_message() == (
        "linux-cuda13",
        (
            "MLX cannot use every GPU of this machine: start it with"
            f" CUDA_VISIBLE_DEVICES={T4.uuid},{H100.uuid}"
        ),
    )


@pytest.mark.parametrize(
    ("visible", "profile"),
    [
        (V100.uuid, "linux-cpu"),
        (T4.uuid, "linux-cuda13"),
        ("GPU-c0", "linux-cuda13"),
        (f"{V100.uuid},{H100.uuid}", "linux-cuda13"),
        ("MIG-GPU-c1000000-0000-4000-8000-000000000004/3/0", "linux-cuda13"),
        ("MIG-80000000-0000-4000-8000-000000000009", "linux-cuda13"),
        ("0", "linux-cpu"),
        ("1", "linux-cuda13"),
        ("0, 2", "linux-cpu"),
        ("0,3", "linux-cuda13"),
        ("2,3", "linux-cuda13"),
    ],
)
def test_visible_devices_choose_among_the_gpus(
    machine: Machine, visible: str, profile: str
) -> None:
    machine.has_gpus(V100, T4, GTX, H100)
    order = "PCI_BUS_ID"  # the one of nvidia-smi
    found = machine.profile(CUDA_VISIBLE_DEVICES=visible, CUDA_DEVICE_ORDER=order)
    assert found == profile


@pytest.mark.parametrize("visible", ["GPU-c0", f"{T4.uuid}, {H100.uuid}", "MIG-GPU-c1/3/0"])
def test_newer_gpus_chosen_by_name_need_no_message(machine: Machine, visible: str) -> None:
    machine.has_gpus(V100, T4, GTX, H100)
    assert machine.ask(CUDA_VISIBLE_DEVICES=visible).stderr == ""


def test_a_number_may_mean_another_gpu_to_cuda(machine: Machine) -> None:
    machine.has_gpus(V100, T4)
    _, message = machine.profile_and_message(CUDA_VISIBLE_DEVICES="1")
    assert f"start it with CUDA_VISIBLE_DEVICES={T4.uuid}" in message
    ordered = machine.ask(CUDA_VISIBLE_DEVICES="1", CUDA_DEVICE_ORDER="PCI_BUS_ID")
    assert ordered.stderr == ""


@pytest.mark.parametrize(
    "visible",
    ["", "-1", "-1,0", "7", "7,0", "GPU-", "GPU-c", "GPU-ff", "MIG-GPU-ff/1/0", "none", "*"],
)
def test_no_visible_device_means_cpu_and_a_message(machine: Machine, visible: str) -> None:
    machine.has_gpus(T4, H100)
    assert machine.profile_and_message(CUDA_VISIBLE_DEVICES=visible) == (
        "linux-cpu",
        f"CUDA_VISIBLE_DEVICES='{visible}' names no GPU of this machine: installing for CPU",
    )


def test_a_gpu_that_cannot_be_divided_has_no_mig_devices(machine: Machine) -> None:
    machine.has_gpus(T4)
    mig = "MIG-80000000-0000-4000-8000-000000000009"
    assert machine.profile(CUDA_VISIBLE_DEVICES=mig) == "linux-cpu"


def test_an_unknown_compute_capability_is_mentioned(machine: Machine) -> None:
    machine.has_gpus(T4, knows_capability=False)
    profile, message = machine.profile_and_message()
    assert profile == "linux-cuda13"
    assert "compute capability 7.5 or newer, which could not be checked" in message
    machine.has_gpus(replace(T4, capability="[N/A]"))
    assert machine.profile_and_message() == (profile, message)


@pytest.mark.parametrize(
    ("code", "answer"),
    [
        (6, "No devices were found"),
        (0, "No devices were found"),
        (9, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."),
        (18, "Failed to initialize NVML: Driver/library version mismatch"),
    ],
)
@pytest.mark.parametrize("in_proc", [True, False])
def test_a_driver_without_a_gpu_means_cpu_and_a_message(
    machine: Machine, code: int, answer: str, in_proc: bool
) -> None:
    machine.has("nvidia-smi", f'echo "{answer}"; exit {code}')
    if in_proc:
        machine.has_driver_in_proc("580.65.06")
    assert machine.profile_and_message() == (
        "linux-cpu",
        f"nvidia-smi finds no GPU (it says: {answer}): installing for CPU",
    )


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (r"printf '\0\377\033[31m\n'", "nvidia-smi finds no GPU (it says: [31m)"),
        ("kill -SEGV $$", "nvidia-smi finds no GPU (it says: nothing)"),
        ("echo 0, GPU-1, , 9.0, x", "nvidia-smi does not report the version of the driver"),
    ],
)
def test_an_answer_that_is_no_list_of_gpus_means_cpu_and_a_message(
    machine: Machine, script: str, message: str
) -> None:
    machine.has("nvidia-smi", script)
    assert machine.profile_and_message() == ("linux-cpu", f"{message}: installing for CPU")


def test_an_nvidia_smi_that_hangs_means_cpu_and_a_message(machine: Machine) -> None:
    """As if the time were up: the program ends like one that `timeout` has ended."""
    machine.has("timeout", "exit 124")
    machine.has_gpus(H100)
    profile, message = machine.profile_and_message()
    assert (profile, message) == (
        "linux-cpu",
        "nvidia-smi finds no GPU (it says: nothing within 20 seconds): installing for CPU",
    )


def test_a_container_without_the_host_s_gpu_is_cpu(machine: Machine) -> None:
    machine.has_driver_in_proc("580.65.06")
    profile, message = machine.profile_and_message()
    assert profile == "linux-cpu"
    assert "NVIDIA driver 580.65.06 is loaded, but there is no GPU" in message
    assert machine.profile(BUILD_TYPE="cublas") == "linux-cuda13"


def test_a_container_without_nvidia_smi_uses_the_gpu(machine: Machine) -> None:
    machine.has_driver_in_proc("550.54.14")
    machine.has_file("/dev/nvidia0")
    machine.has_file("/dev/nvidiactl")
    profile, message = machine.profile_and_message()
    assert profile == "linux-cuda12"
    assert "could not be checked" in message
    assert machine.profile(CUDA_VISIBLE_DEVICES="GPU-c0") == "linux-cuda12"
    assert machine.profile(CUDA_VISIBLE_DEVICES="1") == "linux-cpu"


def test_wsl_has_nvidia_smi_in_its_own_folder(machine: Machine) -> None:
    program = Path(f"{machine.system}/usr/lib/wsl/lib/nvidia-smi")
    write_program(program, smi_script([T4], "581.29", knows_capability=True))
    assert machine.profile() == "linux-cuda13"


def test_a_jetson_without_a_driver_for_mlx_is_cpu(machine: Machine) -> None:
    machine.is_a("Linux", "aarch64")
    machine.has_file("/etc/nv_tegra_release", "# R35 (release), REVISION: 4.1\n")
    profile, message = machine.profile_and_message()
    assert profile == "linux-cpu"
    assert "JetPack 7" in message
    orin = Gpu("Orin (nvgpu)", "8.7", "GPU-e0000000-0000-4000-8000-000000000006")
    machine.has_gpus(orin, driver="540.4.0")
    profile, message = machine.profile_and_message()
    assert profile == "linux-cpu"
    assert "540.4.0 is too old" in message
    assert "JetPack 7" in message


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
    machine.has_gpus(H100)
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


@pytest.mark.skipif(any(Path("/lib").glob("ld-musl-*")), reason="this machine has musl")
def test_a_linux_without_getconf_is_not_refused(machine: Machine) -> None:
    (machine.folder / "getconf").unlink()
    assert machine.profile() == "linux-cpu"

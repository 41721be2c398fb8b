"""The backend respects limits of the system and does not fail at them."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import psutil
import pytest

from backend.engine.errors import REFUSED
from tests.acceptance import confined
from tests.acceptance.backend import ROOT, TINY_TEXT, WAIT, Backend, chat, text_answer
from tests.acceptance.confined import OF_CHILDREN
from tests.log_text import untimed
from tests.rpc.client import failure_of
from wire import backend_pb2 as pb

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="prlimit and cgroups are Linux's")
MIB = 1 << 20
LONG = chat("word " * 500_000, Tokens=2)
# The limit of processes does not apply to root, so the user changes. Python may be in root's home
# folder.
_RIGHTS = "caps=+dac_read_search,+dac_override"
USER = ("setpriv", "--reuid=54321", "--clear-groups", f"--inh-{_RIGHTS}", f"--ambient-{_RIGHTS}")
NOT_PRELOADED = {"LD_PRELOAD": "", "LD_LIBRARY_PATH": ""}  # with OpenBLAS, setpriv would fail
needs_user = pytest.mark.skipif(
    os.getuid() != 0 or shutil.which("setpriv") is None,
    reason="only root with setpriv can change the user",
)
GROUPS = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))


@pytest.mark.parametrize(("soft", "hard"), [(1024, 1024), (512, 8192), (8192, 8192)])
def test_a_load_does_not_change_the_limit_of_open_files(soft: int, hard: int) -> None:
    # If this process has imported mlx-lm, its own hard limit is 4096 and may not be raised.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = min(soft, most), min(hard, most)
    with started("--files", str(soft), str(hard)) as backend:
        backend.load()
        assert backend.process().rlimit(psutil.RLIMIT_NOFILE) == (soft, hard)
        assert text_answer(backend, chat("Hello!", Tokens=4))


def test_a_start_in_the_odd_state_that_a_host_leaves_succeeds(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    with started("--leftovers", str(gone)) as backend:
        backend.load()
        status = Path(f"/proc/{backend.child.pid}/status").read_text()
        blocked, ignored = (int(x, 16) for x in re.findall(r"Sig(?:Blk|Ign):\s*(\w+)", status))
        assert not blocked
        assert not any(ignored >> (number - 1) & 1 for number in OF_CHILDREN)
        assert text_answer(backend, chat("Hello!", Tokens=4, Grammar='root ::= "yes"')) == "yes"


@pytest.mark.parametrize("most", [0, 10])
def test_a_start_that_may_write_no_file_ends_with_the_name_of_the_limit(most: int) -> None:
    assert last_line("--file-size", str(most)) == (
        'level=error event=exit cause="the limit on the size of files is too small for this'
        ' backend: raise it (`ulimit -f unlimited`)"'
    )


@needs_user
@pytest.mark.parametrize("most", [2, 8, 20, 22, 25])
def test_a_start_without_its_threads_ends_with_a_sentence(most: int) -> None:
    """With each number of threads the start fails at another point."""
    assert last_line("--processes", str(most), "--", *USER) == (
        f'level=error event=exit cause="{REFUSED}"'
    )


@needs_user
def test_a_grammar_under_a_limit_of_processes_is_refused_and_ends_nothing() -> None:
    with started("--processes", "1000", "--", *USER, **NOT_PRELOADED) as backend:
        backend.load()
        limit = ["prlimit", "--pid", str(backend.child.pid), "--nproc=1:1"]
        subprocess.run([*USER, *limit], env=os.environ | NOT_PRELOADED, check=True)
        asked = chat("Hello!", Tokens=4, Grammar='root ::= "yes"')
        for _ in range(2):
            failure = failure_of(lambda: backend.stub.Predict(asked, timeout=WAIT))
            assert failure.code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert failure.sentence == REFUSED
        assert text_answer(backend, chat("Hello!", Tokens=4))


def last_line(*limits: str) -> str:
    """The last line of a backend that ends at its start; it must be the only one."""
    command = [sys.executable, confined.__file__, *limits, "--"]
    command += [str(ROOT / "run.sh"), "--addr", "127.0.0.1:0"]
    ended = subprocess.run(
        command,
        env=os.environ | NOT_PRELOADED,
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT,
    )
    assert ended.returncode == 1
    (line,) = untimed(ended.stderr).splitlines()
    return line


@contextmanager
def started(*limits: str, **environ: str) -> Iterator[Backend]:
    backend = Backend(limits, **environ)
    try:
        yield backend
    finally:
        assert backend.close() == 0


@contextmanager
def group(limit: int) -> Iterator[Path]:
    """A control group with that much memory."""
    for top in GROUPS:
        folder = top / f"faults-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            names = ("memory.limit_in_bytes", "memory.max")
            for bound in (folder / name for name in names if (folder / name).exists()):
                bound.write_text(str(limit))
                yield folder
                return
        finally:
            folder.rmdir()
    pytest.skip("no control group can be made here")


@pytest.fixture
def endless(tmp_path: Path) -> Path:
    """A model whose context is larger than memory."""
    model = Path(shutil.copytree(TINY_TEXT, tmp_path / "model"))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 10**7}))
    return model


def test_a_full_control_group_refuses_a_request_and_does_not_end_the_process(endless: Path) -> None:
    with group(700 * MIB) as folder, started("--group", str(folder)) as backend:
        backend.load(endless, ContextSize=10_000_000)
        failure = failure_of(lambda: backend.stub.Predict(LONG, timeout=300))
        assert failure.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "MiB" in failure.sentence
        assert text_answer(backend, chat("Hello!", Tokens=4))
        backend.stub.Health(pb.HealthMessage())


def test_a_limited_address_space_refuses_a_load_and_does_not_end_the_process(endless: Path) -> None:
    with started("--address-space", str(3 << 30)) as backend:
        backend.load(endless, ContextSize=10_000_000)
        failure = failure_of(lambda: backend.stub.Predict(LONG, timeout=300))
        assert failure.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert text_answer(backend, chat("Hello!", Tokens=4))

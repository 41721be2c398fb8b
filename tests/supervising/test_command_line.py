"""The ranks that a command line and an environment ask for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from backend.engine.ranks.rank_info import (
    TOKEN,
    Misuse,
    RankInfo,
    Transport,
    hosts_of,
    info_in,
    transport_environ,
)
from backend.supervising.command_line import plan_of

SECRET = {TOKEN: "s3cret"}


@pytest.fixture
def hostfile(tmp_path: Path) -> str:
    path = tmp_path / "hosts.json"
    path.write_text(json.dumps(["10.0.0.1:5000", ["10.0.0.2:5001", "10.0.1.2:5001"]]))
    return str(path)


def test_an_ordinary_command_line_starts_no_ranks() -> None:
    assert plan_of(["--addr", "127.0.0.1:0"], {}) is None
    assert plan_of(["--addr", "127.0.0.1:0", "--ranks", "1"], {}) is None


def test_local_ranks() -> None:
    plan = plan_of(["--addr", "127.0.0.1:0", "--ranks=3", "--rank-loss", "exit"], {})
    assert plan is not None
    assert (plan.count, plan.rest, plan.restarts) == (3, ("--addr", "127.0.0.1:0"), False)


def test_rank_0_of_a_hostfile_listens_at_its_address(hostfile: str) -> None:
    plan = plan_of(["--addr", "127.0.0.1:0", "--hostfile", hostfile], SECRET)
    assert plan is not None
    names, ports = ("10.0.0.1", "10.0.0.2"), (5000, 5001)
    assert plan.info == RankInfo(0, 2, ("10.0.0.1", 6000), names, ports=ports)


def test_a_worker_as_localai_starts_it(hostfile: str) -> None:
    arguments = ["--backend", "ring", "--hostfile", hostfile, "--rank", "1", "--worker"]
    plan = plan_of(arguments, SECRET)
    assert plan is not None
    assert plan.info is not None
    assert (plan.info.rank, plan.info.control) == (1, ("10.0.0.1", 6000))


def test_the_environment_of_mlx_launch(hostfile: str) -> None:
    plan = plan_of(["--addr", "h:1"], SECRET | {"MLX_HOSTFILE": hostfile, "MLX_RANK": "1"})
    assert plan is not None
    assert plan.info is not None
    assert plan.info.rank == 1


def test_a_rank_survives_the_environment_of_its_process() -> None:
    environ: dict[str, str] = {}
    info = RankInfo(1, 2, ("h", 1), ("a", "b"), timeout=3, ports=(2, 3))
    info.write(environ)
    assert RankInfo.read(environ) == info
    assert RankInfo.read({}) is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--worker"], "needs --hostfile"),
        (["--worker", "--hostfile", "FILE"], "needs --rank"),
        (["--hostfile", "FILE", "--rank", "2"], "ranks 0 to 1"),
        (["--hostfile", "FILE", "--backend", "tcp"], "must be one of ring"),
        (["--hostfile", "FILE", "--control", "nowhere"], "not HOST:PORT"),
        (["--hostfile", "FILE", "--control", "a..b:1"], "not HOST:PORT"),
        (["--hostfile", "/none/such.json"], "cannot be read"),
        (["--ranks", "two"], "must be a number"),
        (["--ranks"], "needs a value"),
        (["--ranks", "2", "--worker"], "on this machine"),
        (["--ranks", "2", "--rank-loss", "hope"], "restart or exit"),
        (["--coordinator", "h:1"], "MLX_JACCL_COORDINATOR"),
    ],
)
def test_mistakes_are_reported(arguments: list[str], words: str, hostfile: str) -> None:
    with pytest.raises(Misuse, match=words):
        plan_of([hostfile if one == "FILE" else one for one in arguments], SECRET)


def test_ranks_of_several_machines_need_a_secret(hostfile: str) -> None:
    with pytest.raises(Misuse, match=TOKEN):
        plan_of(["--hostfile", hostfile], {})


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '["10.0.0.1:1"]', '["a:1", "b"]', '[["a:1"], []]', '["a..b:1", "c:2"]']
)
def test_invalid_hostfiles_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "hosts.json"
    path.write_text(text)
    with pytest.raises(Misuse, match="hostfile"):
        hosts_of(str(path))


@pytest.mark.parametrize(
    ("arguments", "environ", "words"),
    [
        (["--rank", "1"], {}, "--rank is for ranks of a hostfile"),
        (["--backend", "jaccl"], {}, "--backend is for ranks of a hostfile"),
        (["--ranks", "2", "--backend", "jaccl"], {}, "--backend is for ranks of a hostfile"),
        (["--control", "127.0.0.1:7"], {}, "--control is for ranks of a hostfile"),
        (["--rank-loss", "exit"], {}, "--rank-loss has no effect"),
        ([], {"MLX_RANK": "1"}, "MLX_RANK is 1, but no hostfile"),
    ],
)
def test_nothing_is_ignored(arguments: list[str], environ: dict[str, str], words: str) -> None:
    with pytest.raises(Misuse, match=words):
        plan_of(["--addr", "127.0.0.1:0", *arguments], environ)


@pytest.mark.parametrize("port", ["64536", "\N{SUPERSCRIPT TWO}"])
def test_an_invalid_port_is_refused(port: str, tmp_path: Path) -> None:
    """64536 leaves no room for the control port, a thousand above it."""
    path = tmp_path / "hosts.json"
    path.write_text(json.dumps([f"127.0.0.1:{port}", "127.0.0.1:5000"]))
    with pytest.raises(Misuse, match=r"above 65535|not HOST:PORT"):
        plan_of(["--hostfile", str(path)], {})


DEVICES = {"MLX_IBV_DEVICES": "/devices.json"}


@pytest.mark.parametrize(
    ("transport", "given", "found"),
    [
        ("ring", {}, {}),
        ("jaccl", DEVICES, {"MLX_JACCL_COORDINATOR": "10.0.0.1:5000"}),
        (
            "jaccl",
            DEVICES | {"MLX_JACCL_COORDINATOR": "10.0.0.9:7"},
            {"MLX_JACCL_COORDINATOR": "10.0.0.9:7"},
        ),
        (
            "nccl",
            {},
            {"NCCL_HOST_IP": "10.0.0.1", "NCCL_PORT": "5000", "MLX_WORLD_SIZE": "2"},
        ),
        ("mpi", {}, {}),
    ],
)
def test_mlx_finds_the_other_ranks(
    transport: str, given: dict[str, str], found: dict[str, str], hostfile: str
) -> None:
    environ = SECRET | given
    info = info_in(hostfile, 1, transport, "", environ)
    ring = {"MLX_HOSTFILE": hostfile, "MLX_RANK": "1"}
    assert transport_environ(info, hostfile, environ) == ring | found


def test_jaccl_without_its_devices_is_refused(hostfile: str) -> None:
    with pytest.raises(Misuse, match="MLX_IBV_DEVICES"):
        info_in(hostfile, 1, "jaccl", "", SECRET)


def test_the_transport_reaches_mlx(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX gets the backend's name, and is asked to fail rather than form a group of one process."""
    import mlx.core as mx

    from backend.engine.errors import EngineFailed
    from backend.engine.ranks.sharding import join_group

    asked: list[dict[str, object]] = []

    class Alone:
        def rank(self) -> int:
            return 0

        def size(self) -> int:
            return 1

    def init(**options: object) -> Alone:
        asked.append(options)
        return Alone()

    monkeypatch.setattr(mx.distributed, "init", init)
    for transport in ("ring", "jaccl", "nccl", "mpi"):
        with pytest.raises(EngineFailed, match="rank 0 of 1, but it was started as rank 1 of 2"):
            join_group(RankInfo(1, 2, ("h", 1), ("a", "b"), transport))
    assert [one["backend"] for one in asked] == ["ring", "jaccl", "nccl", "mpi"]
    assert all(one["strict"] for one in asked)


@pytest.mark.parametrize("transport", ["jaccl", "nccl", "mpi"])
def test_a_transport_that_this_mlx_lacks_is_named(transport: Transport) -> None:
    import mlx.core as mx

    from backend.engine.errors import EngineFailed
    from backend.engine.ranks.sharding import join_group

    if mx.distributed.is_available(transport):
        pytest.skip(f"this mlx has {transport}")
    with pytest.raises(EngineFailed, match=f"cannot form the {transport} group"):
        join_group(RankInfo(1, 2, ("h", 1), ("a", "b"), transport))


@pytest.mark.parametrize(
    ("hosts", "control", "words"),
    [
        (["127.0.0.1:5000", "127.0.0.1:6000"], "", "--control"),
        (["127.0.0.1:5000", "127.0.0.1:5001"], "127.0.0.1:5001", "--control"),
        (["127.0.0.1:5000", "127.0.0.1:5001", "127.0.0.1:5000"], "", "127.0.0.1:5000 twice"),
        (["10.0.0.1:5000", "10.0.0.2:5000"], "0.0.0.0:6000", "all interfaces"),
        (["10.0.0.1:5000", "10.0.0.2:5000"], "[::]:6000", "all interfaces"),
        (["0.0.0.0:5000", "10.0.0.2:5000"], "", "all interfaces"),
        (["10.0.0.1:5000", "[fd00::2]:5000"], "", "rank 1 has the address fd00::2, .* IPv4 only"),
    ],
)
def test_addresses_at_which_ranks_cannot_listen_are_refused(
    tmp_path: Path, hosts: list[str], control: str, words: str
) -> None:
    path = tmp_path / "hosts.json"
    path.write_text(json.dumps(hosts))
    with pytest.raises(Misuse, match=words):
        info_in(str(path), 1, "ring", control, SECRET)

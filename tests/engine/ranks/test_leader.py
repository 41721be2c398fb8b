"""Rank 0's record of the other ranks, without MLX: which count as joined, and which as lost."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from backend.engine.engine import Engine
from backend.engine.errors import (
    Cancelled,
    EngineError,
    InvalidRequest,
    ModelRejected,
    RankLost,
    ShuttingDown,
)
from backend.engine.load_request import LoadRequest
from backend.engine.loading.stages import Stages, at_once
from backend.engine.ranks import leader as leader_module
from backend.engine.ranks import link, sharding
from backend.engine.ranks.fingerprint import versions
from backend.engine.ranks.leader import Leader
from backend.engine.ranks.link import Link, LinkLost, connect
from backend.engine.ranks.rank_info import RankInfo
from backend.engine.ranks.wire import Join, LoadReport, LoadShard, Signal
from backend.supervising.supervisor import free_ports

WAIT = 240.0  # seconds, on a busy machine too


@dataclass
class Ranks:
    """Rank 0 of a group of two, without a real rank 1. causes: of the group's end, as reported."""

    leader: Leader
    causes: list[str] = field(default_factory=list)

    def fail(self, cause: str) -> None:
        self.causes.append(cause)
        with self.leader._changed:
            self.leader._changed.notify_all()

    def joined(self, **software: str) -> Link:
        """Rank 1's end of its connection. software: versions that differ from this process's."""
        info = self.leader.info
        join = Join(1, info.size, versions() | software)
        other = connect(info.control, "secret", join, info.timeout)
        self.until(lambda: 1 in self.leader._followers)
        return other

    def form(self, other: Link) -> None:
        """Form the group with rank 1."""
        forming = threading.Thread(
            target=lambda: at_once(self.leader.form(WAIT, threading.Event())), daemon=True
        )
        forming.start()
        assert other.receive() == Signal.JOIN
        forming.join(WAIT)
        assert not forming.is_alive()

    def until(self, holds: Callable[[], object]) -> None:
        with self.leader._changed:
            assert self.leader._changed.wait_for(holds, WAIT)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    """Ranks whose group of MLX forms immediately."""
    monkeypatch.setattr(sharding, "join_group", lambda _: None)
    info = RankInfo(0, 2, ("127.0.0.1", free_ports(1)[0]), ("a", "b"), join_timeout=WAIT)
    found = Ranks(Leader(info, "secret"))
    found.leader.open(found.fail)
    yield found
    found.leader.close()


def test_a_load_that_is_cancelled_before_the_group_is_formed_does_not_affect_the_next(
    ranks: Ranks,
) -> None:
    other = ranks.joined()
    cancelled = threading.Event()
    forming = ranks.leader.form(WAIT, cancelled)
    assert next(forming) == "files"
    other.close()
    ranks.until(lambda: not ranks.leader._followers)
    cancelled.set()
    with pytest.raises(Cancelled):
        next(forming)
    other = ranks.joined()
    ranks.form(other)
    other.close()


@pytest.mark.parametrize("package", ["mlx-backend", "mlx", "mlx-lm"])
def test_a_rank_of_another_version_is_named_before_it_gets_any_order(
    package: str, ranks: Ranks
) -> None:
    """Such a rank might not understand the order to load, and its MLX might not join the group."""
    other = ranks.joined(**{package: "0.0"})
    named = rf"rank 1 \(b\) has {package} 0\.0 and rank 0 has {versions()[package]}; install"
    with pytest.raises(ModelRejected, match=named):
        at_once(ranks.leader.form(WAIT, threading.Event()))
    other.close()
    ranks.until(lambda: not ranks.leader._followers)
    other = ranks.joined()
    ranks.form(other)
    other.close()


def test_a_load_that_times_out_says_why_a_rank_was_refused(ranks: Ranks) -> None:
    info = ranks.leader.info = replace(ranks.leader.info, join_timeout=0.0)
    with pytest.raises(LinkLost):
        connect(info.control, "other", Join(1, info.size, {}), info.timeout)
    ranks.until(lambda: ranks.leader._refused)
    with pytest.raises(ShuttingDown) as waited:
        at_once(ranks.leader.form(WAIT, threading.Event()))
    assert str(waited.value).endswith(
        "the same token; rank 0 refused a connection from 127.0.0.1, which has a different token"
    )


@pytest.mark.parametrize(
    ("hosts", "transport", "words"),
    [
        (["a:5000", "b:5001"], "", ""),
        (["a:5000", "b:5001"], "ring", ""),
        (["a:5000", "b:5001"], "jaccl", "distributed_backend is jaccl, .+ use ring: leave"),
        (["a:5000", "b:5001", "c:5002"], "", "hostfile names 3 ranks, which are not the 2 of"),
        (["a:5000", "b:6001"], "", "hostfile names 2 ranks, which are not the 2 of"),
        (["a:5000"], "", "the hostfile .+ names 1 ranks: it must name two or more"),
    ],
)
def test_a_later_load_may_not_name_other_ranks(
    hosts: list[str], transport: str, words: str, tmp_path: Path
) -> None:
    """The other ranks would not be used, because MLX forms one group per process."""
    hostfile = tmp_path / "hosts.json"
    hostfile.write_text(json.dumps(hosts))
    leader = Leader(RankInfo(0, 2, ("a", 6000), ("a", "b"), ports=(5000, 5001)), "secret")
    if not words:
        leader.require_named(str(hostfile), transport)
        return
    with pytest.raises(InvalidRequest, match=words):
        leader.require_named(str(hostfile), transport)


def test_a_load_may_not_name_ranks_where_the_process_was_started_with_its_own(
    tmp_path: Path,
) -> None:
    hostfile = tmp_path / "hosts.json"
    hostfile.write_text('["127.0.0.1:5000", "127.0.0.1:5001"]')
    leader = Leader(RankInfo(0, 2, ("127.0.0.1", 6000), ("127.0.0.1", "127.0.0.1")), "secret")
    leader.require_named("", "")
    with pytest.raises(InvalidRequest, match="are not the 2 of this process"):
        leader.require_named(str(hostfile), "")


async def test_a_slow_name_server_delays_nothing_but_its_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the load is cancelled, the next one can listen on the same port."""
    hostfile = tmp_path / "hosts.json"
    port = free_ports(1)[0] - 1000  # the ranks connect to the port plus 1000
    hostfile.write_text(json.dumps([f"localhost:{port}", "localhost:1"]))
    asked, answers = threading.Event(), threading.Event()
    resolve = socket.getaddrinfo

    def resolved(host: str, *others: Any, **named: Any) -> Any:
        assert threading.current_thread() is not threading.main_thread()
        asked.set()
        assert answers.wait(WAIT)
        return resolve(host, *others, **named)

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    engine = Engine()
    engine.start()
    try:
        request = LoadRequest("none", "", settings={"hostfile": str(hostfile)})
        first = asyncio.create_task(engine.load(request))
        await asyncio.to_thread(asked.wait, WAIT)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        answers.set()
        while True:  # until the port is free again
            with pytest.raises(EngineError) as refusal:
                await engine.load(request)
            if "cannot listen" not in str(refusal.value):
                break
        assert engine._leader is not None
    finally:
        await engine.stop(10)


def test_a_rank_that_leaves_just_before_the_group_is_formed_is_waited_for(ranks: Ranks) -> None:
    forming = ranks.leader.form(WAIT, threading.Event())
    other = ranks.joined()
    assert [next(forming), next(forming)] == ["files", "engine"]
    other.close()
    ranks.until(lambda: not ranks.leader._followers)
    assert next(forming) == "files"
    other = ranks.joined()
    assert [next(forming), next(forming)] == ["engine", "engine"]
    assert other.receive() == Signal.JOIN
    other.close()
    assert not ranks.causes or "rank 1" in ranks.causes[0]


def test_the_late_end_of_an_earlier_connection_is_not_the_end_of_its_successor(
    ranks: Ranks,
) -> None:
    first = ranks.joined()
    earlier = ranks.leader._followers[1]
    first.close()
    ranks.until(lambda: not ranks.leader._followers)
    second = ranks.joined()
    ranks.leader._lose(1, earlier, "has been silent")
    assert 1 in ranks.leader._followers
    second.close()


def test_a_message_that_breaks_its_reader_loses_the_rank(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the thread ended without a report, the rank would seem to be alive."""

    def broken(data: bytes) -> object:
        raise MemoryError

    other = ranks.joined()
    monkeypatch.setattr(link, "decode", broken)
    other.send(Signal.CLEAR)
    ranks.until(lambda: not ranks.leader._followers)
    other.close()


def test_a_rank_that_takes_long_to_load_is_named(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank may have a slow disk. The load goes on for as long as its caller waits."""
    said: list[str] = []
    cancelled = threading.Event()

    def warning(text: str, *arguments: str) -> None:
        said.append(text % arguments)
        cancelled.set()

    other = ranks.joined()
    ranks.form(other)
    member = ranks.leader.begin(LoadRequest("m"), 7, WAIT, cancelled)
    monkeypatch.setattr(leader_module, "_REPORT_SECONDS", 0.0)
    monkeypatch.setattr(leader_module._log, "warning", warning)
    with pytest.raises(Cancelled):
        member.agree({})
    assert said == ["the load waits for rank 1 (b)"]
    other.close()


def test_a_refusal_while_rank_0_computes_ends_the_group(ranks: Ranks) -> None:
    """Rank 0 waits in a collective for the rank that has left the load."""
    other = ranks.joined()
    ranks.form(other)
    ranks.leader.begin(LoadRequest("m"), 7, 2.0, threading.Event())
    assert isinstance(other.receive(), LoadShard)
    other.send(LoadReport(7, refusal="its disk is on fire"))
    ranks.until(lambda: ranks.causes)
    assert ranks.causes == [
        "rank 1 (b) refused the load while rank 0 computed: its disk is on fire"
    ]
    with pytest.raises(LinkLost):
        other.receive()


def test_the_cause_of_a_loss_is_not_that_its_connection_was_closed_for_it(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = ranks.joined()
    ranks.form(other)
    follower = ranks.leader._followers[1]
    close = follower.link.close

    def close_and_let_the_reader_see_it() -> None:
        monkeypatch.setattr(follower.link, "close", close)
        close()
        ranks.until(lambda: ranks.leader.broken)

    monkeypatch.setattr(follower.link, "close", close_and_let_the_reader_see_it)
    ranks.leader._lose(1, follower, "has refused the load")
    assert ranks.causes == ["rank 1 (b) has refused the load"]
    other.close()


def test_a_refusal_ends_the_load_between_two_stages(ranks: Ranks) -> None:
    other = ranks.joined()
    ranks.form(other)
    ranks.leader.begin(LoadRequest("m"), 7, WAIT, threading.Event())
    ended: list[str] = []

    def stages() -> Stages[int]:
        try:
            while True:
                yield "files"
        except Exception as fault:
            ended.append(str(fault))
            yield "engine"
            raise

    load = ranks.leader.stages_until_refused(stages())
    assert [next(load), next(load)] == ["files", "files"]
    other.send(LoadReport(7, refusal="its disk is on fire"))
    ranks.until(lambda: ranks.leader._refusal)
    assert next(load) == "engine"
    with pytest.raises(ModelRejected, match="disk is on fire"):
        next(load)
    assert ended == ["rank 1 (b): its disk is on fire"]
    other.close()


def test_a_load_that_fails_through_a_lost_rank_names_it(ranks: Ranks) -> None:
    """MLX's error sounds as if the model were at fault."""
    other = ranks.joined()
    ranks.form(other)
    ranks.leader.begin(LoadRequest("m"), 7, WAIT, threading.Event())
    other.close()
    raised = ranks.leader.ended(7, ModelRejected("it failed on its first token"))
    assert isinstance(raised, RankLost)
    assert "rank 1 (b)" in str(raised)

"""When the supervisor kills a rank that a signal has stopped."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest

from backend.rpc.monitor import is_stopped
from backend.supervising import supervisor
from tests.polling import until

OUTGOING = Path("/proc/sys/net/ipv4/ip_local_port_range")


@pytest.mark.skipif(not OUTGOING.exists(), reason="only Linux states the ports of connections")
def test_no_outgoing_connection_takes_a_port_of_the_ring() -> None:
    lowest, highest = map(int, OUTGOING.read_text().split())
    ports = supervisor.free_ports(60)
    assert len(set(ports)) == 60
    assert not any(lowest <= port <= highest for port in ports)


@pytest.mark.parametrize(("seconds", "ends"), [(30.0, False), (46.0, True)])
def test_only_a_rank_that_is_stopped_for_too_long_is_killed(seconds: float, ends: bool) -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        try:
            process.send_signal(signal.SIGSTOP)
            until(lambda: is_stopped(process.pid))
            since = {process.pid: time.monotonic() - seconds}
            supervisor._kill_stopped([process], since)
            if ends:
                assert process.wait() == -signal.SIGKILL
            assert (process.poll() is not None) == ends
        finally:
            process.kill()

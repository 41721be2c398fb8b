"""Ranks whose neighbours do not appear while MLX forms its group."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from backend.engine.ranks.link import Link, accept, listen
from backend.engine.ranks.rank_info import TOKEN, RankInfo
from backend.engine.ranks.wire import Signal
from backend.supervising.supervisor import free_ports

ROOT = Path(__file__).parents[3]
WAIT = 240.0  # seconds, on a busy machine too


def test_a_rank_that_waits_for_the_group_ends_when_nobody_comes(tmp_path: Path) -> None:
    """MLX waits for its neighbour for ever, and holds the interpreter's lock meanwhile."""
    ports = free_ports(3)
    hostfile = tmp_path / "hosts.json"
    hostfile.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ports[1:]]))
    with listen(("127.0.0.1", ports[0])) as listener:
        listener.settimeout(WAIT)
        environ = {**os.environ, TOKEN: "secret", "MLX_HOSTFILE": str(hostfile), "MLX_RANK": "1"}
        RankInfo(1, 2, ("127.0.0.1", ports[0]), ("a", "b"), timeout=2.0).write(environ)
        rank = subprocess.Popen([sys.executable, "-m", "backend"], env=environ, cwd=ROOT)
        try:
            connection, _ = listener.accept()
            _, link = accept(connection, "secret", 2, 60.0)
            link.send(Signal.JOIN)
            threading.Thread(target=_hold, args=(link,), daemon=True).start()
            assert rank.wait(WAIT) != 0
        finally:
            rank.kill()
            rank.wait()


_JOINS = """
import signal, threading
from backend.engine.ranks.sharding import join_group
from backend.engine.ranks.rank_info import RankInfo
signal.signal(signal.SIGALRM, signal.SIG_DFL)
engine = threading.Thread(target=join_group, args=(RankInfo.read(),))
engine.start()
engine.join()
"""


def test_rank_0_ends_when_nobody_joins_the_group(tmp_path: Path) -> None:
    """Its engine thread is not the main thread, whose signal handlers cannot run meanwhile."""
    ports = free_ports(2)
    hostfile = tmp_path / "hosts.json"
    hostfile.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ports]))
    environ = {**os.environ, "MLX_HOSTFILE": str(hostfile), "MLX_RANK": "0"}
    RankInfo(0, 2, ("127.0.0.1", 1), ("a", "b"), timeout=2.0).write(environ)
    ended = subprocess.run(
        [sys.executable, "-c", _JOINS], env=environ, cwd=ROOT, timeout=WAIT, check=False
    )
    assert ended.returncode == -signal.SIGALRM


def _hold(link: Link) -> None:
    """Keep the connection alive, as a rank 0 that forms the group does."""
    threading.Event().wait(WAIT)
    link.close()

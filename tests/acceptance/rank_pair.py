"""Rank 0 and a worker, each under a supervisor of its own, with relays in place of the network."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from backend.engine.ranks.rank_info import TOKEN
from backend.supervising.supervisor import free_ports
from tests.acceptance.backend import ROOT, WAIT, Backend


class Relay:
    """Forwards connections to a port, until they are cut.

    The sockets stay open then, as they do at both ends of a cable that somebody has pulled. New
    connections are forwarded.
    """

    def __init__(self, port: int) -> None:
        self._target = port
        self._cut = threading.Event()  # ends the existing connections
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        cut, self._cut = self._cut, threading.Event()
        cut.set()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                threading.Thread(target=self._forward, args=(near,), daemon=True).start()

    def _forward(self, near: socket.socket) -> None:
        """Join a caller with the port, as soon as somebody listens there."""
        far = None
        while far is None and self._listener.fileno() >= 0:
            with contextlib.suppress(OSError):
                far = socket.create_connection(("127.0.0.1", self._target))
            time.sleep(0.02)  # at most so many attempts per second
        if far is None:
            near.close()
            return
        cut = self._cut
        threading.Thread(target=_pump, args=(far, near, cut), daemon=True).start()
        _pump(near, far, cut)


def _pump(source: socket.socket, target: socket.socket, cut: threading.Event) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            if not cut.is_set():
                target.sendall(data)
    if not cut.is_set():
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


class Pair:
    """Two ranks. backend: rank 0's side; `worker`: the supervisor of rank 1."""

    def __init__(self, folder: Path) -> None:
        ring = free_ports(2)
        (control,) = free_ports(1)
        self._relays = [Relay(port) for port in (*ring, control)]
        to_0, to_1, to_control = self._relays
        hostfiles = [
            self._write(folder / "0.json", [ring[0], to_1.port]),
            self._write(folder / "1.json", [to_0.port, ring[1]]),
        ]
        arguments = ["--hostfile", hostfiles[0], "--control", f"127.0.0.1:{control}"]
        self.backend = Backend((), arguments, **{TOKEN: "secret"})
        arguments = ["--hostfile", hostfiles[1], "--control", f"127.0.0.1:{to_control.port}"]
        self.worker = subprocess.Popen(
            [ROOT / "run.sh", "--worker", "--rank", "1", *arguments],
            env=os.environ | {TOKEN: "secret"},
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    @staticmethod
    def _write(path: Path, ports: Sequence[int]) -> str:
        path.write_text(json.dumps([f"127.0.0.1:{port}" for port in ports]))
        return str(path)

    def cut(self) -> None:
        """Stop forwarding on all existing connections."""
        for relay in self._relays:
            relay.cut()

    def close(self) -> None:
        self.worker.terminate()
        self.backend.close()
        try:
            self.worker.wait(WAIT)
        finally:
            self.worker.kill()
            self.worker.wait()
        for relay in self._relays:
            relay.close()

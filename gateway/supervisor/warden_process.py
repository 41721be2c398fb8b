"""Starts one backend and ends it with the gateway: `python -I -S warden_process.py FOLDER COMMAND`.

It uses only the standard library, and has one thread and no gRPC, so it can fork. Backends of other
programs do not watch their parent. Standard input is a socket to the gateway. On it

- the warden sends a line of JSON: the backend's pid, which is also its process group, or a message
  that says why there is none;
- every byte from the gateway is the number of a signal for the process group;
- the warden's last line is the exit code, negative for a signal.

If the gateway closes the socket or ends, the process group gets SIGTERM, and SIGKILL later.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

# The gateway blocks them while it starts this process, until `main` can handle them.
BLOCKED = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
_GRACE = 5.0  # seconds between SIGTERM and SIGKILL


def signal_group(group: int, number: int) -> None:
    """Signal a process group, if it still exists."""
    # macOS refuses if the group has only zombies.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def main(folder: str, command: Sequence[str]) -> None:
    os.setpgid(0, 0)
    gateway = socket.socket(fileno=0)
    woken = _accept_signals()
    try:
        process = subprocess.Popen(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            # The group can be signalled as a whole, and gets no signals meant for the gateway. A
            # session of its own would be scheduled as a group on Linux (autogroup): beside busy
            # ones, a thread that seldom runs waits 0.2 s for a processor.
            process_group=0,
        )
    except OSError as problem:
        place = f"{problem.filename}: " if problem.filename else ""
        _send(gateway, f"{place}{problem.strerror}")
        return
    os.chdir("/")
    _send(gateway, process.pid)
    _watch(process, gateway, woken)
    signal_group(process.pid, signal.SIGKILL)  # its children must not outlive it
    _send(gateway, process.returncode)


def _accept_signals() -> socket.socket:
    """Return a socket that can be read after a signal.

    A signal to all processes of a service is for the gateway, which drains. Handlers are used
    because, unlike ignored signals, they are not inherited.
    """
    woken, waker = socket.socketpair()
    for end in (woken, waker):
        end.setblocking(False)
    signal.set_wakeup_fd(waker.detach(), warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, *BLOCKED):
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED)
    return woken


def _watch(process: subprocess.Popen[bytes], gateway: socket.socket, woken: socket.socket) -> None:
    """Pass on the gateway's signals until the process has ended."""
    sources, kill_at = [woken, gateway], math.inf
    while process.poll() is None:
        patience = None if kill_at == math.inf else max(0.0, kill_at - time.monotonic())
        ready = select.select(sources, [], [], patience)[0]
        if woken in ready:
            woken.recv(1 << 16)
        if gateway in ready:
            numbers = _received(gateway)
            for number in numbers or (signal.SIGTERM,):
                signal_group(process.pid, number)
            if not numbers:
                sources.remove(gateway)
                kill_at = time.monotonic() + _GRACE
        if time.monotonic() >= kill_at:
            kill_at = math.inf
            signal_group(process.pid, signal.SIGKILL)


def _received(gateway: socket.socket) -> bytes:
    """Return the received bytes; none if the other end has closed."""
    try:
        return gateway.recv(1 << 16)
    except ConnectionError:
        return b""


def _send(gateway: socket.socket, answer: int | str) -> None:
    with contextlib.suppress(ConnectionError):
        gateway.sendall(json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])

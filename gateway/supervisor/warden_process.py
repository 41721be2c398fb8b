"""The warden: starts the backends, reports their exits, and ends them if the gateway has ended.

It runs as a process of its own, on the standard library alone and in one thread, because a process
that uses gRPC cannot fork safely: gRPC's fork handlers crash the child before it becomes another
program. As the parent it knows every backend from the start, so that none outlives a gateway that
is killed; backends other than ours may not watch their parent.

Standard input is a socket to the gateway. Each byte on it brings two file descriptors: a socket,
the link of one backend, and the stderr of that backend. On the link

- the gateway sends one line of JSON: the command, its folder and its environment;
- the warden answers with a line of JSON: the pid, which is also the process group, or a sentence
  that says why there is none;
- every later byte from the gateway is the number of a signal for the process group;
- the warden's last line is the exit code, negative for a signal.

Where the gateway closes a link or ends, the process group gets SIGTERM, and SIGKILL later.
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
import time

# The gateway blocks them while it starts this process, until `_main` can handle them.
BLOCKED = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
_GRACE = 5.0  # seconds between SIGTERM and SIGKILL


class _Backend:
    def __init__(self, link: socket.socket, process: subprocess.Popen[bytes]) -> None:
        self.link = link
        self.left = False  # closed by the gateway
        self.kill_at = math.inf
        self._process = process

    def signal(self, numbers: bytes) -> None:
        for number in numbers:
            signal_group(self._process.pid, number)

    def leave(self) -> None:
        if not self.left:
            self.left = True
            self.kill_at = time.monotonic() + _GRACE
            self.signal(bytes((signal.SIGTERM,)))

    def ended(self) -> bool:
        """Whether the process has ended; then notify the gateway and kill the process group."""
        if time.monotonic() >= self.kill_at:
            self.kill_at = math.inf
            self.signal(bytes((signal.SIGKILL,)))
        code = self._process.poll()
        if code is None:
            return False
        self.signal(bytes((signal.SIGKILL,)))  # its children must not outlive it
        _tell(self.link, code)
        self.link.close()
        return True


def signal_group(group: int, number: int) -> None:
    """Signal a process group, if it still exists."""
    # macOS refuses if the group has only zombies.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _received(link: socket.socket) -> bytes:
    """The received bytes; none if the other end has closed."""
    try:
        return link.recv(1 << 16)
    except ConnectionError:
        return b""


def _tell(link: socket.socket, answer: int | str) -> None:
    with contextlib.suppress(ConnectionError):
        link.sendall(json.dumps(answer).encode() + b"\n")


def _start(link: socket.socket, stderr: int) -> _Backend | None:
    """Start the backend that a new link describes; None if there is none."""
    request_line = b""
    while b"\n" not in request_line:
        more = _received(link)
        if not more:
            return None
        request_line += more
    request, _, signals = request_line.partition(b"\n")
    command, folder, environ = json.loads(request)
    try:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            # The group can be signalled as a whole, and gets no signals meant for the gateway. A
            # session of its own would be scheduled as a group on Linux (autogroup): beside busy
            # ones, a thread that seldom runs waits 0.2 s for a processor.
            process_group=0,
        )
    except OSError as problem:
        place = f"{problem.filename}: " if problem.filename else ""
        _tell(link, f"{place}{problem.strerror}")
        return None
    except ValueError as problem:  # for instance a null byte
        _tell(link, str(problem))
        return None
    _tell(link, process.pid)
    backend = _Backend(link, process)
    backend.signal(signals)
    return backend


def _main() -> None:
    os.setpgid(0, 0)
    os.chdir("/")
    woken, waker = socket.socketpair()
    for end in (woken, waker):
        end.setblocking(False)
    signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
    # A signal to all processes of a service is for the gateway, which drains. Handlers are used
    # because, unlike ignored signals, they are not inherited.
    for number in (signal.SIGCHLD, *BLOCKED):
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED)
    gateway = [socket.socket(fileno=0)]
    backends: list[_Backend] = []
    while gateway or backends:
        links = [backend.link for backend in backends if not backend.left]
        kill_at = min((backend.kill_at for backend in backends), default=math.inf)
        patience = None if kill_at == math.inf else max(0.0, kill_at - time.monotonic())
        ready = select.select([woken, *gateway, *links], [], [], patience)[0]
        if woken in ready:
            woken.recv(1 << 16)
        for backend in backends:
            if backend.link in ready:
                numbers = _received(backend.link)
                backend.signal(numbers)
                if not numbers:
                    backend.leave()
        if gateway and gateway[0] in ready:
            byte, files, _, _ = socket.recv_fds(gateway[0], 1, 2)
            if not byte:
                gateway.clear()
                for backend in backends:
                    backend.leave()
            elif len(files) == 2:  # the system drops descriptors that exceed this process's limit
                link = socket.socket(fileno=files[0])
                started = _start(link, files[1])
                os.close(files[1])
                if started:
                    backends.append(started)
                else:
                    link.close()
        backends = [backend for backend in backends if not backend.ended()]


if __name__ == "__main__":
    _main()

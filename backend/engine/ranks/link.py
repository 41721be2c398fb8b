"""Connects rank 0 and another rank by TCP: handshake, messages and heartbeats.

Plans are not sent by MLX's collectives, because a rank that waits in a collective receives nothing
else, and a collective has no time-out. They are not sent by a gRPC stream either: a message arrives
twice as late there, because Python passes it through more threads. Both sides send heartbeats, even
while their engine threads are busy.

Before any other message, both sides prove that they have the same token, by the HMAC of
`multiprocessing.connection`. Messages are not encrypted.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import answer_challenge, deliver_challenge
from typing import Any

from backend.engine.ranks.wire import Join, Message, Signal, WireError, decode, encode

_LENGTH = struct.Struct(">I")  # in front of each message
_MOST_BYTES = 256 << 20  # a prompt of a million tokens takes 8 MiB
_MOST_JOIN_BYTES = 1 << 16
_BEAT_SECONDS = 0.4  # between two heartbeats; the shortest time-out is five times as long
_HANDSHAKE_SECONDS = 5.0
_MOST_HANDSHAKES = 64  # at the same time, because anyone who can reach the address may connect
_PAUSE_SECONDS = 0.5  # after a connection could not be accepted
_CHECK_SECONDS = 0.25  # between two checks whether the other side has been silent for too long


class LinkLost(Exception):
    """The other side has ended, is silent, or is not a rank.

    `str()` is a clause that follows the name of the other side, such as "has ended".
    """


class Refused(LinkLost):
    """One side has refused the other in the handshake."""


class Link:
    """A connection. `send` may be called from any thread.

    timeout: seconds of silence after which `receive` raises LinkLost; may change during a call.
    """

    def __init__(self, connection: socket.socket, timeout: float) -> None:
        self.timeout = timeout
        self._incoming = self._outgoing = connection
        self._outgoing = connection.dup()  # has another time-out
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(_CHECK_SECONDS)
        self._unread = bytearray()
        self._sending = threading.Lock()
        self._closed = threading.Event()

    def __del__(self) -> None:
        self._incoming.close()
        self._outgoing.close()

    def send(self, message: Message) -> None:
        """Send a message. Raises LinkLost."""
        self.send_bytes(encode(message))

    def receive(self) -> Message:
        """Return the next message that is not a heartbeat. Raises LinkLost."""
        while True:
            try:
                message = decode(self.recv_bytes())
            except WireError as fault:
                raise LinkLost(f"sent a message that cannot be read: {fault}") from None
            if message is not Signal.BEAT:
                return message

    def send_bytes(self, data: bytes) -> None:
        """Send a message in the form that `encode` returns. Raises LinkLost."""
        try:
            with self._sending:
                self._outgoing.settimeout(self.timeout)
                self._outgoing.sendall(_LENGTH.pack(len(data)) + data)
        except TimeoutError:
            raise LinkLost(f"has received nothing for {self.timeout:g} s") from None
        except OSError:
            raise LinkLost("has closed the connection") from None

    def recv_bytes(self, most: int = _MOST_BYTES) -> bytes:
        """Return what `send_bytes` has sent. Raises LinkLost."""
        (length,) = _LENGTH.unpack(self._next(_LENGTH.size))
        if length > most:
            raise LinkLost("sent something that is not a message")
        return self._next(length)

    def _next(self, count: int) -> bytes:
        """Return the next bytes. Raises LinkLost after `timeout` seconds of waiting.

        Time is not measured by the clock, which also advances while this process is stopped or MLX
        blocks its threads, when bytes may arrive without being read.
        """
        silent = 0.0
        while len(self._unread) < count:
            try:
                arrived = self._incoming.recv(1 << 16)
            except TimeoutError:
                silent += _CHECK_SECONDS
                if silent >= self.timeout:
                    raise LinkLost(f"has been silent for {self.timeout:g} s") from None
                continue
            except OSError:
                arrived = b""
            if not arrived:
                raise LinkLost("has ended, or the connection is cut")
            self._unread += arrived
            silent = 0.0
        found = bytes(self._unread[:count])
        del self._unread[:count]
        return found

    def close(self) -> None:
        """End the connection, which wakes the threads that wait for it."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._incoming.shutdown(socket.SHUT_RDWR)

    def beat(self) -> None:
        """Send heartbeats until the connection ends."""
        with contextlib.suppress(LinkLost):  # `receive` raises LinkLost too, with the cause
            while not self._closed.wait(_BEAT_SECONDS):
                self.send(Signal.BEAT)


def accept(
    connection: socket.socket,
    token: str,
    size: int,
    timeout: float,
    joined: Callable[[int], bool] = lambda _: False,
) -> tuple[Join, Link]:
    """Do rank 0's side of the handshake; return the other rank's message and link.

    Raises LinkLost.
    """
    with _handshake(connection, timeout) as link:
        channel: Any = link
        deliver_challenge(channel, token.encode())
        answer_challenge(channel, token.encode())
        try:
            join = decode(link.recv_bytes(_MOST_JOIN_BYTES))
        except WireError:
            join = Signal.STOP
        if not isinstance(join, Join):
            refusal = "is a rank of another version of this backend"
        elif join.size != size or not 0 < join.rank < size:
            refusal = f"says that it is rank {join.rank} of {join.size}, but there are {size} ranks"
        elif joined(join.rank):
            refusal = f"says that it is rank {join.rank}, which has joined already"
        else:
            link.send_bytes(b"")
            return join, link
        link.send_bytes(refusal.encode())
        raise Refused(refusal)


def connect(address: tuple[str, int], token: str, join: Join, timeout: float) -> Link:
    """Do another rank's side of the handshake. Raises LinkLost, and OSError if nobody listens."""
    connection = socket.create_connection(address, _HANDSHAKE_SECONDS)
    with _handshake(connection, timeout) as link:
        channel: Any = link
        answer_challenge(channel, token.encode())
        deliver_challenge(channel, token.encode())
        link.send_bytes(encode(join))
        if refusal := link.recv_bytes(_MOST_JOIN_BYTES).decode():
            raise Refused(f"refused this rank, which {refusal}")
        return link


@contextlib.contextmanager
def _handshake(connection: socket.socket, timeout: float) -> Iterator[Link]:
    """Yield a link for a handshake in limited time; start its heartbeats, or close it.

    Raises LinkLost, whatever the other side may send.
    """
    try:
        link = Link(connection, timeout)
    except OSError:  # the other side has closed the connection already
        raise Refused("ended the handshake") from None
    deadline = after(_HANDSHAKE_SECONDS, link.close)
    try:
        yield link
        threading.Thread(target=link.beat, name="rank-beat", daemon=True).start()
        return
    except AuthenticationError:
        refusal = Refused("has a different token")
    except Refused as refused:
        refusal = refused
    except (LinkLost, ValueError, AssertionError):  # the last two for other protocols
        refusal = Refused("ended the handshake")
    finally:
        deadline.cancel()
    link.close()
    raise refusal


def listen(address: tuple[str, int]) -> socket.socket:
    """Return a socket that listens on an address. Raises OSError.

    A host name may have several addresses; the first one that belongs to this machine is used.
    """
    fault = OSError("the name has no address")
    for family, _, _, _, found in socket.getaddrinfo(*address, type=socket.SOCK_STREAM):
        try:
            return socket.create_server(found[:2], family=family)
        except OSError as refused:
            fault = refused
    raise fault


def accepting(listener: socket.socket, shake: Callable[[socket.socket, str], None]) -> None:
    """Accept connections on a new thread until the listener is closed.

    If too many handshakes are running, a new connection is closed, and the rank connects again.

    shake: does the handshake. It is called with a connection and its host, on a thread for each
        connection.
    """
    free = threading.BoundedSemaphore(_MOST_HANDSHAKES)

    def limited(connection: socket.socket, host: str) -> None:
        try:
            shake(connection, host)
        finally:
            free.release()

    def run() -> None:
        while True:
            try:
                connection, peer = listener.accept()
            except OSError:
                if listener.fileno() < 0:
                    return
                time.sleep(_PAUSE_SECONDS)  # no file descriptor is left, for example
                continue
            if not free.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(
                target=limited, args=(connection, str(peer[0])), name="rank-joins", daemon=True
            ).start()

    threading.Thread(target=run, name="rank-listener", daemon=True).start()


def after(seconds: float, act: Callable[[], None]) -> threading.Timer:
    """Call `act` on another thread after a delay; the timer does not delay the process's end."""
    timer = threading.Timer(seconds, act)
    timer.daemon = True
    timer.start()
    return timer

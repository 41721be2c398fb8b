"""Connects rank 0 and another rank by TCP: handshake, messages and heartbeats.

Plans are not sent by MLX's collectives, because a rank that waits in a collective receives nothing
else, and a collective has no time-out. On the TCP connection, both sides send several heartbeats
per time-out, even while their engine threads are busy.

Before any other message, both sides prove that they have the same token, by the HMAC of
`multiprocessing.connection`. Messages are not encrypted.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

from backend.engine.ranks.wire import Join, Message, Signal, WireError, decode, encode

_MOST_BYTES = 256 << 20  # a prompt of a million tokens takes 8 MiB
_MOST_JOIN_BYTES = 1 << 16
_BEATS = 5  # heartbeats per time-out
_HANDSHAKE_SECONDS = 5.0
_MOST_HANDSHAKES = 64  # at the same time, because anyone who can reach the address may connect
_PAUSE_SECONDS = 0.5  # after a connection could not be accepted
_CHECK_SECONDS = 0.25  # between two checks whether the other side has been silent for too long


class LinkLost(Exception):
    """The other side has ended, is silent, or is not a rank.

    `str()` is a clause that follows the name of the other side, such as "has ended".
    """


class Link:
    """A connection after its handshake. `send` may be called from any thread."""

    def __init__(self, connection: Connection, timeout: float) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._closed = False
        self._beat_now = threading.Event()
        self.timeout = timeout
        with _socket_of(connection) as own:
            own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=self._beat, name="rank-beat", daemon=True).start()

    @property
    def timeout(self) -> float:
        """Seconds of silence after which `receive` raises LinkLost; may change during a call."""
        return self._timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self._timeout = seconds
        limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        with _socket_of(self._connection) as own:  # limits the parts of a single message
            own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        self._beat_now.set()  # with the new time-out, the next heartbeat may be due earlier

    def send(self, message: Message) -> None:
        """Send a message. Raises LinkLost."""
        self.send_bytes(encode(message))

    def send_bytes(self, data: bytes) -> None:
        """Send a message in the form that `encode` returns. Raises LinkLost."""
        try:
            with self._sending:
                self._connection.send_bytes(data)
        except BlockingIOError:
            raise LinkLost(f"has received nothing for {self._timeout:g} s") from None
        except OSError:
            raise LinkLost("has closed the connection") from None

    def receive(self) -> Message:
        """Return the next message that is not a heartbeat. Raises LinkLost."""
        while True:
            try:
                self._wait()
                message = decode(self._connection.recv_bytes(_MOST_BYTES))
            except (TimeoutError, BlockingIOError):
                raise LinkLost(f"has been silent for {self._timeout:g} s") from None
            except (EOFError, OSError):
                raise LinkLost("has ended, or the connection is cut") from None
            except WireError as fault:
                raise LinkLost(f"sent a message that cannot be read: {fault}") from None
            if message is not Signal.BEAT:
                return message

    def close(self) -> None:
        """End the connection, which wakes the thread that reads it."""
        self._closed = True
        self._beat_now.set()
        _shut(self._connection)

    def _wait(self) -> None:
        """Wait until bytes arrive. Raises TimeoutError after `timeout` seconds of waiting.

        Time is not measured by the clock, which also advances while this process is stopped or MLX
        blocks its threads, when bytes may arrive without being read.
        """
        silent = 0.0
        while not self._connection.poll(_CHECK_SECONDS):
            silent += _CHECK_SECONDS
            if silent >= self._timeout:
                raise TimeoutError

    def _beat(self) -> None:
        while not self._closed:
            self._beat_now.wait(self._timeout / _BEATS)
            self._beat_now.clear()
            try:
                self.send(Signal.BEAT)
            except LinkLost:
                return  # `receive` raises LinkLost too, with the cause


def accept(
    connection: socket.socket,
    token: str,
    size: int,
    timeout: float,
    joined: Callable[[int], bool] = lambda _: False,
) -> tuple[Join, Link]:
    """Do rank 0's side of the handshake; return the other rank's message and link.

    Raises LinkLost.

    size: number of ranks.
    timeout: of the link.
    joined: returns whether the rank with a number has already joined.
    """
    with _handshake(connection) as channel:
        deliver_challenge(channel, token.encode())
        answer_challenge(channel, token.encode())
        try:
            join = decode(channel.recv_bytes(_MOST_JOIN_BYTES))
        except WireError:
            join = Signal.STOP
        if not isinstance(join, Join):
            refusal = "is a rank of another version of this backend"
        elif join.size != size or not 0 < join.rank < size:
            refusal = f"says that it is rank {join.rank} of {join.size}, but there are {size} ranks"
        elif joined(join.rank):
            refusal = f"says that it is rank {join.rank}, which has joined already"
        else:
            channel.send_bytes(b"")
            return join, Link(channel, timeout)
        channel.send_bytes(refusal.encode())
        raise LinkLost(refusal)


def connect(address: tuple[str, int], token: str, join: Join, timeout: float) -> Link:
    """Do another rank's side of the handshake. Raises LinkLost, and OSError if nobody listens."""
    connection = socket.create_connection(address, _HANDSHAKE_SECONDS)
    with _handshake(connection) as channel:
        answer_challenge(channel, token.encode())
        deliver_challenge(channel, token.encode())
        channel.send_bytes(encode(join))
        if refusal := channel.recv_bytes(_MOST_JOIN_BYTES).decode():
            raise LinkLost(f"refused this rank, which {refusal}")
        return Link(channel, timeout)


@contextlib.contextmanager
def _handshake(connection: socket.socket) -> Iterator[Connection]:
    """Limit the time of a handshake, and close the connection if the handshake fails.

    Raises LinkLost, whatever the other side may send.
    """
    connection.setblocking(True)
    channel = Connection(connection.detach())
    deadline = after(_HANDSHAKE_SECONDS, lambda: _shut(channel))
    try:
        yield channel
        return
    except AuthenticationError:
        reason = "has a different token"
    except LinkLost as lost:
        reason = str(lost)
    except (OSError, EOFError, ValueError, AssertionError):  # the last two for other protocols
        reason = "ended the handshake"
    finally:
        deadline.cancel()
    channel.close()
    raise LinkLost(reason)


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


def _socket_of(connection: Connection) -> socket.socket:
    return socket.socket(fileno=os.dup(connection.fileno()))


def _shut(connection: Connection) -> None:
    """End a connection, and wake the threads that wait for it."""
    with contextlib.suppress(OSError), _socket_of(connection) as own:
        own.shutdown(socket.SHUT_RDWR)

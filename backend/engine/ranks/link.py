"""The connection between rank 0 and another rank: frames, the handshake, and heartbeats.

Plans are not sent by MLX's collectives, because a rank that waits in a collective receives nothing
else, and a collective has no time-out. They are sent on a TCP connection, on which both sides send
several heartbeats per time-out, whatever their MLX threads are doing.

Before any other message, both sides prove that they know the same token (HMAC-SHA-256 over both
nonces). Later messages are not encrypted.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable

from backend.engine.ranks.wire import VERSION, Message, Signal, WireError, decode, encode

_MAGIC = b"MLXRANKS"
_NONCE = 32
_MOST_BYTES = 256 << 20  # a prompt of a million tokens takes 8 MiB
_BEATS = 5  # heartbeats per time-out
_HANDSHAKE_SECONDS = 5.0
_MOST_HANDSHAKES = 64  # at the same time, because anyone who can reach the address may connect
_PAUSE_SECONDS = 0.5  # pause after a connection that could not be accepted
_CHECK_SECONDS = 0.25  # between two checks whether the other side has been silent for too long
_HELLO = struct.Struct("!8sH32s")  # magic, version, nonce
_CLAIM = struct.Struct("!8sHII32s32s")  # magic, version, rank, size, nonce, proof
_LENGTH = struct.Struct("!I")


class LinkLost(Exception):
    """The other side has ended, is silent, or is not a rank. The error's text is a clause."""


class Link:
    """A connection after its handshake. `send` may be called from any thread."""

    def __init__(self, connection: socket.socket, timeout: float) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._arrivals = select.poll()
        self._arrivals.register(connection, select.POLLIN)
        self._sending = threading.Lock()
        self._closed = False
        self._beat_now = threading.Event()
        self.timeout = timeout
        self._beats = threading.Thread(target=self._beat, name="rank-beat", daemon=True)
        self._beats.start()

    @property
    def timeout(self) -> float:
        """Seconds of silence after which `receive` raises LinkLost, even in a call that waits."""
        return self._timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self._timeout = seconds
        self._connection.settimeout(seconds)
        self._beat_now.set()  # with the new time-out, the next heartbeat may be due earlier

    def send(self, message: Message) -> None:
        """Send a message. Raises LinkLost."""
        self.send_frame(frame_of(message))

    def send_frame(self, frame: bytes) -> None:
        """Send a frame made by `frame_of`. Raises LinkLost."""
        try:
            with self._sending:
                self._connection.sendall(frame)
        except TimeoutError:
            raise LinkLost(f"has received nothing for {self._timeout:g} s") from None
        except OSError:
            raise LinkLost("has closed the connection") from None

    def receive(self) -> Message:
        """Return the next message that is not a heartbeat. Raises LinkLost."""
        while True:
            (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
            if length > _MOST_BYTES:
                raise LinkLost(f"sent a frame of {length} bytes, which is not a message")
            try:
                message = decode(self._exactly(length))
            except WireError as fault:
                raise LinkLost(f"sent a message that cannot be read: {fault}") from None
            if message is not Signal.BEAT:
                return message

    def close(self) -> None:
        self._closed = True
        self._beat_now.set()
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _exactly(self, count: int) -> bytes:
        try:
            return _exactly(self._connection, count, self._wait)
        except TimeoutError:
            raise LinkLost(f"has been silent for {self._timeout:g} s") from None
        except OSError:
            raise LinkLost("has ended, or the connection is cut") from None

    def _wait(self) -> None:
        """Wait for bytes. Raises TimeoutError.

        The time-out counts only the time spent waiting. The clock also advances while this process
        is stopped or MLX keeps its threads from running, and bytes may have arrived meanwhile.
        """
        silent = 0.0
        while not self._arrivals.poll(_CHECK_SECONDS * 1000):
            silent += _CHECK_SECONDS
            if silent >= self._timeout:
                raise TimeoutError

    def _beat(self) -> None:
        beat = frame_of(Signal.BEAT)
        while not self._closed:
            self._beat_now.wait(self._timeout / _BEATS)
            self._beat_now.clear()
            try:
                self.send_frame(beat)
            except LinkLost:
                return  # `receive` raises the cause


def frame_of(message: Message) -> bytes:
    data = encode(message)
    return _LENGTH.pack(len(data)) + data


def accept(
    connection: socket.socket,
    token: str,
    size: int,
    timeout: float,
    taken: Callable[[int], bool] = lambda _: False,
) -> tuple[int, Link]:
    """Do rank 0's side of the handshake; return the other rank and the link. Raises LinkLost.

    taken: whether the rank with this number has already joined.
    """
    wait = _deadline(connection)
    try:
        own = secrets.token_bytes(_NONCE)
        connection.sendall(_HELLO.pack(_MAGIC, VERSION, own))
        claim = _exactly(connection, _CLAIM.size, wait)
        magic, version, rank, ranks, other, proof = _CLAIM.unpack(claim)
        if magic != _MAGIC:
            raise LinkLost("is not a rank of this backend")
        if version != VERSION:
            raise LinkLost(f"speaks version {version} of the protocol, and rank 0 {VERSION}")
        if not hmac.compare_digest(proof, _proof(token, b"follower", own, other, rank, ranks)):
            raise LinkLost("has a different token")
        if ranks != size or not 0 < rank < size:
            raise LinkLost(f"says that it is rank {rank} of {ranks}, but there are {size} ranks")
        if taken(rank):
            raise LinkLost(f"says that it is rank {rank}, which has joined already")
        connection.sendall(_proof(token, b"leader", own, other, rank, ranks))
        return rank, Link(connection, timeout)
    except OSError:
        raise LinkLost("ended the handshake") from None


def connect(address: tuple[str, int], token: str, rank: int, size: int, timeout: float) -> Link:
    """Do another rank's side of the handshake. Raises LinkLost, and OSError if nobody listens."""
    connection = socket.create_connection(address, _HANDSHAKE_SECONDS)
    wait = _deadline(connection)
    try:
        magic, version, other = _HELLO.unpack(_exactly(connection, _HELLO.size, wait))
        if magic != _MAGIC:
            raise LinkLost("is not rank 0 of this backend")
        own = secrets.token_bytes(_NONCE)
        proof = _proof(token, b"follower", other, own, rank, size)
        connection.sendall(_CLAIM.pack(_MAGIC, VERSION, rank, size, own, proof))
        if version != VERSION:
            raise LinkLost(f"speaks version {version} of the protocol, and this rank {VERSION}")
        try:
            answer = _exactly(connection, hashlib.sha256().digest_size, wait)
        except OSError:
            raise LinkLost("refused this rank; its log says why") from None
        if not hmac.compare_digest(answer, _proof(token, b"leader", other, own, rank, size)):
            raise LinkLost("has a different token")
        return Link(connection, timeout)
    except BaseException:
        connection.close()
        raise


def listen(address: tuple[str, int]) -> socket.socket:
    """Return a socket that listens on an address. Raises OSError.

    If the address has a name, the socket listens on the name's first address of this machine.
    """
    fault = OSError("the name has no address")
    for family, _, _, _, place in socket.getaddrinfo(*address, type=socket.SOCK_STREAM):
        try:
            return socket.create_server(place[:2], family=family)
        except OSError as refused:
            fault = refused
    raise fault


def accepting(listener: socket.socket, take: Callable[[socket.socket, str], None]) -> None:
    """Accept connections on a thread until the listener is closed.

    A connection above the limit of handshakes is closed immediately, and ranks connect again.

    take: does the handshake of a connection; called on a separate thread, with the connection and
        its host.
    """
    free = threading.BoundedSemaphore(_MOST_HANDSHAKES)

    def shake(connection: socket.socket, host: str) -> None:
        try:
            take(connection, host)
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
                target=shake, args=(connection, str(peer[0])), name="rank-joins", daemon=True
            ).start()

    threading.Thread(target=run, name="rank-listener", daemon=True).start()


def after(seconds: float, act: Callable[[], None]) -> None:
    """Call `act` on a thread after a delay, unless the process ends before."""
    timer = threading.Timer(seconds, act)
    timer.daemon = True
    timer.start()


def _proof(token: str, who: bytes, first: bytes, second: bytes, rank: int, size: int) -> bytes:
    text = b"|".join((_MAGIC, who, first, second, struct.pack("!HII", VERSION, rank, size)))
    return hmac.new(token.encode(), text, hashlib.sha256).digest()


def _deadline(connection: socket.socket) -> Callable[[], None]:
    """Limit a handshake's time; return a function to call before each part is received."""
    until = time.monotonic() + _HANDSHAKE_SECONDS
    connection.settimeout(_HANDSHAKE_SECONDS)
    return lambda: connection.settimeout(max(until - time.monotonic(), 1e-3))


def _exactly(connection: socket.socket, count: int, wait: Callable[[], None]) -> bytes:
    """Receive exactly `count` bytes.

    wait: called before each part.
    """
    parts = bytearray()
    while len(parts) < count:
        wait()
        part = connection.recv(min(count - len(parts), 1 << 20))
        if not part:
            raise ConnectionResetError
        parts += part
    return bytes(parts)

"""The connection of two ranks: who may connect, and how the loss of the other side is noticed."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backend.engine.ranks import link
from backend.engine.ranks.link import Link, LinkLost, accept, accepting, connect, listen
from backend.engine.ranks.wire import Join, Plain, Signal, encode
from tests.long import examples
from tests.polling import until

WAIT = 240.0  # seconds, on a busy machine too
LONG = 60.0


@dataclass
class Listening:
    """Rank 0's side of one handshake. outcome: the link, or the refusal."""

    token: str = "secret"
    timeout: float = LONG
    outcome: list[tuple[Join, Link] | LinkLost] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    @property
    def address(self) -> tuple[str, int]:
        return ("127.0.0.1", self.socket.getsockname()[1])

    def _accept(self) -> None:
        connection, _ = self.socket.accept()
        try:
            self.outcome.append(accept(connection, self.token, 3, self.timeout))
        except LinkLost as refusal:
            self.outcome.append(refusal)

    def done(self) -> tuple[Join, Link] | LinkLost:
        self._thread.join(WAIT)
        self.socket.close()
        return self.outcome[0]


@pytest.fixture
def rare_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "_BEAT_SECONDS", WAIT)


@pytest.fixture
def pair() -> Iterator[tuple[Link, Link]]:
    listening = Listening()
    other = connect(listening.address, "secret", Join(2, 3, {}), LONG)
    done = listening.done()
    assert not isinstance(done, LinkLost)
    join, own = done
    assert join == Join(2, 3, {})
    yield own, other
    own.close()
    other.close()


def test_messages_pass_in_order_and_heartbeats_are_not_among_them(pair: tuple[Link, Link]) -> None:
    own, other = pair
    for message in (Signal.BEAT, Signal.OPEN, Signal.BEAT, Signal.CLEAR):
        own.send(message)
    assert [other.receive(), other.receive()] == [Signal.OPEN, Signal.CLEAR]


@settings(
    max_examples=examples(30),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    st.lists(st.lists(st.integers(0, 1 << 20), max_size=40), min_size=1, max_size=6),
    st.lists(st.integers(1, 64), min_size=1),
)
def test_messages_arrive_whole_in_whatever_pieces(
    pair: tuple[Link, Link], prompts: list[list[int]], sizes: list[int]
) -> None:
    own, other = pair
    messages = [Plain(tuple(tokens)) for tokens in prompts]
    encoded = list(map(encode, messages))
    left = b"".join(link._LENGTH.pack(len(data)) + data for data in encoded)
    size = itertools.cycle(sizes)
    with own._sending:  # no heartbeat among the pieces
        while left:
            count = next(size)
            own._outgoing.sendall(left[:count])
            left = left[count:]
    assert [other.receive() for _ in messages] == messages


def test_a_closed_connection_is_noticed(pair: tuple[Link, Link]) -> None:
    own, other = pair
    other.close()
    with pytest.raises(LinkLost, match="has ended"):
        own.receive()


@pytest.mark.usefixtures("rare_heartbeats")
def test_silence_is_noticed(pair: tuple[Link, Link]) -> None:
    own, _ = pair
    own.timeout = 0.2
    with pytest.raises(LinkLost, match=r"silent for 0\.2 s"):
        own.receive()


@pytest.mark.usefixtures("rare_heartbeats")
def test_a_shorter_timeout_applies_to_a_silence_that_has_begun(pair: tuple[Link, Link]) -> None:
    """This happens if a rank is stopped and then a model with a shorter time-out is loaded."""
    own, _ = pair
    losses: list[str] = []

    def read() -> None:
        try:
            own.receive()
        except LinkLost as loss:
            losses.append(str(loss))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    until(lambda: _waits(reader))
    own.timeout = 0.2
    reader.join(WAIT)
    assert losses == ["has been silent for 0.2 s"]


def _waits(reader: threading.Thread) -> bool:
    """Whether a thread waits for bytes from its connection."""
    assert reader.ident is not None
    frame = sys._current_frames().get(reader.ident)
    return frame is not None and frame.f_code.co_name == "_next"


def test_heartbeats_keep_the_connection(
    pair: tuple[Link, Link], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "_BEAT_SECONDS", 0.05)  # a late one is still early enough
    own, other = pair
    own.timeout = 1.0
    received: list[object] = []
    reader = threading.Thread(target=lambda: received.append(own.receive()), daemon=True)
    reader.start()
    reader.join(2.5)  # longer than the time-out
    assert reader.is_alive()
    other.send(Signal.CLEAR)
    reader.join(WAIT)
    assert received == [Signal.CLEAR]


def test_a_different_token_is_refused_by_both_sides() -> None:
    listening = Listening(token="other")
    with pytest.raises(LinkLost, match="has a different token"):
        connect(listening.address, "secret", Join(1, 3, {}), LONG)
    assert "token" in str(listening.done())


def test_a_rank_that_does_not_belong_to_the_group_is_refused() -> None:
    listening = Listening()
    with pytest.raises(LinkLost, match="refused this rank, which says that it is rank 3 of 4"):
        connect(listening.address, "secret", Join(3, 4, {}), LONG)
    assert "rank 3 of 4" in str(listening.done())


def test_a_server_that_does_not_know_the_token_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def imitate() -> None:
            connection, _ = server.accept()
            channel = Connection(connection.detach())
            channel.send_bytes(b"#CHALLENGE#" + bytes(20))
            channel.recv_bytes()
            channel.send_bytes(b"#WELCOME#")
            channel.recv_bytes()  # the challenge of the rank
            channel.send_bytes(bytes(16))
            channel.recv_bytes()

        threading.Thread(target=imitate, daemon=True).start()
        with pytest.raises(LinkLost, match="a different token"):
            connect(server.getsockname(), "secret", Join(1, 2, {}), LONG)


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\n\r\n" * 8, b"", bytes(82)])
def test_other_protocols_are_refused(sent: bytes) -> None:
    listening = Listening()
    with socket.create_connection(listening.address) as stranger:
        with contextlib.suppress(OSError):  # it may have been refused already
            stranger.sendall(sent)
            stranger.shutdown(socket.SHUT_WR)
        assert isinstance(listening.done(), LinkLost)


def test_a_connection_that_has_ended_already_is_refused() -> None:
    with socket.socket() as connection:
        connection.close()
        with pytest.raises(LinkLost, match="ended the handshake"):
            accept(connection, "secret", 3, LONG)


def test_an_invalid_message_ends_the_link(pair: tuple[Link, Link]) -> None:
    own, other = pair
    own.send_bytes(b"{}")
    with pytest.raises(LinkLost, match="sent a message that cannot be read"):
        other.receive()


@pytest.mark.parametrize("header", [b"\x7f\xff\xff\xff", b"\xff" * 12])
def test_a_length_that_no_message_has_ends_the_link(pair: tuple[Link, Link], header: bytes) -> None:
    own, other = pair
    own._outgoing.sendall(header)
    with pytest.raises(LinkLost):
        other.receive()


def handshake(listening: Listening, first: bytes) -> Connection:
    """A connection of a rank that sends no heartbeats. first: its first message."""
    channel = Connection(socket.create_connection(listening.address).detach())
    answer_challenge(channel, b"secret")
    deliver_challenge(channel, b"secret")
    channel.send_bytes(first)
    return channel


def test_silence_within_a_message_is_noticed() -> None:
    listening = Listening()
    channel = handshake(listening, encode(Join(1, 3, {})))
    os.write(channel.fileno(), b"\x00\x00\x00\x09abc")
    done = listening.done()
    assert not isinstance(done, LinkLost)
    done[1].timeout = 0.2  # not before, because the handshake may take longer
    with pytest.raises(LinkLost, match=r"silent for 0\.2 s"):
        done[1].receive()


def test_a_rank_that_reads_nothing_is_noticed(pair: tuple[Link, Link]) -> None:
    """Its host has disappeared, or its thread does not run."""
    own, _ = pair
    own.timeout = 0.2
    with pytest.raises(LinkLost, match=r"received nothing for 0\.2 s"):
        own.send_bytes(bytes(64 << 20))  # more than the buffers of a connection


def test_a_rank_of_another_version_is_refused() -> None:
    """It may not even send the same first message."""
    listening = Listening()
    channel = handshake(listening, b"Hello {}")
    assert channel.recv_bytes() == b"is a rank of another version of this backend"
    assert "another version" in str(listening.done())


def test_a_stranger_that_sends_slowly_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "_HANDSHAKE_SECONDS", 0.3)
    listening = Listening()
    with socket.create_connection(listening.address) as stranger, contextlib.suppress(OSError):
        stranger.sendall(b"\x00\x00\x00\xff")  # the length of a message
        for _ in range(90):
            stranger.sendall(b"\0")
            time.sleep(0.05)  # slowly, but never silent for long
    assert "ended the handshake" in str(listening.done())


def test_the_number_of_simultaneous_handshakes_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "_MOST_HANDSHAKES", 2)
    leave = threading.Event()

    def take(connection: socket.socket, _: str) -> None:
        connection.sendall(b"taken")
        leave.wait(WAIT)

    with listen(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as stack:
        accepting(listener, take)
        callers = [
            stack.enter_context(socket.create_connection(listener.getsockname(), WAIT))
            for _ in range(3)
        ]
        assert [caller.recv(5) for caller in callers] == [b"taken", b"taken", b""]
        leave.set()


def test_a_connection_that_cannot_be_accepted_does_not_end_the_listener(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link, "_PAUSE_SECONDS", 0.0)
    taken = threading.Event()

    class Exhausted(socket.socket):
        failed = False

        def accept(self) -> tuple[socket.socket, Any]:
            if not self.failed:
                self.failed = True
                raise OSError(errno.EMFILE, "Too many open files")
            return super().accept()

    with Exhausted() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        accepting(listener, lambda *_: taken.set())
        with socket.create_connection(listener.getsockname(), WAIT):
            assert taken.wait(WAIT)


def test_a_rank_that_has_joined_already_is_refused() -> None:
    with listen(("127.0.0.1", 0)) as listener:
        outcome: list[str] = []

        def take() -> None:
            connection, _ = listener.accept()
            try:
                accept(connection, "secret", 3, LONG, {1}.__contains__)
            except LinkLost as refusal:
                outcome.append(str(refusal))

        thread = threading.Thread(target=take, daemon=True)
        thread.start()
        with pytest.raises(LinkLost, match="refused this rank"):
            connect(listener.getsockname(), "secret", Join(1, 3, {}), LONG)
        thread.join(WAIT)
    assert outcome == ["says that it is rank 1, which has joined already"]


def test_a_host_whose_first_address_is_not_of_this_machine_is_listened_on_at_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def resolved(_host: str, port: int, **_: Any) -> list[Any]:
        places = ("192.0.2.1", port), ("127.0.0.1", port)  # no machine has the first (RFC 5737)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", place) for place in places]

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    with listen(("of-two-addresses", 0)) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"

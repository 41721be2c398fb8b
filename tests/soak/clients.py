"""The clients of a soak test: each does its share of a round and records how its calls ended."""

from __future__ import annotations

import contextlib
import json
import random
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import grpc
from grpc import StatusCode

from tests.soak import traffic
from tests.soak.traffic import Model, Talk
from wire import backend_pb2 as pb
from wire.backend_pb2_grpc import BackendStub

CLIENTS = 8
PATIENCE = 300.0  # seconds; a request without an answer by then counts as lost
# What each client does in a round, in random order.
SHARE = (*["talk"] * 5, *["new"] * 2, *["leave"] * 2, "expire", "bad", "anything")

OK, INVALID = StatusCode.OK, StatusCode.INVALID_ARGUMENT
_EXPECTED = {
    "talk": {OK},
    "new": {OK},
    "leave": {OK, StatusCode.CANCELLED},
    "expire": {StatusCode.DEADLINE_EXCEEDED},
    "bad": {INVALID},
    "anything": {OK, INVALID, StatusCode.UNIMPLEMENTED},
    "overtaken": {StatusCode.CANCELLED},
    "unloaded": {StatusCode.FAILED_PRECONDITION},
}


@dataclass
class Ledger:
    """How calls ended. answered: the labels of calls that must be in the backend's log as OK.

    wrong: descriptions of calls that ended unexpectedly.
    """

    ends: Counter[tuple[str, str]] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    answered: list[str] = field(default_factory=list)
    compared: int = 0
    differing: list[str] = field(default_factory=list)


class Clients:
    """Eight threads with requests, on the stub of one backend."""

    def __init__(self, stub: BackendStub, ledger: Ledger) -> None:
        self._stub = stub
        self._ledger = ledger
        self._noting = threading.Lock()
        self._numbers = count(1)
        self._known: dict[Talk, list[str]] = {}

    def learn(self, model: Model) -> None:
        """Run all of a loaded model's conversations alone, as a reference for later answers."""
        for talk in model.talks:
            self._known[talk] = list(self._turns(talk, streams=True))

    def repeat(self, model: Model) -> None:
        """Run all of them alone once more."""
        for talk in model.talks:
            self._compare(talk, streams=True)

    def work(self, model: Model, seed: str) -> None:
        """Run all clients' shares of a round at once."""
        with ThreadPoolExecutor(CLIENTS) as pool:
            shares = [random.Random(f"{seed} {at}") for at in range(CLIENTS)]
            list(pool.map(lambda dice: self._share(model, dice), shares))

    @contextlib.contextmanager
    def overtaken(self, dice: random.Random) -> Iterator[None]:
        """Run two endless answers, which the code inside the block must end."""
        calls = [self._stub.PredictStream(traffic.endless(dice), PATIENCE) for _ in range(2)]
        for call in calls:
            next(call)
        yield
        for call in calls:
            self._end("overtaken", call)

    def refused_unloaded(self, dice: random.Random) -> None:
        self._end("unloaded", self._stub.PredictStream(traffic.new(dice), timeout=PATIENCE))

    def _share(self, model: Model, dice: random.Random) -> None:
        for kind in dice.sample(SHARE, len(SHARE)):
            match kind:
                case "talk":
                    self._compare(dice.choice(model.talks), streams=dice.random() < 0.5)
                case "leave":
                    self._leave(dice)
                case "expire":
                    timeout = dice.uniform(0.02, 0.5)
                    self._end(kind, self._stub.PredictStream(traffic.endless(dice), timeout))
                case _:
                    request: pb.PredictOptions = getattr(traffic, kind)(dice)
                    self._ask(kind, request, streams=dice.random() < 0.5)

    def _leave(self, dice: random.Random) -> None:
        """Disconnect after a random number of Replies of an answer."""
        drawn = dice.choice([traffic.new, traffic.endless])(dice)
        call = self._stub.PredictStream(drawn, timeout=PATIENCE)
        with contextlib.suppress(grpc.RpcError):  # its code is noted below
            for _ in zip(range(dice.choice([0, 1, 5])), call, strict=False):
                pass
        call.cancel()
        self._end("leave", call)

    def _compare(self, talk: Talk, *, streams: bool) -> None:
        answers = list(self._turns(talk, streams=streams))
        with self._noting:
            for answer, known in zip(answers, self._known[talk], strict=True):
                self._ledger.compared += 1
                if answer != known:
                    self._ledger.differing.append(f"{answer}, not {known}")

    def _turns(self, talk: Talk, *, streams: bool) -> Iterator[str]:
        """One text for each answer in a conversation, with every field of its Replies."""
        answers: list[str] = []
        for _ in talk.questions:
            replies = self._ask("talk", talk.request(answers), streams=streams)
            answers.append(_text(replies))
            yield _whole(replies)

    def _ask(self, kind: str, request: pb.PredictOptions, *, streams: bool) -> list[pb.Reply]:
        label = f"soak-{next(self._numbers)}"
        request.CorrelationId = label
        if streams:
            call = self._stub.PredictStream(request, timeout=PATIENCE)
            replies = self._end(kind, call)
        else:
            call = self._stub.Predict.future(request, timeout=PATIENCE)
            replies = self._end(kind, call, [call])
        if call.code() is OK:
            self._ledger.answered.append(label)
        return replies

    def _end(self, kind: str, call: Any, whole: Sequence[Any] = ()) -> list[pb.Reply]:
        """Wait for a call's end and record it; returns its Replies. whole: the unary Reply."""
        replies: list[pb.Reply] = []
        with contextlib.suppress(grpc.RpcError, grpc.FutureCancelledError):
            replies += [one.result() for one in whole] or call
        code = call.code()
        with self._noting:
            self._ledger.ends[kind, code.name] += 1
            if code not in _EXPECTED[kind]:
                self._ledger.wrong.append(f"{kind}: {code.name} {call.details()}")
        return replies


def _text(replies: Sequence[pb.Reply]) -> str:
    return b"".join(reply.message for reply in replies).decode()


def _whole(replies: Sequence[pb.Reply]) -> str:
    """An answer as one text, which is the same for a stream and a unary call."""
    deltas = [delta for reply in replies for delta in reply.chat_deltas]
    calls: dict[int, str] = {}
    for call in (call for delta in deltas for call in delta.tool_calls):
        calls[call.index] = calls.get(call.index, "") + call.name + call.arguments
    thought = "".join(delta.reasoning_content for delta in deltas)
    responses = b"".join(reply.logprobs for reply in replies[-1:])
    tokens = [entry["token"] for entry in json.loads(responses)["content"]] if responses else []
    return json.dumps(
        [_text(replies), thought, calls, tokens, replies[-1].tokens if replies else 0]
    )

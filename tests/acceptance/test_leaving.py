"""Clients that disconnect: wherever the request was, its slot is freed and the engine goes idle."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from typing import Any

import grpc
import pytest

from tests.acceptance.backend import WAIT, Backend, chat, text_of
from tests.polling import until
from wire import backend_pb2 as pb

ENDLESS = {"IgnoreEOS": True, "Tokens": 0}
LONG = "Count to 7. " * 250


@pytest.fixture
def narrow(bare: Backend) -> Backend:
    """One slot: if it is not freed, everything after it is blocked."""
    bare.load(ContextSize=200_000, Options=["parallel:1", "max_queue:3"])
    return bare


def _served(backend: Backend) -> None:
    assert text_of(backend.stub.PredictStream(chat("Count to 3.", Tokens=9), timeout=WAIT))


def test_a_client_that_disconnects_during_decode_frees_its_slot(narrow: Backend) -> None:
    stream = narrow.stub.PredictStream(chat("Count to 60.", **ENDLESS), timeout=WAIT)
    next(stream)
    stream.cancel()
    _served(narrow)
    until(narrow.idle)


def test_a_client_that_disconnects_during_prefill_frees_its_slot(narrow: Backend) -> None:
    started = narrow.stub.GetMetrics(pb.MetricsRequest(), timeout=WAIT).prompt_tokens_processed
    stream = narrow.stub.PredictStream(chat(LONG, **ENDLESS), timeout=WAIT)
    until(lambda: narrow.stub.GetMetrics(pb.MetricsRequest()).prompt_tokens_processed > started)
    stream.cancel()
    _served(narrow)
    until(narrow.idle)


def test_clients_that_disconnect_in_the_queue_leave_it(narrow: Backend) -> None:
    running = narrow.stub.PredictStream(chat("Count to 60.", **ENDLESS), timeout=WAIT)
    next(running)
    ended: Queue[Any] = Queue()

    def join_queue() -> Any:
        stream = narrow.stub.PredictStream(chat("Count to 60.", **ENDLESS), timeout=WAIT)
        stream.add_done_callback(ended.put)
        return stream

    joined = [join_queue() for _ in range(6)]
    refused = [ended.get(timeout=WAIT) for _ in range(3)]
    assert {stream.code() for stream in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
    waiting = [stream for stream in joined if stream not in refused]
    for stream in waiting:
        stream.cancel()
        ended.get(timeout=WAIT)
    again = [join_queue() for _ in range(3)]
    running.cancel()

    def be_served(stream: Any) -> None:
        next(stream)
        stream.cancel()

    # The backend may have received the calls in any order, so each is read by a thread of its own.
    with ThreadPoolExecutor(len(again)) as readers:
        list(readers.map(be_served, again))
    until(narrow.idle)


def test_a_deadline_frees_the_slot(narrow: Backend) -> None:
    for request in (chat("Count to 60.", **ENDLESS), chat(LONG, **ENDLESS)):
        with pytest.raises(grpc.RpcError) as ended:
            narrow.stub.Predict(request, timeout=0.3)
        assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        _served(narrow)


def test_a_thousand_cancellations_leave_memory_unchanged(bare: Backend) -> None:
    bare.load(Options=["prompt_cache_mib:8"])

    def leave_early(count: int) -> None:
        for number in range(count):
            stream = bare.stub.PredictStream(
                chat(f"Count to {number % 50 + 10}.", **ENDLESS), timeout=WAIT
            )
            if number % 3:
                next(stream)
            stream.cancel()

    def cancel_many() -> None:
        clients = [threading.Thread(target=leave_early, args=(125,)) for _ in range(8)]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        until(bare.idle)
        gc.collect()

    leave_early(100)
    until(bare.idle)
    mlx, resident = bare.memory(), bare.process().memory_info().rss
    cancel_many()
    assert bare.memory() <= mlx + 9 * 2**20
    assert bare.process().memory_info().rss <= resident + 48 * 2**20
    spent = bare.process().cpu_times()
    for _ in range(50):
        bare.stub.Health(pb.HealthMessage(), timeout=WAIT)
    assert bare.process().cpu_times().user - spent.user < 0.5
    _served(bare)

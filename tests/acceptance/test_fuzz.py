"""Requests with random values in random fields: each gets an answer or a clear status."""

from __future__ import annotations

import contextlib
import random
import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from tests.acceptance.backend import WAIT, Backend, chat, text_of
from tests.acceptance.random_requests import random_request
from tests.long import TEST_LONG
from tests.polling import until
from wire import backend_pb2 as pb

pytestmark = pytest.mark.timeout(1200)
REQUESTS = 5000 if TEST_LONG else 1000
CLIENTS = 16
MIB = 1 << 20
CLEAR = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED)


def _outcome(backend: Backend, seed: int) -> str:
    """How a request ended; a refusal must have a message that a person can act on."""
    request = random_request(random.Random(seed))
    call = backend.stub.PredictStream(request, timeout=WAIT)
    if seed % 2:
        call = backend.stub.Predict.future(request, timeout=WAIT)
    else:
        with contextlib.suppress(grpc.RpcError):
            for _ in call:
                pass
    code, words = call.code(), call.details() or ""
    if code is grpc.StatusCode.OK:
        return "OK"
    assert code in CLEAR, f"{seed}: {code} {words}"
    assert len(words) > 20, f"{seed}: {words}"
    assert not re.search(r"Traceback|File \"|/home|site-packages", words), words
    return str(code.name)


def _play(backend: Backend, seeds: range) -> Counter[str]:
    with ThreadPoolExecutor(CLIENTS) as clients:
        return Counter(clients.map(lambda seed: _outcome(backend, seed), seeds))


def test_random_values_in_random_fields(bare: Backend) -> None:
    bare.load(ContextSize=256, Options=["prompt_cache_mib:16"])
    witness = chat("Count to 40.", Seed=5, Temperature=0.6)
    expected = text_of(bare.stub.PredictStream(witness, timeout=WAIT))
    _play(bare, range(500))
    before = bare.memory(), bare.process().memory_info().rss
    outcomes: Counter[str] = Counter()
    for start in range(0, REQUESTS, 250):
        stream = bare.stub.PredictStream(witness, timeout=WAIT)
        outcomes += _play(bare, range(start, start + 250))
        assert text_of(stream) == expected
    assert sum(outcomes.values()) == REQUESTS
    assert min(outcomes["OK"], outcomes["INVALID_ARGUMENT"]) > REQUESTS // 10, outcomes
    until(bare.idle)
    assert bare.memory() - before[0] < 32 * MIB
    assert bare.process().memory_info().rss - before[1] < 128 * MIB
    assert bare.stub.Health(pb.HealthMessage(), timeout=WAIT).message == b"OK"

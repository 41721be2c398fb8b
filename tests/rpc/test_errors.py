"""Each failure is one status and one message for the caller, and the next call is served."""

from __future__ import annotations

import errno
from typing import Any

import grpc
import pytest

from backend.engine import errors
from backend.rpc.statuses import IdentityMismatch, NotServed, status_of
from common import error_details
from common.field_names import named, shortened
from tests.rpc.client import Failure, failure_of, raw_call
from tests.rpc.conftest import WAIT, Running
from tests.rpc.fake_engine import FakeEngine, Script
from tests.rpc.requests_of_hosts import model_options, predict_options
from wire import backend_pb2 as pb
from wire.backend_pb2_grpc import BackendStub

Code = grpc.StatusCode

_TOO_LONG = (
    "prompt is too long: 9 tokens > 7 maximum. This model's maximum context length is 8 tokens,"
    " prompt and answer together: shorten the prompt, or load the model with a larger context_size"
)
_NEGATIVE = f"{named('TopK')} is -5"
CASES = [
    (errors.InvalidRequest(f"{named('TopK')} is -5"), Code.INVALID_ARGUMENT, "top_k (TopK) is -5"),
    (errors.PromptTooLong(9, 7, 8), Code.INVALID_ARGUMENT, _TOO_LONG),
    (errors.ModelRejected("no config.json"), Code.INVALID_ARGUMENT, "no config.json"),
    (errors.NotLoaded(), Code.FAILED_PRECONDITION, "model not loaded: call LoadModel first"),
    (errors.Overloaded("the queue is full"), Code.RESOURCE_EXHAUSTED, "the queue is full"),
    (errors.ModelNotFound("no such model"), Code.NOT_FOUND, "no such model"),
    (errors.ShuttingDown(), Code.UNAVAILABLE, "the backend is shutting down"),
    (errors.Cancelled("freed"), Code.CANCELLED, "freed"),
    (errors.EngineFailed("the row failed"), Code.INTERNAL, "the row failed"),
    (KeyError("what the user wrote"), Code.INTERNAL, "internal error; see the backend log"),
]


@pytest.mark.parametrize(("error", "code", "sentence"), CASES)
def test_errors_before_and_within_a_generation(
    stub: BackendStub, engine: FakeEngine, error: Exception, code: Code, sentence: str
) -> None:
    def outcomes() -> list[Failure]:
        return [
            failure_of(lambda: stub.Predict(predict_options())),
            failure_of(lambda: stub.PredictStream(predict_options())),
        ]

    engine.fault = error
    assert outcomes() == [(code, sentence)] * 2
    engine.fault, engine.script = None, Script(error=error)
    assert outcomes() == [(code, sentence)] * 2
    engine.script = Script()
    assert stub.Predict(predict_options()).message == b"Hello"
    assert engine.running == []


@pytest.mark.parametrize(
    ("error", "error_code", "fields", "message"),
    [
        (errors.InvalidRequest(_NEGATIVE), "", ("TopK",), _NEGATIVE),
        (
            errors.InvalidRequest(f"{{3}}: {named('Metadata ä')} or {named('Tokens')}", "Tokens"),
            "",
            ("Tokens", "Metadata ä"),
            f"{{3}}: {named('Metadata ä')} or {named('Tokens')}",
        ),
        (
            errors.PromptTooLong(9, 7, 8, "", "Prompt"),
            "context_length_exceeded",
            ("Prompt",),
            _TOO_LONG,
        ),
        (errors.ShuttingDown(), "shutting_down", (), ""),
        (errors.RankLost("rank 1 has ended"), "", (), ""),
        (errors.Overloaded("the queue is full"), "", (), ""),
        (KeyError("what the user wrote"), "", (), ""),
    ],
)
def test_programs_get_fields_and_code_beside_the_message(
    stub: BackendStub,
    engine: FakeEngine,
    error: Exception,
    error_code: str,
    fields: tuple[str, ...],
    message: str,
) -> None:
    engine.fault = error
    with pytest.raises(grpc.RpcError) as caught:
        stub.Predict(predict_options())
    metadata: Any = caught.value.trailing_metadata()
    trailers = dict(metadata)
    assert trailers.get("mlx-error-code", "") == error_code
    raw = trailers.get("grpc-status-details-bin", b"")
    assert isinstance(raw, bytes)
    assert error_details.unpacked(raw) == (fields, message)


def test_the_details_have_the_status_itself_because_gos_clients_read_it_there() -> None:
    """google.rpc.Status: field 1 is the code, field 2 the message."""
    status = status_of(errors.InvalidRequest(_NEGATIVE))
    details = dict(status.trailers)["grpc-status-details-bin"]
    said = b"top_k (TopK) is -5"
    assert isinstance(details, bytes)
    assert details.startswith(bytes((8, 3, 18, len(said))) + said)
    assert b"type.googleapis.com/google.rpc.BadRequest" in details


@pytest.mark.parametrize("name", ["Prompt", "Metadata " + "ü" * 10_000])
@pytest.mark.parametrize("value", ["x", "\N{FOX FACE}", "{"])
def test_long_details_are_shortened_and_still_name_the_field(name: str, value: str) -> None:
    status = status_of(errors.InvalidRequest(f"{named(name)} is {value * 10_000}", *"abcdef"))
    assert 996 <= len(status.message.encode()) <= 1000
    details = dict(status.trailers)["grpc-status-details-bin"]
    assert isinstance(details, bytes)
    assert len(details) <= 4096
    fields, message = error_details.unpacked(details)
    assert fields[0] == "a"
    assert message.endswith("…")


def test_a_shortened_message_marks_whole_names() -> None:
    message = f"{'x' * 590} {named('Grammar')} {named('Prompt')}"
    assert shortened(message, 600, ["Grammar"]) == f"{'x' * 590} Grammar…"[:600]


def test_an_error_names_its_own_field_first() -> None:
    for own, blamed in (((), ("Messages",)), (("Tools",), ("Tools",))):
        with pytest.raises(errors.InvalidRequest) as caught, errors.about("Messages"):
            raise errors.InvalidRequest("no", *own)
        assert caught.value.fields == blamed


@pytest.mark.parametrize(("error", "code", "sentence"), CASES)
def test_a_failed_load_is_an_error_not_a_false_result(
    stub: BackendStub, engine: FakeEngine, error: Exception, code: Code, sentence: str
) -> None:
    engine.load_fault = error
    assert failure_of(lambda: stub.LoadModel(model_options())) == (code, sentence)


def test_a_stream_keeps_what_was_sent_before_it_failed(
    stub: BackendStub, engine: FakeEngine
) -> None:
    engine.script = Script(["kept"], errors.EngineFailed("later"))
    stream = stub.PredictStream(predict_options())
    assert next(stream).message == b"kept"
    assert failure_of(lambda: next(stream)) == (Code.INTERNAL, "later")


TRIGGERS = [
    "model not loaded",
    "Unimplemented",
    "model identity mismatch",
    "Connection refused",
    "connection reset by peer",
    "no such host",
]


@pytest.mark.parametrize("phrase", TRIGGERS)
@pytest.mark.parametrize("kind", [errors.InvalidRequest, errors.ModelNotFound, errors.Overloaded])
def test_no_message_triggers_a_reaction_of_the_host_by_accident(
    kind: type[errors.EngineError], phrase: str
) -> None:
    sentence = status_of(kind(f"it said: {phrase}!")).message.lower()
    assert not any(trigger.lower() in sentence for trigger in TRIGGERS)


def test_phrases_that_hosts_react_to_are_used_only_where_intended() -> None:
    assert "model not loaded" in status_of(errors.NotLoaded()).message
    assert "model identity mismatch" in status_of(IdentityMismatch("a", "b")).message
    assert "unimplemented" in status_of(NotServed("it is unimplemented")).message


def test_the_same_words_of_another_error_are_not_mixed_up() -> None:
    wanted = IdentityMismatch("a", "b")
    for error, kept in ((wanted, True), (errors.InvalidRequest(str(wanted)), False)) * 2:
        assert ("model identity mismatch" in status_of(error).message) is kept


@pytest.mark.parametrize(
    ("fault", "refusal"),
    [
        (OSError(errno.EMFILE, "too many"), errors.REFUSED),
        (OSError(errno.ENOSPC, "full"), errors.REFUSED),
        (OSError(errno.EFBIG, "too large"), errors.FILES_TOO_SMALL),
        (RuntimeError("can't start new thread"), errors.REFUSED),
        (MemoryError(), errors.REFUSED),
        (OSError(errno.ENOENT, "no file"), None),
        (RuntimeError("another"), None),
    ],
)
def test_only_what_the_system_lacks_is_a_refusal_by_it(
    fault: Exception, refusal: str | None
) -> None:
    found = errors.refused_by_system(fault)
    assert (found and str(found)) == refusal


@pytest.mark.parametrize("method", ["Predict", "PredictStream", "Health"])
def test_a_call_without_a_request_is_refused(running: Running, method: str) -> None:
    """The client closes its side before it has sent a message, as a broken proxy does."""
    open_call: Any = running.channel.stream_stream(f"/backend.Backend/{method}")
    assert failure_of(lambda: list(open_call(iter(()), timeout=WAIT))) == (
        Code.INVALID_ARGUMENT,
        f"{method} was called without a request: send one message",
    )


@pytest.mark.parametrize(("character", "count"), [("é", 100_000), ("\N{FOX FACE}", 650)])
def test_a_message_fits_into_a_trailer(
    stub: BackendStub, engine: FakeEngine, character: str, count: int
) -> None:
    engine.fault = errors.InvalidRequest(named("Prompt") + character * count)
    for _ in range(5):  # gRPC refuses trailers of 8 to 16 KiB at random
        code, sentence = failure_of(lambda: stub.Predict(predict_options()))
        assert code is Code.INVALID_ARGUMENT
        assert sentence.endswith(f"{character}…")


BAD_UTF8 = {
    "prompt": b"\x0a\x02\xff\xfe",
    "message content": b"\xe2\x02\x04\x12\x02\xc3\x28",
    "metadata": b"\xa2\x03\x08\x0a\x01\xff\x12\x03abc",
    "cut short": b"\x0a\x7fabc",
}


@pytest.mark.parametrize("raw", BAD_UTF8.values(), ids=BAD_UTF8.keys())
@pytest.mark.parametrize("method", ["Predict", "PredictStream", "TokenizeString"])
def test_bytes_that_cannot_be_read_are_an_invalid_argument(
    running: Running, method: str, raw: bytes
) -> None:
    path = f"/backend.Backend/{method}"
    code, sentence = failure_of(lambda: raw_call(running.channel, path, raw))
    assert code is Code.INVALID_ARGUMENT
    assert sentence.startswith(f"the request of {method} cannot be read")
    assert running.stub.Predict(predict_options()).message == b"Hello"


def test_a_load_that_cannot_be_read_is_refused(running: Running, engine: FakeEngine) -> None:
    raw = BAD_UTF8["prompt"]
    failure = failure_of(lambda: raw_call(running.channel, "/backend.Backend/LoadModel", raw))
    assert failure.sentence.startswith("the request of LoadModel cannot be read")
    assert engine.loads == []


def test_fifty_mebibytes_pass_and_one_more_byte_does_not(running: Running) -> None:
    limit = 50 * 1024 * 1024
    overhead = pb.PredictOptions(Prompt="x" * limit).ByteSize() - limit
    largest = pb.PredictOptions(Prompt="x" * (limit - overhead))
    assert largest.ByteSize() == limit
    assert running.stub.Predict(largest).message == b"Hello"
    largest.Prompt += "x"
    failure = failure_of(lambda: running.stub.Predict(largest))
    assert failure.code is Code.RESOURCE_EXHAUSTED
    assert running.stub.Predict(predict_options()).message == b"Hello"


def test_text_to_tokenise_is_bounded(stub: BackendStub) -> None:
    options = pb.PredictOptions(Prompt="x" * (4 * 1024 * 1024 + 1))
    assert failure_of(lambda: stub.TokenizeString(options)).code is Code.INVALID_ARGUMENT

"""Every status of a backend has its HTTP status, code and message; none becomes 422."""

from __future__ import annotations

import grpc
import pytest
from grpc.aio import AioRpcError, Metadata

from common.error_details import KEY, packed
from common.field_names import fields_in, named
from gateway.errors import TABLE, ApiError, of_rpc, without_folders

Code = grpc.StatusCode
SAID = "Temperature is -1: send a finite number from 0 to 100"


NAMES = {"Temperature": "heat", "Images[1]": "messages[0].content[2].image_url"}


def refusal(
    code: grpc.StatusCode, details: str | None = SAID, *trailers: tuple[str, str | bytes]
) -> ApiError:
    return of_rpc(AioRpcError(code, Metadata(), Metadata(*trailers), details), NAMES)


@pytest.mark.parametrize(
    ("code", "status", "kind", "name", "retry"),
    [
        (Code.INVALID_ARGUMENT, 400, "invalid_request_error", None, False),
        (Code.OUT_OF_RANGE, 400, "invalid_request_error", None, False),
        (Code.UNIMPLEMENTED, 400, "invalid_request_error", "unsupported", False),
        (Code.NOT_FOUND, 503, "server_error", "model_not_loaded", True),
        (Code.RESOURCE_EXHAUSTED, 429, "rate_limit_error", "overloaded", True),
        (Code.INTERNAL, 500, "server_error", "backend_failed", False),
        (Code.DATA_LOSS, 500, "server_error", "backend_failed", False),
        (Code.UNKNOWN, 500, "server_error", "backend_failed", False),
        (Code.ALREADY_EXISTS, 500, "server_error", "backend_failed", False),
        (Code.UNAUTHENTICATED, 502, "server_error", "backend_refused", False),
        (Code.PERMISSION_DENIED, 502, "server_error", "backend_refused", False),
        (Code.FAILED_PRECONDITION, 503, "server_error", "model_not_loaded", True),
        (Code.CANCELLED, 503, "server_error", "cancelled", True),
        (Code.UNAVAILABLE, 503, "server_error", "backend_unavailable", True),
        (Code.ABORTED, 503, "server_error", "backend_unavailable", True),
        (Code.DEADLINE_EXCEEDED, 504, "server_error", "timeout", False),
    ],
)
def test_each_row(
    code: grpc.StatusCode, status: int, kind: str, name: str | None, retry: bool
) -> None:
    error = refusal(code)
    assert (error.status, error.type, error.code) == (status, kind, name)
    assert error.headers()["x-should-retry"] == str(retry).lower()
    assert ("retry-after" in error.headers()) is retry
    assert error.body()["error"]["message"]


def test_no_status_becomes_422() -> None:
    assert {refusal(code).status for code in Code} <= {400, 429, 500, 502, 503, 504}


@pytest.mark.parametrize("code", [code for code, row in TABLE.items() if not row.message])
def test_the_backends_own_message_is_kept(code: grpc.StatusCode) -> None:
    assert refusal(code).message == SAID


@pytest.mark.parametrize("code", [code for code, row in TABLE.items() if row.message])
def test_internal_messages_are_replaced(code: grpc.StatusCode) -> None:
    translated = refusal(code, "ipv4:127.0.0.1:4711: Traceback (most recent call last)").message
    assert "127.0.0.1" not in translated
    assert "Traceback" not in translated


@pytest.mark.parametrize(
    ("message", "translated", "param"),
    [
        (f"{named('Temperature')} is -1, not Temperature", "heat is -1, not Temperature", "heat"),
        (f"{named('TopK')} is {{0}}", "TopK is {0}", "TopK"),
        (
            f"{named('Metadata mlx.min_tokens')} is 5, but {named('Temperature')} is 3",
            "min_tokens is 5, but heat is 3",
            "min_tokens",
        ),
        (
            f"{named('Images[1]')} is no image",
            "messages[0].content[2].image_url is no image",
            "messages[0].content[2].image_url",
        ),
    ],
)
def test_field_names_of_a_backend_become_the_clients(
    message: str, translated: str, param: str
) -> None:
    details = packed(3, SAID, message, fields_in(message))
    error = refusal(Code.INVALID_ARGUMENT, SAID, (KEY, details))
    assert (error.message, error.param) == (translated, param)


@pytest.mark.parametrize("details", [b"\xff", packed(3, SAID, "{9} {", ["x"]).replace(b"9", b"8")])
def test_details_that_cannot_be_read_do_no_harm(details: bytes) -> None:
    assert refusal(Code.INVALID_ARGUMENT, SAID, (KEY, details)).message


def test_a_message_alone_names_no_field() -> None:
    assert refusal(Code.INVALID_ARGUMENT).param is None


@pytest.mark.parametrize("code", [Code.INVALID_ARGUMENT, Code.RESOURCE_EXHAUSTED])
def test_the_backends_code_refines_the_status(code: grpc.StatusCode) -> None:
    error = refusal(code, SAID, ("mlx-error-code", "context_length_exceeded"))
    assert (error.status, error.code, error.retry_after) == (400, "context_length_exceeded", None)


def test_a_broken_connection_may_be_a_crash_but_a_stopping_process_is_not() -> None:
    assert refusal(Code.UNAVAILABLE).died
    assert not refusal(Code.UNAVAILABLE, SAID, ("mlx-error-code", "shutting_down")).died
    assert not refusal(Code.INTERNAL).died


def test_a_message_that_grpc_found_too_large_is_a_413() -> None:
    error = refusal(Code.RESOURCE_EXHAUSTED, "SERVER: Received message larger than max (9 vs. 4)")
    assert (error.status, error.code) == (413, "request_too_large")


@pytest.mark.parametrize("code", list(Code))
def test_there_is_always_a_message(code: grpc.StatusCode) -> None:
    assert refusal(code, None).message


def test_a_message_has_no_path_of_the_server() -> None:
    translated = without_folders(
        'no config.json in /srv/models/x/y: see "/etc/a/b" or http://a/b/c'
    )
    assert translated == 'no config.json in …/y: see "…/b" or http://a/b/c'
    assert (
        without_folders("run.sh: run /opt/it/install.sh first") == "run.sh: run …/install.sh first"
    )


def test_nor_has_a_backends_message() -> None:
    """Backends know a model by the path in its file."""
    sentence = "Rerank is not served: the loaded model '/srv/models/tiny' generates text"
    translated = refusal(Code.UNIMPLEMENTED, sentence).message
    assert translated == "Rerank is not served: the loaded model '…/tiny' generates text"


def test_a_pointer_into_a_schema_is_not_a_path() -> None:
    for sentence in (
        "Pointer '/$defs/Node/left' does not exist",
        "the $ref #/definitions/a/b is none",
    ):
        assert refusal(Code.INVALID_ARGUMENT, sentence).message == sentence

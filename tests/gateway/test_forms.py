"""Forms are read as their clients wrote them, and a broken one is refused with a reason."""

from __future__ import annotations

import httpx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.errors import ApiError
from gateway.forms import MOST_PARTS, parts_of
from tests.long import examples

KIND = "multipart/form-data; boundary=edge"
NAMES = st.text(st.characters(codec="ascii", categories=("L", "N")), min_size=1, max_size=8)
CONTENT = st.binary(max_size=60) | st.sampled_from(
    [b"\r\n--edge", b"--edge--", b"\r\n", b"\r\n\r\n"]
)


@given(st.lists(st.tuples(NAMES, CONTENT, st.none() | NAMES), max_size=6))
@settings(max_examples=examples(200), deadline=None)
def test_the_fields_of_httpx_are_read(fields: list[tuple[str, bytes, str | None]]) -> None:
    files = [(name, (filename, content)) for name, content, filename in fields]
    request = httpx.Request("POST", "http://localhost/", files=files or [("a", (None, b""))])
    found = parts_of(request.headers["content-type"], request.read())
    expected = fields or [("a", b"", None)]
    assert [(part.name, part.content, part.filename) for part in found] == expected


@given(st.binary(max_size=200), st.sampled_from([KIND, "multipart/form-data", "text/plain", ""]))
@example(b"--edge--", KIND)
@settings(max_examples=examples(300), deadline=None)
def test_any_other_body_is_refused(body: bytes, kind: str) -> None:
    if body.startswith(b"--edge--") and kind == KIND:
        assert parts_of(kind, body) == []
    else:
        with pytest.raises(ApiError):
            parts_of(kind, body)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "its boundary is missing"),
        (b"--edge\r\nContent-Disposition: form-data; name=a\r\n\r\nx", "it ends before its last"),
        (b"--edge\r\nContent-Disposition: form-data\r\n\r\nx\r\n--edge--", "has no name"),
        (b"--edge\r\nx\r\n--edge--", "has no header"),
    ],
)
def test_the_reason_says_what_is_wrong(body: bytes, said: str) -> None:
    with pytest.raises(ApiError, match=said):
        parts_of(KIND, body)


def test_names_may_have_quotes_and_letters_of_any_language() -> None:
    lines = ('Content-Disposition: form-data; name="file"; filename="Über \\"mich\\".mp3"', "", "x")
    body = ("--edge\r\n" + "\r\n".join(lines) + "\r\n--edge--\r\n").encode()
    (part,) = parts_of(KIND, body)
    assert (part.name, part.filename, part.content) == ("file", 'Über "mich".mp3', b"x")


def test_many_fields_are_refused() -> None:
    field = b"--edge\r\nContent-Disposition: form-data; name=a\r\n\r\nx\r\n"
    with pytest.raises(ApiError, match="more than"):
        parts_of(KIND, field * (MOST_PARTS + 1) + b"--edge--")


@pytest.mark.parametrize("header", ["form-data{}; name=a", 'form-data; x="{}; name=a'])
def test_long_headers_are_refused_before_they_are_read(header: str) -> None:
    """Reading them takes quadratic time: a body of 1 MB would take minutes."""
    long = header.format(";" * 1_000_000)
    lines = f"--edge\r\nContent-Disposition: {long}\r\n\r\nx\r\n--edge--"
    with pytest.raises(ApiError, match="has no header of at most"):
        parts_of(KIND, lines.encode())
    with pytest.raises(ApiError, match="its Content-Type is longer"):
        parts_of(f"multipart/{long}; boundary=edge", b"--edge--")

"""Reads bodies of the type multipart/form-data (RFC 7578), in which clients upload files."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from email.message import Message

from starlette.requests import Request

from gateway import exchange
from gateway.bodies import pop_body
from gateway.errors import ApiError
from gateway.threads import offload

MOST_PARTS = 64
_KIND = "multipart/form-data"
_LONG = 32 << 10  # bytes of a body that takes a noticeable time to read
_LONGEST_BOUNDARY = 70  # characters, by RFC 2046
_LONGEST_HEAD = 4096  # bytes of a header, because its parameters are read in quadratic time


@dataclass(frozen=True, slots=True)
class Part:
    """A field of a form."""

    name: str
    content: bytes
    filename: str | None = None  # None unless it is a file

    @property
    def text(self) -> str:
        """Raises ApiError if it is not UTF-8."""
        try:
            return self.content.decode()
        except UnicodeDecodeError:
            raise _broken(f"the field {self.name[:40]!r} is not UTF-8") from None


async def form_of(request: Request) -> list[Part]:
    """Return the fields of a request's form, in order. Raises ApiError 400."""
    body = pop_body(request.scope)
    header = request.headers.get("content-type", "")
    exchange.current().long = exchange.current().long or len(body) > _LONG
    return await offload(functools.partial(parts_of, header, body))


def parts_of(content_type: str, body: bytes | bytearray) -> list[Part]:
    """Return the fields in a body. Raises ApiError 400."""
    if len(content_type) > _LONGEST_HEAD:
        raise _broken(f"its Content-Type is longer than {_LONGEST_HEAD} bytes")
    header = Message()
    header["content-type"] = content_type
    if header.get_content_type() != _KIND:
        raise ApiError(
            400,
            f"Unsupported content type: {content_type[:100]!r}. Send 'Content-Type: {_KIND}'",
            code="unsupported_content_type",
        )
    boundary = header.get_param("boundary")
    if not isinstance(boundary, str) or not 0 < len(boundary) <= _LONGEST_BOUNDARY:
        raise _broken("its Content-Type states no boundary")
    return list(_parts(boundary.encode("utf-8", "replace"), body))


def _parts(boundary: bytes, body: bytes | bytearray) -> Iterator[Part]:
    delimiter = b"\r\n--" + boundary
    first = body.find(delimiter[2:])
    if first < 0 or (first and body[first - 2 : first] != b"\r\n"):
        raise _broken("its boundary is missing")
    at, count = first + len(delimiter) - 2, 0
    while body[at : at + 2] != b"--":
        end = body.find(delimiter, at)
        if end < 0:
            raise _broken("it ends before its last boundary")
        count += 1
        if count > MOST_PARTS:
            raise ApiError(400, f"the form has more than {MOST_PARTS} fields: send fewer")
        yield _part(body, at, end)
        at = end + len(delimiter)


def _part(body: bytes | bytearray, start: int, end: int) -> Part:
    """Return the field between two boundaries: header lines, an empty line, content."""
    blank = body.find(b"\r\n\r\n", start, min(end, start + _LONGEST_HEAD))
    if blank < 0:
        raise _broken(f"a field of it has no header of at most {_LONGEST_HEAD} bytes")
    headers = Message()
    for line in bytes(body[start:blank]).decode("utf-8", "replace").split("\r\n"):
        field, _, value = line.partition(":")
        if field.strip().lower() == "content-disposition":
            headers["content-disposition"] = value.strip()
    name = headers.get_param("name", header="content-disposition")
    if not isinstance(name, str):
        raise _broken("a field of it has no name")
    return Part(name, bytes(body[blank + 4 : end]), headers.get_filename())


def _broken(why: str) -> ApiError:
    return ApiError(400, f"the form cannot be read: {why}", code="invalid_form")

"""Small PDFs, written by hand."""

from __future__ import annotations

import base64
import zlib
from functools import cache


def pdf(*objects: bytes, trailer: bytes = b"") -> bytes:
    """A PDF of these objects, numbered from 1; the first is its root."""
    written = b"%PDF-1.4\n"
    places = []
    for number, content in enumerate(objects, 1):
        places.append(len(written))
        written += b"%d 0 obj\n%s\nendobj\n" % (number, content)
    start = len(written)
    written += b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    written += b"".join(b"%010d 00000 n \n" % place for place in places)
    size = b"/Size %d /Root 1 0 R %s" % (len(objects) + 1, trailer)
    return written + b"trailer << %s >>\nstartxref\n%d\n%%%%EOF\n" % (size, start)


def stream(content: bytes, entries: bytes = b"") -> bytes:
    return b"<< /Length %d %s >>\nstream\n%s\nendstream" % (len(content), entries, content)


CATALOGUE = b"<< /Type /Catalog /Pages 2 0 R >>"
FONT = b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"


def with_streams(*streams: bytes, trailer: bytes = b"") -> bytes:
    """A PDF with a page for each content stream."""
    kids = b" ".join(b"%d 0 R" % (4 + 2 * at) for at in range(len(streams)))
    objects = [CATALOGUE, b"<< /Type /Pages /Kids [%s] /Count %d >>" % (kids, len(streams)), FONT]
    for at, content in enumerate(streams):
        resources = b"/Resources << /Font << /F 3 0 R >> >> /MediaBox [0 0 600 800]"
        page = b"<< /Type /Page /Parent 2 0 R %s /Contents %d 0 R >>" % (resources, 5 + 2 * at)
        objects += [page, content]
    return pdf(*objects, trailer=trailer)


def of_pages(*texts: str) -> bytes:
    """A PDF with one line of text on each page."""
    return with_streams(*(stream(_shown(text)) for text in texts))


def _shown(text: str) -> bytes:
    return b"BT /F 12 Tf 50 700 Td (%s) Tj ET" % text.encode("latin-1")


def scanned() -> bytes:
    """A page with drawings, and without text."""
    return with_streams(stream(b"0 0 600 800 re f"))


def encrypted() -> bytes:
    """A PDF that names an unknown password."""
    entries = b"/Filter /Standard /V 1 /R 2 /O <%s> /U <%s> /P -4" % (b"00" * 32, b"11" * 32)
    return with_streams(
        stream(_shown("secret")), trailer=b"/Encrypt << %s >> /ID [<00> <00>]" % entries
    )


@cache
def bomb() -> bytes:
    """A content stream that is 512 MiB long when it is decompressed."""
    inner = zlib.compressobj(9)
    outer = zlib.compressobj(9)
    written = b"".join(outer.compress(inner.compress(bytes(1 << 20))) for _ in range(512))
    written += outer.compress(inner.flush()) + outer.flush()
    return with_streams(stream(written, b"/Filter [/FlateDecode /FlateDecode]"))


def looped() -> bytes:
    """A tree of pages that contains itself."""
    return pdf(CATALOGUE, b"<< /Type /Pages /Kids [2 0 R 2 0 R] /Count 1000000 >>")


def cut() -> bytes:
    return b"%PDF-1.7\n1 0 obj"


def empty() -> bytes:
    return b""


def slow(first: str = "") -> bytes:
    """Pages that take minutes to read, after one with a text."""
    endless = stream(zlib.compress(_shown("x") * 2_000_000, 1), b"/Filter /FlateDecode")
    return with_streams(stream(_shown(first)), endless)


def in_base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


WITHOUT_TEXT = (scanned, encrypted, bomb, looped, cut)

"""Requests that no honest client sends, as bytes on a socket: refused, and nothing worse.

Covers: gateway/http_protocol.py, gateway/json_route.py, gateway/bodies.py
"""

from __future__ import annotations

import functools
import gzip
import json
import re
import socket
from typing import Any
from urllib.parse import urlsplit

import httpx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.gateway.gateway_process import WAIT, GatewayProcess
from tests.long import examples

BODY: dict[str, Any] = {"model": "tiny", "max_tokens": 1, "stream": False}
HI = [{"role": "user", "content": "Hi"}]
WHOLE = json.dumps(BODY | {"prompt": "Hi", "input": "Hi", "messages": HI}).encode()
OPEN = WHOLE[:-1]
BODIES = [
    WHOLE,
    b"",
    b" \r\n\t" * 100,
    b"null",
    b"{",
    b"\xff\xfe",
    b"\xef\xbb\xbf" + WHOLE,
    WHOLE.decode().encode("utf-16"),
    gzip.compress(WHOLE),
    WHOLE + b"x",
    b"[" * 5000 + b"]" * 5000,
    b'{"a":' * 201 + b"1" + b"}" * 201,
    OPEN + b', "n": ' + b"9" * 5000 + b"}",
    *(OPEN + b', "temperature": ' + n + b"}" for n in (b"NaN", b"-Infinity", b"1e999", b"01")),
    OPEN + b', "model": "none", "model": "tiny", "messages": {}}',
    WHOLE.replace(b"Hi", rb"\ud800\udfff\udc00\u0000"),
    WHOLE.replace(b'"tiny"', b'"../../etc/passwd"'),
    WHOLE.replace(b'"tiny"', rb'"\u202e\ud83d\ude00"'),
    OPEN + b"," + b",".join(b'"k%d": 1' % at for at in range(11_000)) + b"}",
]
FRAMES = [
    b"content-length: %(length)d\r\n\r\n%(body)s",
    b"content-length: %(length)d\r\ncontent-length: %(length)d\r\n\r\n%(body)s",
    b"content-length: 0\r\ncontent-length: %(length)d\r\n\r\n%(body)s",
    b"content-length: -1\r\n\r\n%(body)s",
    b"content-length: 0x5\r\n\r\n%(body)s",
    b"content-length: 99999999999999999999\r\n\r\n%(body)s",
    b"content-length: %(length)d\r\ntransfer-encoding: chunked\r\n\r\n%(body)s",
    b"transfer-encoding: chunked\r\n\r\n%(length)x;a=b\r\n%(body)s\r\n0\r\nx-a: b\r\n\r\n",
    b"transfer-encoding: chunked\r\n\r\nffffffffffffffffff\r\n%(body)s",
    b"transfer-encoding: gzip, chunked\r\n\r\n%(length)x\r\n%(body)s\r\n0\r\n\r\n",
    b"expect: 100-continue\r\ncontent-length: %(length)d\r\n\r\n%(body)s",
]
HEADERS = [
    b"content-type: application/json",
    b"content-type: multipart/form-data; boundary=" + b"b" * 90,
    b"content-type: application/json; charset=utf-16",
    b"content-encoding: gzip",
    b"host: evil.example",
    b"host: 127.0.0.1",
    b"origin: http://[",
    b"authorization: Bearer \xff",
    b"x-request-id: \xe2\x80\xae<script>",
    b"upgrade: h2c\r\nconnection: upgrade",
    b"anthropic-version: \xe4",
    b"range: bytes=5-,-1",
    b" folded",
    b"no colon",
    b"bad name: x",
    b"x: a\x01b",
    b"\r\n".join(b"x-%d: 1" % at for at in range(10_000)),
]
METHODS = b"GET POST PUT DELETE HEAD OPTIONS TRACE CONNECT BREW".split()
CHANGES = [
    b"%s",
    b"http://evil.example%s",
    b"//%s/",
    b"/v1/v1%s",
    b"%s?x=%%ff%%00\xe4",
    b"/page/..%%2f..%%2fapp.py?%s",
    b"/page/../../../etc/passwd?%s",
    b"*%s",
]
LEAK = re.compile(rb"Traceback|site-packages|/(?:gateway|backend|common)/\w+\.py|root:x:")


@functools.cache
def routes(url: str) -> list[bytes]:
    """The paths of all endpoints; those with a name of a model or a file have a bad one."""
    found = httpx.get(f"{url}/openapi.json", timeout=WAIT).json()["paths"]
    kept = [path for path in found if not re.search("delete|copy|load", path)]
    return [re.sub(r"\{[^}]*\}", "..%2f..", path).encode() for path in kept] + [b"/", b"/page/x"]


def answers(url: str, request: bytes, pieces: int, *, ends: bool) -> bytes:
    """Everything that is sent back; `ends`: the sending side is closed after the request."""
    place = urlsplit(url)
    found = b""
    # Without an end, another request completes it, so that no limit of time has to be waited for.
    last = b"" if ends else b"\r\n\r\nGET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with socket.create_connection((place.hostname, place.port), timeout=WAIT) as client:
        try:
            for at in range(pieces):
                begin, end = (each * len(request) // pieces for each in (at, at + 1))
                client.sendall(request[begin:end])
            client.sendall(last)
            client.shutdown(socket.SHUT_WR)
            while part := client.recv(1 << 16):
                found += part
        except TimeoutError:
            raise
        except OSError:  # the gateway has closed the connection
            pass
    return found


@settings(
    max_examples=examples(600),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_hostile_requests_are_answered_or_refused(
    gateway: GatewayProcess, data: st.DataObject
) -> None:
    path = data.draw(st.sampled_from(routes(gateway.url)))
    target = data.draw(st.sampled_from(CHANGES)) % path
    method, body = data.draw(st.sampled_from(METHODS)), data.draw(st.sampled_from(BODIES))
    version = data.draw(st.sampled_from([b"1.1", b"1.1", b"1.0", b"2.0"]))
    headers = data.draw(st.lists(st.sampled_from(HEADERS), max_size=3))
    framed = data.draw(st.sampled_from(FRAMES)) % {b"length": len(body), b"body": body}
    head = b"%s %s HTTP/%s\r\nhost: 127.0.0.1\r\n" % (method, target, version)
    request = head + b"".join(each + b"\r\n" for each in headers) + framed
    pieces, ends = data.draw(st.sampled_from([1, 2, 40])), data.draw(st.booleans())
    found = answers(gateway.url, request * data.draw(st.sampled_from([1, 1, 3])), pieces, ends=ends)
    assert not re.search(rb"^HTTP/1\.1 5", found, re.MULTILINE), found
    assert target.endswith(b"/openapi.json") or not LEAK.search(found), found
    assert gateway.child.poll() is None


def test_the_gateway_serves_after_all_of_that(gateway: GatewayProcess) -> None:
    answer = gateway.client.post("/v1/chat/completions", json=BODY | {"messages": HI})
    assert answer.status_code == 200

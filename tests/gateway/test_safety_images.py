"""Images and sounds: only valid files, and only from public addresses."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ipaddress
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway import images
from gateway.errors import ApiError
from gateway.images import audio, media, type_of
from gateway.openai.messages import ChatMessage
from gateway.openai.messages_to_wire import wire_messages
from gateway.remote_images import (
    MOST_REDIRECTS,
    PUBLIC,
    Address,
    Fetcher,
    _certificates,
    is_public,
)
from gateway.settings import GatewaySettings
from tests.gateway.gateway_process import ROOT, WAIT, GatewayProcess
from tests.gateway.requests_begun import begun
from wire import backend_pb2 as pb

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJg"
    "gg=="
)
PNG_URI = "data:image/png;base64," + base64.b64encode(PNG).decode()
MP4 = b"\0\0\0\x1cftypisom" + b"\0" * 40
WAV = b"RIFF\x24\0\0\0WAVEfmt " + b"\0" * 28
LIMIT = 4096
CLOSED = GatewaySettings(Path(), max_image_bytes=LIMIT)
OPEN = replace(CLOSED, allow_remote_images=True)


def encoded(content: bytes) -> str:
    return base64.b64encode(content).decode()


async def refusal(
    url: str, settings: GatewaySettings = OPEN, fetcher: Fetcher = PUBLIC
) -> ApiError:
    with pytest.raises(ApiError) as raised:
        await media(url, settings, fetcher=fetcher)
    return raised.value


async def test_a_data_uri_and_bare_base64_give_the_same_image() -> None:
    broken = "\n".join([encoded(PNG)[:40], encoded(PNG)[40:]])
    named_wrongly = PNG_URI.replace("image/png", "text/html")
    for url in (PNG_URI, encoded(PNG), broken, named_wrongly, PNG_URI.replace("data", "DATA")):
        assert await media(url, CLOSED) == PNG_URI


@pytest.mark.parametrize(
    "head", [b"\xff\xd8\xff\xe0", b"GIF89a", b"RIFF\0\0\0\0WEBP", b"BM"], ids=repr
)
async def test_formats_are_recognised_by_their_first_bytes(head: bytes) -> None:
    assert (await media(encoded(head + b"\0" * 32), CLOSED)).startswith("data:image/")


@pytest.mark.parametrize(
    "url",
    [
        "/etc/passwd",
        "/etc/shadow1",  # text whose alphabet and length are those of base64
        "file:///etc/passwd",
        "../../secret.png",
        "C:\\secret.png",
        "ftp://example.org/a.png",
        "data:image/png,%89PNG",
        "data:image/svg+xml;base64," + encoded(b"<svg/>"),
        "data:image/png;base64,",
        "data:image/png;base64,====",
        "data:",
        "",
        "not base64!",
        encoded(b"<html>"),
        PNG_URI + "\x00",
    ],
)
async def test_invalid_images_are_refused(url: str) -> None:
    assert (await refusal(url)).status == 400


@given(st.text(max_size=60))
async def test_any_text_is_an_image_or_a_refusal(url: str) -> None:
    with contextlib.suppress(ApiError):
        assert (await media(url, CLOSED)).startswith("data:image/")


async def test_large_images_are_refused_before_and_after_decoding() -> None:
    for size in (LIMIT + 1, LIMIT + 2, 3 * LIMIT):
        assert (await refusal(encoded(PNG.ljust(size, b"\0")))).status == 413
    await media(encoded(PNG.ljust(LIMIT, b"\0")), CLOSED)


@pytest.mark.parametrize(
    ("head", "kind"),
    [
        (b"\0\0\0\x1cftypisom", "video/mp4"),
        (b"\0\0\0\x1cftypqt  ", "video/mp4"),
        (b"\x1a\x45\xdf\xa3", "video/webm"),
        (b"RIFF\0\0\0\0AVI ", "video/x-msvideo"),
        (b"GIF89a", "image/gif"),
    ],
)
async def test_a_video_is_recognised_by_its_first_bytes(head: bytes, kind: str) -> None:
    content = encoded(head + b"\0" * 40)
    for url in (content, f"data:text/plain;base64,{content}"):
        assert await media(url, CLOSED, "video") == f"data:{kind};base64,{content}"
        assert type_of(url) == kind


async def test_invalid_videos_are_refused() -> None:
    still = encoded(b"\0\0\0\x1cftypavif" + b"\0" * 40)
    for url in (PNG_URI, encoded(WAV), still, "/etc/passwd", "file:///a.mp4", "", "data:"):
        with pytest.raises(ApiError) as raised:
            await media(url, OPEN, "video")
        assert raised.value.status == 400
        assert not type_of(url).startswith("video")
    with pytest.raises(ApiError, match="videos are not fetched"):
        await media("https://example.org/a.mp4", CLOSED, "video")
    with pytest.raises(ApiError) as raised:
        await media(encoded(b"\0\0\0\x1cftypisom".ljust(LIMIT + 1, b"\0")), CLOSED, "video")
    assert raised.value.status == 413


async def test_the_format_of_a_sound_is_checked() -> None:
    assert await audio(encoded(WAV), "wav", CLOSED) == f"data:audio/wav;base64,{encoded(WAV)}"
    mp3 = await audio(encoded(b"ID3\x04" + b"\0" * 20), "mp3", CLOSED)
    assert mp3.startswith("data:audio/mpeg;")
    for data, form in ((encoded(WAV), "mp3"), (encoded(PNG), "wav"), ("/etc/passwd", "wav")):
        with pytest.raises(ApiError):
            await audio(data, form, CLOSED)


async def test_urls_are_off_by_default() -> None:
    error = await refusal("https://example.org/a.png", CLOSED)
    assert "--allow-remote-images" in error.message


@pytest.mark.parametrize(
    "text",
    """0.0.0.0 10.0.0.1 100.64.0.1 127.0.0.1 127.8.8.8 169.254.169.254 172.16.0.1 192.168.1.1
    198.18.0.1 224.0.0.1 240.0.0.1 255.255.255.255 :: ::1 fe80::1 fc00::1 fd00:ec2::254 ff02::1
    ::ffff:127.0.0.1 ::ffff:169.254.169.254 ::127.0.0.1 64:ff9b::7f00:1 64:ff9b:1::a00:1
    2002:7f00:1:: 2001:0:7f00:1:: 2001:db8::1""".split(),
)
def test_private_addresses(text: str) -> None:
    assert not is_public(ipaddress.ip_address(text))


@pytest.mark.parametrize("text", "8.8.8.8 1.1.1.1 2606:4700::1111 ::ffff:8.8.8.8".split())
def test_public_addresses(text: str) -> None:
    assert is_public(ipaddress.ip_address(text))


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/a.png",
        "http://localhost/a.png",
        "http://[::1]/a.png",
        "http://2130706433/a.png",
        "http://0x7f.1/a.png",
        "http://127.1/a.png",
        "http://[::ffff:127.0.0.1]/a.png",
        "http://169.254.169.254/latest/meta-data",
        "http://8.8.8.8:8080/a.png",
        "https://8.8.8.8:22/a.png",
        "http://user:secret@8.8.8.8/a.png",
        "http:///a.png",
        "http://",
        "http://[/a.png",
        "http://8.8.8.8:port/a.png",
    ],
)
async def test_urls_that_are_never_requested(url: str) -> None:
    error = await refusal(url)
    assert error.status == 400
    assert "secret" not in error.message


Answer = Callable[[BaseHTTPRequestHandler], None]


class Site:
    """A web server on loopback; `asked` has the requested paths with their Host."""

    def __init__(self, answers: dict[str, Answer]) -> None:
        self.asked: list[tuple[str, str]] = []
        site = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                site.asked.append((self.path, self.headers["host"]))
                answers[self.path.partition("?")[0]](self)

            def log_message(self, *_: object) -> None:
                """Log nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def url(self, path: str) -> str:
        return f"http://localhost:{self.port}{path}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def file(content: bytes, kind: str = "image/png", status: int = 200, **more: str) -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        handler.send_header("content-type", kind)
        for name, value in more.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(content)

    return answer


def to(place: str) -> Answer:
    return file(b"", status=302, location=place)


def endless(handler: BaseHTTPRequestHandler) -> None:
    file(PNG)(handler)
    try:
        while True:
            handler.wfile.write(b"\0" * 1024)
    except OSError:
        pass  # the client has closed the connection


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    answers = {
        "/a.png": file(PNG),
        "/a.mp4": file(MP4, "video/mp4"),
        "/html": file(PNG, "text/html"),
        "/lie": file(b"<html>"),
        "/missing": file(PNG, status=404),
        "/packed": file(PNG, content_encoding="gzip"),
        "/endless": endless,
        "/once": to("/a.png"),
        "/round": to("/round"),
        "/inside": to("http://169.254.169.254/latest/meta-data"),
        "/file": to("file:///etc/passwd"),
        "/nowhere": to(""),
    }
    server = Site(answers)
    yield server
    server.close()


def only_this(address: Address) -> bool:
    """Whether an address counts as public: here only loopback does."""
    return address.is_loopback


@pytest.fixture
def fetcher(site: Site) -> Fetcher:
    return Fetcher(only_this, (site.port,))


async def test_an_image_is_fetched_by_its_url(site: Site, fetcher: Fetcher) -> None:
    assert await media(site.url("/a.png?size=1"), OPEN, fetcher=fetcher) == PNG_URI
    assert site.asked[-1] == ("/a.png?size=1", f"localhost:{site.port}")
    assert await media(site.url("/once"), OPEN, fetcher=fetcher) == PNG_URI


async def test_a_video_is_fetched_where_a_video_is_expected(site: Site, fetcher: Fetcher) -> None:
    fetched = await media(site.url("/a.mp4"), OPEN, "video", fetcher)
    assert fetched == f"data:video/mp4;base64,{encoded(MP4)}"
    assert (await refusal(site.url("/a.mp4"), fetcher=fetcher)).status == 400
    with pytest.raises(ApiError, match="the video could not be fetched from its URL"):
        await media(site.url("/a.png"), OPEN, "video", fetcher)


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/html", 400),
        ("/lie", 400),
        ("/missing", 400),
        ("/packed", 400),
        ("/endless", 413),
        ("/round", 400),
        ("/inside", 400),
        ("/file", 400),
        ("/nowhere", 400),
    ],
)
async def test_what_a_site_may_not_do(site: Site, fetcher: Fetcher, path: str, status: int) -> None:
    assert (await refusal(site.url(path), fetcher=fetcher)).status == status


async def test_slow_name_servers_hold_no_other_work(monkeypatch: pytest.MonkeyPatch) -> None:
    release, entered = threading.Event(), threading.Semaphore(0)

    def slow(*_: object, **__: object) -> None:
        entered.release()
        release.wait(WAIT)
        raise OSError

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    asked = [
        asyncio.ensure_future(refusal("http://a.example:80/b.png", fetcher=Fetcher()))
        for _ in range(64)
    ]
    await asyncio.to_thread(entered.acquire)
    assert await asyncio.wait_for(asyncio.to_thread(int, "7"), WAIT) == 7
    release.set()
    assert {error.status for error in await asyncio.gather(*asked)} == {400}


async def test_certificates_are_read_once_and_outside_the_loop(
    site: Site, fetcher: Fetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers: list[threading.Thread] = []

    def reading(*call: Any, **named: Any) -> ssl.SSLContext:
        readers.append(threading.current_thread())
        return real(*call, **named)

    real = ssl.create_default_context
    monkeypatch.setattr(ssl, "create_default_context", reading)
    _certificates.cache_clear()
    for _ in range(3):
        assert await media(site.url("/a.png"), OPEN, fetcher=fetcher) == PNG_URI
    assert len(readers) == 1
    assert readers[0] is not threading.current_thread()


async def test_redirects_are_limited(site: Site, fetcher: Fetcher) -> None:
    site.asked.clear()
    await refusal(site.url("/round"), fetcher=fetcher)
    assert len(site.asked) == MOST_REDIRECTS + 1


async def test_the_real_rule_does_not_admit_this_loopback_site(site: Site) -> None:
    site.asked.clear()
    error = await refusal(site.url("/a.png"), fetcher=Fetcher(ports=(site.port,)))
    assert "not public" in error.message
    assert site.asked == []


async def test_fetched_images_together_are_limited_like_a_body(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = 0

    async def fetched(url: str, settings: GatewaySettings, what: str) -> str:
        nonlocal asked
        asked += 1
        return "x" * 1000

    monkeypatch.setattr(images, "media", fetched)
    part = {"type": "image_url", "image_url": {"url": "http://example.com/a.png"}}
    message = ChatMessage.model_validate({"role": "user", "content": [part] * 5})
    settings = replace(OPEN, max_body_bytes=2500)
    with pytest.raises(ApiError) as caught:
        await wire_messages([message], settings, pb.PredictOptions())
    assert (caught.value.status, asked) == (413, 3)
    assert caught.value.param == "messages[0].content[2].image_url"


def test_too_many_urls_are_refused_before_the_first_is_fetched() -> None:
    seeing = {"parameters": {"model": str(ROOT / "tests" / "models" / "tiny_vision")}}
    gateway = GatewayProcess({"tiny": seeing}, "--allow-remote-images")
    try:
        part = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}}
        messages = [{"role": "user", "content": [part] * 17}]
        body = {"model": "tiny", "messages": messages}
        answer = gateway.client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert "at most 16 images" in error["message"]
        assert error["param"] == "messages[0].content[16].image_url"
    finally:
        gateway.close()


def test_an_error_names_the_part_at_fault(gateway: GatewayProcess) -> None:
    def ask(url: str) -> dict[str, str]:
        part = {"type": "image_url", "image_url": {"url": url}}
        answer = gateway.client.post(
            "/v1/chat/completions",
            json={"model": "tiny", "messages": [{"role": "user", "content": [part]}]},
        )
        assert answer.status_code == 400
        error: dict[str, str] = answer.json()["error"]
        return error

    for url in ("http://127.0.0.1:1/a.png", "file:///etc/passwd", "/etc/passwd", "nonsense"):
        assert ask(url)["param"] == "messages[0].content[0].image_url"


async def test_a_large_image_is_decoded_on_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding it takes long, and streams go on meanwhile; a small one is decoded at once."""
    here, places = threading.get_ident(), []

    def decoded(*given: Any) -> bytes:
        places.append(threading.get_ident() == here)
        return unchanged(*given)

    unchanged = images._decoded
    monkeypatch.setattr(images, "_decoded", decoded)
    begun().long = True
    settings = replace(CLOSED, max_image_bytes=1 << 20)
    for content in (PNG, PNG + bytes(1 << 19)):
        await media(encoded(content), settings)
    assert places == [True, False]

"""A local copy of the hub: the few calls of its client, served from a folder of real files."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" + "0" * 34


class Hub(ThreadingHTTPServer):
    """Serves `repositories` (id → folder); `gated` ones are listed but cannot be read.

    Of a file whose name is in `held`, half is sent; then `half_sent` is set, and the rest follows
    once `go_on` is set.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, Path] = {}
        self.gated: set[str] = set()
        self.blocked: set[str] = set()
        self.half_sent = threading.Event()
        self.go_on = threading.Event()
        self.failing = False
        self.sent: list[str] = []
        self.calls = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a client that disconnected; some tests provoke that."""


@contextmanager
def running_hub() -> Iterator[Hub]:
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield hub
    finally:
        hub.go_on.set()
        hub.shutdown()
        thread.join()
        hub.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        return

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, with_body: bool) -> None:
        self.server.calls += 1
        parts = [unquote(part) for part in urlsplit(self.path).path.split("/") if part]
        is_api = parts[:2] == ["api", "models"]
        parts = parts[2:] if is_api else parts
        repository, verb, rest = "/".join(parts[:2]), "".join(parts[2:3]), parts[3:]
        folder = self.server.repositories.get(repository)
        if self.server.failing:
            self._refuse(500, "InternalError")
        elif folder is None:
            self._refuse(404, "RepoNotFound")
        elif repository in self.server.gated:
            self._refuse(403, "GatedRepo")
        elif rest and rest[0] not in ("main", COMMIT):
            self._refuse(404, "RevisionNotFound")
        elif is_api and verb == "tree":
            self._send_json([_entry(folder, path) for path in _files(folder)])
        elif is_api:
            names = [{"rfilename": path} for path in _files(folder)]
            self._send_json({"id": repository, "sha": COMMIT, "siblings": names, "tags": []})
        elif (folder / "/".join(rest[1:])).is_file():
            self._send_file(folder, "/".join(rest[1:]), with_body)
        else:
            self._refuse(404, "EntryNotFound")

    def _refuse(self, status: int, code: str) -> None:
        self._head(status, 0, {"X-Error-Code": code, "X-Error-Message": code})

    def _send_json(self, value: Any) -> None:
        body = json.dumps(value).encode()
        self._head(200, len(body), {"Content-Type": "application/json"})
        self.wfile.write(body)

    def _send_file(self, folder: Path, name: str, with_body: bool) -> None:
        body = (folder / name).read_bytes()
        self._head(200, len(body), {"ETag": f'"{_digest(body)}"', "X-Repo-Commit": COMMIT})
        if not with_body:
            return
        hub = self.server
        hub.sent.append(name)
        with suppress(ConnectionError):
            if name in hub.blocked:
                self.wfile.write(body[: len(body) // 2])
                self.wfile.flush()
                hub.half_sent.set()
                hub.go_on.wait()
                body = body[len(body) // 2 :]
            self.wfile.write(body)

    def _head(self, status: int, length: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(length)}).items():
            self.send_header(name, value)
        self.end_headers()


def _files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def _entry(folder: Path, name: str) -> dict[str, Any]:
    body = (folder / name).read_bytes()
    return {"type": "file", "path": name, "size": len(body), "oid": _digest(body)}


def _digest(body: bytes) -> str:
    return hashlib.sha1(body, usedforsecurity=False).hexdigest()

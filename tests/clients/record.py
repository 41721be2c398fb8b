"""Records what programs send: `python -m tests.clients.record FILE COMMAND…`.

The command runs with BASE_URL in its environment and in its arguments (`{url}`); what it sends
passes through to a gateway with the scripted model. The bodies are reduced to what
distinguishes one client from another, and written to tests/clients/recorded/FILE.json.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import httpx

from tests.clients.scripted_model import ScriptedModel
from tests.gateway.gateway_process import GatewayProcess

FOLDER = Path(__file__).parent / "recorded"
ALIASES = ["gpt-4o", "claude-sonnet-4-5", "claude-haiku-4-5-20251001"]
_LONGEST = 80  # characters of a text
_PRIVATE = re.compile(
    r"(/root|/work|/tmp|/home)[^\s\"']*|[0-9a-f]{8}-[0-9a-f-]{27}|\b[0-9a-f]{32,}\b"
)
_SECONDS = 600


def trimmed(value: Any, key: str = "") -> Any:
    """The body with its structure: texts and schemas are shortened, and one tool of each shape is
    kept.
    """
    if isinstance(value, str):
        if key == "arguments":  # JSON, and short: the test's model answers anyway
            return value
        return _PRIVATE.sub("x", value)[:_LONGEST] if len(value) < 4000 else value[:_LONGEST]
    if isinstance(value, list):
        entries = [trimmed(each) for each in value]
        if key != "tools":
            return entries
        shapes = {json.dumps(_shape(each)): each for each in reversed(entries)}
        return list(reversed(shapes.values()))
    if isinstance(value, dict):
        return {name: trimmed(each, name) for name, each in value.items()}
    return value


def _shape(tool: Any) -> Any:
    """The fields of a tool, and its type."""
    if not isinstance(tool, dict):
        return type(tool).__name__
    inner = dict.fromkeys(tool, "")
    if isinstance(tool.get("function"), dict):
        inner["function"] = json.dumps(sorted(tool["function"]))
    return inner | {"type": tool.get("type")}


class _Recorder(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    gateway = ""
    seen: ClassVar[list[dict[str, Any]]] = []

    def do_GET(self) -> None:
        self._pass("GET", b"")

    def do_HEAD(self) -> None:
        self._pass("HEAD", b"")

    def do_DELETE(self) -> None:
        self._pass("DELETE", b"")

    def do_POST(self) -> None:
        if self.headers.get("transfer-encoding") == "chunked":
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
        self._pass("POST", body)

    def _pass(self, method: str, body: bytes) -> None:
        kept = ("accept", "content-type", "authorization", "x-api-key", "anthropic-version")
        headers = {name: self.headers[name] for name in kept if name in self.headers}
        answer = httpx.request(
            method, self.gateway + self.path, content=body, headers=headers, timeout=_SECONDS
        )
        if body:
            ignored = answer.headers.get("x-ignored-fields", "")
            print(answer.status_code, self.path, ignored, file=sys.stderr)
            if answer.status_code != 200:
                print(answer.text[:500], file=sys.stderr)
            self.seen.append({"path": self.path.partition("?")[0], "body": json.loads(body)})
        self.send_response(answer.status_code)
        self.send_header("content-type", answer.headers.get("content-type", "text/plain"))
        self.send_header("content-length", str(len(answer.content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.content)

    def log_message(self, *_: Any) -> None: ...


def main() -> int:
    """Run the command and write what it sent."""
    name, *command = sys.argv[1:]
    model = ScriptedModel()
    file = {"parameters": {"model": "m"}, "address": model.address, "aliases": ALIASES}
    gateway = GatewayProcess({"tiny": file})
    _Recorder.gateway = gateway.url
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Recorder)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    filled = [part.replace("{url}", url) for part in command]
    try:
        code = subprocess.run(filled, check=False, timeout=_SECONDS, stdin=subprocess.DEVNULL)
        print("exit code", code.returncode, file=sys.stderr)
    finally:
        server.shutdown()
        gateway.close()
        model.close()
    recorded = [trimmed(each) for each in _Recorder.seen]
    (FOLDER / f"{name}.json").write_text(json.dumps(recorded, indent=1, ensure_ascii=False) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

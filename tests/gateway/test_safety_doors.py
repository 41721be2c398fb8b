"""Keys, hosts and origins: who has access, and what a web page may do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from urllib.parse import urlsplit

import httpx
import pytest

from tests.gateway.gateway_process import GatewayProcess, tiny

FIRST, SECOND = "first-key-of-two", "second-key-of-two"
PAGE = "http://localhost:3000"


@pytest.fixture(scope="module")
def locked() -> Iterator[GatewayProcess]:
    """A gateway with two keys that a page at PAGE may call."""
    process = GatewayProcess(
        {"tiny": tiny()}, "--cors-origin", PAGE, MLX_GATEWAY_API_KEYS=f"{FIRST},{SECOND}"
    )
    yield process
    process.close()


def models(gateway: GatewayProcess, **headers: str) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return gateway.client.get("/v1/models", headers=named)


def test_either_key_works_in_either_header(locked: GatewayProcess) -> None:
    for key in (FIRST, SECOND):
        assert models(locked, authorization=f"Bearer {key}").status_code == 200
        assert models(locked, authorization=f"bearer  {key}").status_code == 200
        assert models(locked, x_api_key=key).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer"},
        {"authorization": f"Basic {FIRST}"},
        {"authorization": FIRST},
        {"authorization": f"Bearer {FIRST}x"},
        {"authorization": f"Bearer {FIRST[:-1]}"},
        {"authorization": f"Bearer {FIRST},{SECOND}"},
        {"x-api-key": FIRST.upper()},
    ],
)
def test_nothing_else_works(locked: GatewayProcess, headers: dict[str, str]) -> None:
    answer = locked.client.get("/v1/models", headers=headers)
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("count", [0, 2])
def test_a_request_has_one_host_header(locked: GatewayProcess, count: int) -> None:
    place = urlsplit(locked.url)
    with closing(HTTPConnection(place.hostname or "", place.port)) as link:
        link.putrequest("GET", "/v1/models", skip_host=True)
        for _ in range(count):
            link.putheader("host", place.netloc)
        link.putheader("x-api-key", FIRST)
        link.endheaders()
        answer = link.getresponse()
        assert answer.status == 400
        assert f"the request has {count} Host headers" in answer.read().decode()


@pytest.mark.parametrize("target", ["http://evil.example", "http://evil.example:80", "x://evil"])
def test_a_host_in_the_request_target_counts_instead_of_the_header(
    gateway: GatewayProcess, target: str
) -> None:
    place = urlsplit(gateway.url)
    for origin, status in (
        *((f"{target}{end}", 403) for end in ("/v1/models", "", "?x", "?x=/y")),
        *((f"http://{place.netloc}{end}", 200) for end in ("/v1/models", "", "?x=/y")),
    ):
        with closing(HTTPConnection(place.hostname or "", place.port)) as link:
            link.request("GET", origin, headers={"host": place.netloc})
            answer = link.getresponse()
            assert answer.status == status
            assert (b"is not allowed" in answer.read()) == (status == 403)


def test_a_key_with_non_ascii_bytes_is_wrong(locked: GatewayProcess) -> None:
    headers = {b"x-api-key": "schlüssel".encode()}
    assert locked.client.get("/v1/models", headers=headers).status_code == 401


def test_endpoints_without_a_key_reveal_nothing_about_the_models(locked: GatewayProcess) -> None:
    for path in (
        "/",
        "/health",
        "/ping",
        "/v1/health",
        "/ready",
        "/docs",
        "/openapi.json",
        "/page/main.js",
    ):
        answer = locked.client.get(path)
        assert answer.status_code == 200, path
        assert "tiny" not in answer.text, path
    for path in ("/metrics", "/models", "/v1/models/tiny", "/api/status", "/nowhere", "/pages"):
        assert locked.client.get(path).status_code == 401, path


def test_a_body_is_read_only_after_the_key_was_checked(locked: GatewayProcess) -> None:
    answer = locked.client.post("/v1/chat/completions", content=b"{")
    assert answer.status_code == 401


def test_keys_never_reach_the_log(locked: GatewayProcess) -> None:
    models(locked, authorization=f"Bearer {FIRST}")
    models(locked, authorization="Bearer wrong-but-secret")
    log = "\n".join(locked.log)
    assert FIRST not in log
    assert "wrong-but-secret" not in log


def test_a_listed_origin_may_call_and_read(locked: GatewayProcess) -> None:
    asked = locked.client.options(
        "/v1/chat/completions",
        headers={
            "origin": PAGE,
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type,x-stainless-os",
            "access-control-request-private-network": "true",
        },
    )
    assert asked.status_code == 200
    assert asked.headers["access-control-allow-origin"] == PAGE
    assert "POST" in asked.headers["access-control-allow-methods"]
    assert "authorization" in asked.headers["access-control-allow-headers"]
    assert asked.headers["access-control-allow-credentials"] == "true"
    assert asked.headers["access-control-allow-private-network"] == "true"
    for key, status in ((FIRST, 200), ("wrong-key", 401)):
        answer = models(locked, origin=PAGE, authorization=f"Bearer {key}")
        assert answer.status_code == status
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
        assert "origin" in answer.headers["vary"].lower()


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://localhost:3001", "https://localhost:3000", ""]
)
def test_other_origins_may_not(locked: GatewayProcess, origin: str) -> None:
    for method in ("GET", "OPTIONS"):
        answer = locked.client.request(
            method, "/v1/models", headers={"origin": origin, "authorization": f"Bearer {FIRST}"}
        )
        assert answer.status_code == 403
        assert answer.json()["error"]["code"] == "origin_not_allowed"
        assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(
    "origin",
    ["app://obsidian.md", "tauri://localhost", "vscode-webview://0a1b", "vscode-file://vscode-app"],
)
def test_a_desktop_programs_page_may_call_and_read(gateway: GatewayProcess, origin: str) -> None:
    for method in ("GET", "OPTIONS"):
        answer = gateway.client.request(method, "/v1/models", headers={"origin": origin})
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == origin
    for other in ("http://app://obsidian.md", "http://tauri.evil.example", "chrome-extension://a"):
        assert models(gateway, origin=other).status_code == 403


def test_the_gateways_own_page_needs_no_list(gateway: GatewayProcess) -> None:
    assert models(gateway, origin=gateway.url).status_code == 200
    assert models(gateway, origin="http://evil.example").status_code == 403


def test_a_rebound_host_name_is_refused_without_a_key(gateway: GatewayProcess) -> None:
    port = gateway.url.rpartition(":")[2]
    for host in (
        *("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "", "["),
        *("192.168.0.1", "128.0.0.1", "0.0.0.0", "[::2]", "127.0.0.256"),
    ):
        answer = gateway.client.get("/v1/models", headers={"host": host})
        assert answer.status_code in (400, 403), host  # 400 comes from uvicorn, for an invalid host
        # A page with such a name is same-origin: only the host shows that it is foreign.
        same = {"host": host, "origin": f"http://{host}"}
        assert gateway.client.get("/v1/models", headers=same).status_code in (400, 403), host
    for host in (
        *("localhost", f"localhost:{port}", "LOCALHOST", f"[::1]:{port}", "127.0.0.1"),
        *("127.0.0.2", f"127.255.255.254:{port}"),
    ):
        assert models(gateway, host=host).status_code == 200, host


def test_a_plain_options_request_gets_the_allowed_methods(gateway: GatewayProcess) -> None:
    answer = gateway.client.options("/v1/chat/completions")
    assert answer.status_code == 200
    assert "POST" in answer.headers["allow"]
    assert "access-control-allow-origin" not in answer.headers


def test_an_html_form_is_refused(gateway: GatewayProcess) -> None:
    """A browser sends forms to other origins without asking, but never as application/json."""
    own = str(gateway.client.base_url)
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
        answer = gateway.client.post(
            "/v1/tokenize",
            content=b'{"content": "a"}',
            headers={"content-type": kind, "origin": own},
        )
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "unsupported_content_type"


def test_a_program_need_not_name_the_content_type(gateway: GatewayProcess) -> None:
    """`curl -d` names the type of a form, as in Ollama's documentation; LiteLLM calls Ollama so."""
    for kind in ("application/x-www-form-urlencoded", "application/octet-stream", ""):
        answer = gateway.client.post(
            "/v1/tokenize", content=b'{"content": "a"}', headers={"content-type": kind}
        )
        assert answer.status_code == 200, answer.text


def test_no_path_of_a_request_reaches_a_file(gateway: GatewayProcess) -> None:
    for path in (
        "/page/../settings.py",
        "/page/%2e%2e/settings.py",
        "/docs/static/%2e%2e/%2e%2e/pip/__init__.py",
        "/docs/static//etc/passwd",
        "/v1/models/../../etc/passwd",
        "/v1/models/%2fetc%2fpasswd",
    ):
        assert gateway.client.get(httpx.URL(gateway.url + path)).status_code == 404, path

"""A backend that logs only errors still prints its address, which the gateway waits for."""

from __future__ import annotations

from tests.gateway.gateway_process import GatewayProcess, tiny


def test_a_backend_that_logs_only_errors_is_found() -> None:
    gateway = GatewayProcess({"tiny": tiny()}, MLX_BACKEND_LOG="error")
    try:
        body = {"model": "tiny", "prompt": "Hi", "max_tokens": 2}
        assert gateway.client.post("/v1/completions", json=body).status_code == 200
    finally:
        gateway.close()

"""Schemathesis on the OpenAPI schema: no 5xx, and nothing that the schema does not say."""

from __future__ import annotations

from tests.clients.environments import client_tool
from tests.gateway.gateway_process import GatewayProcess, tiny

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
)


def test_the_schema_holds() -> None:
    """Answers are kept short, because what is tried here is the form of requests."""
    short = tiny(context_size=96)
    short["parameters"]["max_tokens"] = 8
    gateway = GatewayProcess({"tiny": short})
    try:
        # It is made at the first look, and the tool waits 10 s for it.
        assert gateway.client.get("/openapi.json").status_code == 200
        client_tool(
            "schemathesis",
            *("run", f"{gateway.url}/openapi.json", "--checks", ",".join(CHECKS)),
            *("--phases", "examples,coverage,fuzzing", "--max-examples", "20"),
            *("--seed", "1", "--no-color", "--suppress-health-check", "all"),
        )
    finally:
        gateway.close()

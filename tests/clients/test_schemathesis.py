"""Schemathesis on the OpenAPI schema: no 5xx, and no answer that violates the schema."""

from __future__ import annotations

from tests.clients.environments import HERE, client_tool
from tests.gateway.gateway_process import GatewayProcess, tiny
from tests.long import TEST_LONG

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
)


def test_answers_match_the_schema() -> None:
    """Answers are kept short, because only the form of requests is varied.

    Without TEST_LONG a hook lets every fourth of the derived cases through, and none are derived
    for /v1/messages, for which that takes 15 s.
    """
    short = tiny(context_size=96)
    short["parameters"]["max_tokens"] = 8
    sample = HERE / "programs" / "schemathesis_sample"
    config = () if TEST_LONG else ("--config-file", f"{sample}.toml")
    hooks = {} if TEST_LONG else {"SCHEMATHESIS_HOOKS": f"{sample}.py"}
    gateway = GatewayProcess({"tiny": short})
    try:
        # The document is built at the first request, and the tool waits 10 s for it.
        assert gateway.client.get("/openapi.json").status_code == 200
        client_tool(
            "schemathesis",
            *config,
            *("run", f"{gateway.url}/openapi.json", "--checks", ",".join(CHECKS)),
            *("--phases", "examples,coverage,fuzzing"),
            *("--max-examples", "100" if TEST_LONG else "20"),
            *("--seed", "1", "--no-color", "--suppress-health-check", "all"),
            **hooks,
        )
    finally:
        gateway.close()

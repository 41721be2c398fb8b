"""Prometheus' figures are consistent, and clients cannot make the number of labels grow."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.engine.experts.checkpoints import FORMS, write_experts
from tests.gateway.asking import chat
from tests.gateway.gateway_process import ROOT, GatewayProcess, tiny

Sample = tuple[str, frozenset[tuple[str, str]]]
TINY, EXPERTS = (frozenset({("model", name)}) for name in ("tiny", "experts"))


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """A gateway with a model that drafts, and one whose experts stay in its files.

    So it reports every metric.
    """
    folder = tmp_path_factory.mktemp("experts") / "qwen"
    write_experts(folder, FORMS["Qwen3, of mlx-lm"])
    experts = tiny(parameters={"model": str(folder)}, options=["expert_cache_mib:1"])
    process = GatewayProcess({"tiny": tiny(options=["prompt_lookup:true"]), "experts": experts})
    yield process
    process.close()


def scrape(gateway: GatewayProcess) -> dict[Sample, float]:
    answer = gateway.client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def scrape_with_model(
    gateway: GatewayProcess, model: frozenset[tuple[str, str]] = TINY
) -> dict[Sample, float]:
    """Scrape until the model's backend answers within the time that a scrape allows."""
    while ("gateway_model_generated_tokens_total", model) not in (found := scrape(gateway)):
        pass
    return found


def value(found: dict[Sample, float], name: str, **labels: str) -> float:
    return found.get((name, frozenset(labels.items())), 0.0)


def test_an_answer_is_counted_once_with_its_tokens(gateway: GatewayProcess) -> None:
    before = scrape(gateway)
    usage = chat(gateway)["usage"]
    after = scrape_with_model(gateway)

    def grown(name: str, **labels: str) -> float:
        return value(after, name, **labels) - value(before, name, **labels)

    path = "/chat/completions"
    assert grown("gateway_requests_total", method="POST", path=path, status="200") == 1
    assert grown("gateway_prompt_tokens_total", path=path) == usage["prompt_tokens"]
    assert grown("gateway_completion_tokens_total", path=path) == usage["completion_tokens"]
    assert grown("gateway_first_byte_seconds_count", path=path) == 1
    assert grown("gateway_request_seconds_sum", path=path) > 0
    assert value(after, "gateway_model_state", model="tiny", state="ready") == 1
    assert value(after, "gateway_model_memory_bytes", model="tiny") > 0
    assert ("gateway_model_tokens_per_second", TINY) in after
    assert grown("gateway_model_generated_tokens_total", model="tiny") > 0


def test_the_durations_of_an_answer_are_reported_by_model(gateway: GatewayProcess) -> None:
    before = scrape(gateway)
    chat(gateway, stream=False)
    after = scrape(gateway)

    def grown(name: str) -> float:
        return value(after, name, model="tiny") - value(before, name, model="tiny")

    assert grown("gateway_model_first_token_seconds_count") == 1
    assert grown("gateway_model_queue_seconds_count") == 1
    assert grown("gateway_model_inter_token_seconds_count") >= 1
    first, queue = (grown(f"gateway_model_{name}_seconds_sum") for name in ("first_token", "queue"))
    assert 0 <= queue <= first


def test_draft_tokens_are_counted_by_model(gateway: GatewayProcess) -> None:
    """The gateway reports what the backend counts."""
    counted = "1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4,"
    asked = {"model": "tiny", "prompt": counted, "max_tokens": 64, "ignore_eos": True}
    assert gateway.client.post("/v1/completions", json=asked).status_code == 200
    found = scrape_with_model(gateway)
    checked = found["gateway_model_draft_tokens_total", TINY]
    assert checked > 0
    assert 0 <= found["gateway_model_draft_accepted_tokens_total", TINY] <= checked
    assert found["gateway_model_draft_width", TINY] >= 0
    assert found["gateway_model_draft_gain", TINY] > 0


def test_experts_are_counted_by_model(gateway: GatewayProcess) -> None:
    _ask_experts(gateway)
    found = scrape_with_model(gateway, EXPERTS)
    assert found["gateway_model_expert_misses_total", EXPERTS] > 0
    assert found["gateway_model_expert_hits_total", EXPERTS] > 0
    assert found["gateway_model_expert_read_bytes_total", EXPERTS] > 1000
    assert found["gateway_model_expert_wait_seconds_total", EXPERTS] > 0
    assert found["gateway_model_expert_ahead_hits_total", EXPERTS] >= 0
    assert found["gateway_model_expert_wasted_bytes_total", EXPERTS] >= 0
    assert ("gateway_model_expert_hits_total", TINY) not in found


def _ask_experts(gateway: GatewayProcess) -> None:
    asked = {"model": "experts", "prompt": "one two three", "max_tokens": 8, "ignore_eos": True}
    assert gateway.client.post("/v1/completions", json=asked).status_code == 200


def test_every_metric_of_the_dashboard_exists(gateway: GatewayProcess) -> None:
    chat(gateway)
    _ask_experts(gateway)
    found = {name for model in (TINY, EXPERTS) for name, _ in scrape_with_model(gateway, model)}
    dashboard = json.loads((ROOT / "docs" / "grafana.json").read_text("utf-8"))
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked = {name for query in queries for name in re.findall(r"\bgateway_\w+", query)}
    assert asked <= found
    # Every metric is used in a panel, too.
    shown = {re.sub("_(bucket|sum|count)$", "", name) for name in asked}
    assert {re.sub("_(bucket|sum|count)$", "", name) for name in found} == shown


def test_a_clients_text_is_never_a_label(gateway: GatewayProcess) -> None:
    gateway.client.get("/made/up/path")
    gateway.client.request("PROPFIND", "/v1/models")
    gateway.client.post("/v1/tokenize", json={"model": "made-up", "content": "a"})
    text = gateway.client.get("/metrics").text
    assert "made-up" not in text
    assert "made/up" not in text
    assert "PROPFIND" not in text
    found = scrape(gateway)
    assert value(found, "gateway_requests_total", method="GET", path="other", status="404") > 0


def test_a_request_is_logged_without_its_content(gateway: GatewayProcess) -> None:
    answer = gateway.client.post(
        "/v1/tokenize",
        json={"model": "tiny", "content": "a secret plan"},
        headers={"x-request-id": "look-here"},
    )
    assert answer.status_code == 200
    line = gateway.line_with("request=look-here")
    for word in ("level=info", "event=request", "method=POST", "path=/v1/tokenize", "status=200"):
        assert word in line
    assert "model=tiny" in line
    assert "secret plan" not in "\n".join(gateway.log)


def test_periodic_requests_are_not_logged(gateway: GatewayProcess) -> None:
    gateway.client.get("/health", headers={"x-request-id": "the-probe"})
    gateway.client.get("/v1/models", headers={"x-request-id": "the-next"})
    gateway.line_with("request=the-next")
    assert not any("the-probe" in line for line in gateway.log)

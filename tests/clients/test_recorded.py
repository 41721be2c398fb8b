"""Every body that real programs sent is answered in the form that it asked for.

`tests/clients/recorded/` has what each program sent in a turn with a tool call, reduced to its
structure by `tests.clients.record`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.clients.record import ALIASES, FOLDER
from tests.clients.scripted_model import ScriptedModel
from tests.gateway.gateway_process import GatewayProcess

RECORDED = [
    pytest.param(each, id=f"{file.stem}-{at}")
    for file in sorted(FOLDER.glob("*.json"))
    for at, each in enumerate(json.loads(file.read_text(encoding="utf-8")))
]
# The last event of these APIs' streams.
ENDS = {
    "/v1/chat/completions": "data: [DONE]",
    "/v1/messages": '"type": "message_stop"',
    "/v1/responses": '"type": "response.completed"',
    "/api/chat": '"done": true',
    "/api/generate": '"done": true',
    "/v1/completions": "data: [DONE]",
    "/completion": '"stop": true',
    "/infill": '"stop": true',
}


@pytest.fixture(scope="module")
def gateway() -> Iterator[GatewayProcess]:
    model = ScriptedModel()
    file = {"parameters": {"model": "m"}, "address": model.address, "aliases": ALIASES}
    process = GatewayProcess({"tiny": file})
    yield process
    process.close()
    model.close()


@pytest.mark.parametrize("sent", RECORDED)
def test_a_recorded_request_is_answered(gateway: GatewayProcess, sent: dict[str, Any]) -> None:
    answer = gateway.client.post(sent["path"], json=sent["body"])
    if "thread" in sent["body"]:  # after this error, Anthropic's SDKs send the whole conversation
        assert answer.json()["error"]["details"] == {"error_code": "thread_unsupported_request"}
        return
    assert answer.status_code == 200, answer.text
    # Ollama's API streams unless the request says otherwise.
    streams = sent["body"].get("stream", sent["path"].startswith("/api/"))
    if streams:
        assert ENDS[sent["path"]] in answer.text
        assert '"error": {' not in answer.text.replace('"error": null', "")
    answered = answer.text if streams else json.dumps(answer.json())
    # Text, a call, or what a response format allows.
    assert any(words in answered for words in ("All done.", "call_1", '\\"ls\\"', '"{}"'))


def test_recordings_contain_nothing_of_a_machine() -> None:
    assert len(list(FOLDER.glob("*.json"))) >= 6
    for file in FOLDER.glob("*.json"):
        text = file.read_text(encoding="utf-8")
        assert not any(place in text for place in ("/root", "/tmp", "/work", "/home")), file

"""Agents and their libraries, whose own code must recognise a prompt that does not fit.

`tests/gateway/test_full_context.py` lists what the programs look for that cannot be run here.
"""

from __future__ import annotations

import pytest

from tests.clients.environments import node_program, python_program
from tests.gateway.gateway_process import GatewayProcess

COUNTED, ESTIMATED = "2000", "300000"  # tokens


@pytest.mark.parametrize("tokens", [COUNTED, ESTIMATED], ids=["counted", "estimated"])
def test_pi_compacts(gateway: GatewayProcess, tokens: str) -> None:
    recognised = ["error", True]
    assert node_program("full_context", gateway.url, tokens) == {
        "openai-completions": recognised,
        "openai-responses": recognised,
        "anthropic-messages": recognised,
    }


def test_litellm_and_langchain_raise_their_own_exception(gateway: GatewayProcess) -> None:
    environ = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    counted, estimated = python_program("full_context", gateway.url, COUNTED, ESTIMATED, **environ)
    assert counted == estimated
    assert counted["openai"] == counted["anthropic"] == ["BadRequestError", False]
    assert counted["litellm"] == [["ContextWindowExceededError", False]] * 5  # aider, OpenHands
    assert counted["langchain"] == [["OpenAIContextOverflowError", True]] * 4

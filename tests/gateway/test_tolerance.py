"""Requests as programs send them: fields without meaning here are left out and listed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from gateway.errors import ApiError
from gateway.exchange import LONGEST_NAME, MOST_IGNORED
from gateway.openai.chat_request import ChatCompletionRequest
from gateway.repairs import MOST_REPAIRS
from tests.gateway.gateway_process import GatewayProcess
from tests.gateway.requests_begun import begun

SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
READ = {"name": "read", "description": "Read a file.", "parameters": SCHEMA}
NESTED = {"type": "function", "function": READ}
CACHED = {"type": "ephemeral", "ttl": "2h", "scope": "org"}
HI = [{"role": "user", "content": "Hi"}]
THOUGHTS = [{"type": "thinking", "thinking": "A"}, {"type": "text", "text": "Hi"}]
THOUGHT = "messages[].content[][thinking]"
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
SHORT: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI, "max_tokens": 4},
    MESSAGES: {"messages": HI, "max_tokens": 4},
    RESPONSES: {"input": "Hi", "max_output_tokens": 4},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 4},
}

CLAUDE_CODE = {
    "max_tokens": 4,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.330; cch=1;"},
        {"type": "text", "text": "You are an agent.", "cache_control": CACHED},
    ],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Look.", "cache_control": CACHED}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "A file.", "signature": "c2ln"},
                {"type": "server_tool_use", "id": "s1", "name": "tool_search", "input": {"q": 1}},
                {"type": "tool_use", "id": "t1", "name": "read", "input": {"path": "a"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "t1",
                    "content": [{"type": "tool_reference", "tool_name": "read"}],
                },
                {
                    "type": "document",
                    "source": {"type": "text", "media_type": "text/plain", "data": "notes"},
                },
            ],
        },
        {"role": "system", "content": "A reminder."},
    ],
    "tools": [
        {"name": "read", "input_schema": SCHEMA, "defer_loading": True},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
        {"type": "mcp_toolset", "mcp_server_name": "files"},
    ],
    "thinking": {"type": "enabled", "budget_tokens": 31999, "display": "updates"},
    "output_config": {"effort": "medium", "task_budget": {"type": "tokens", "total": 64000}},
    "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
    "metadata": {"user_id": "u", "organization": "o"},
    "mcp_servers": [{"type": "url", "url": "https://x", "name": "files"}],
    "speed": "fast",
}
CODEX = {
    "instructions": "You are an agent.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "A"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Look."}]},
        {"type": "reasoning", "summary": [], "encrypted_content": "e", "internal": {}},
        {"type": "web_search_call", "id": "ws_1", "action": {"type": "search", "query": "q"}},
        {
            "type": "function_call",
            "call_id": "c0",
            "name": "read",
            "arguments": "{}",
            "namespace": "mcp__files",
        },
        {"type": "function_call_output", "call_id": "c0", "output": "none"},
        {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "***"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
    ],
    "tools": [
        {"type": "function", **READ, "strict": False, "output_schema": {"type": "object"}},
        {
            "type": "custom",
            "name": "apply_patch",
            "description": "Edit files.",
            "format": {"type": "grammar", "syntax": "lark", "definition": "start: /x/"},
        },
        {"type": "namespace", "name": "mcp__files", "tools": [{"type": "function", **READ}]},
        {"type": "web_search", "external_web_access": False},
        {"type": "image_generation", "output_format": "png"},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto", "context": "all"},
    "text": {"verbosity": "medium"},
    "store": False,
    "include": ["reasoning.encrypted_content", "web_search_call.action.sources"],
    "prompt_cache_key": "k",
    "client_metadata": {"x-codex-installation-id": "i"},
    "service_tier": "priority",
    "max_output_tokens": 4.0,
}
LITELLM_AGENT = {
    "messages": [
        {"role": "user", "content": "Look.", "id": "m1", "timestamp": 1.5},
        {
            "role": "assistant",
            "content": "A file.",
            "provider_specific_fields": {"refusal": None, "citations": []},
            "thinking_blocks": [{"type": "thinking", "thinking": "A", "signature": "s"}],
            "reasoning_details": [{"type": "reasoning.text", "text": "A", "format": None}],
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "index": 0,
                    "function": {"name": "read", "arguments": "{}"},
                    "provider_specific_fields": {"thought_signature": "s"},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "ok", "cache_control": CACHED},
    ],
    "tools": [NESTED | {"cache_control": CACHED}],
    "max_tokens": 4.0,
    "api_key": "none",
}
GROK_CLI = {
    "messages": HI,
    "tools": [NESTED],
    "tool_choice": "auto",
    "max_tokens": 4,
    "search_parameters": {"mode": "off"},
}
OPENROUTER_CLIENT = {
    "messages": [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi", "cache_control": CACHED}]}
    ],
    "max_tokens": 4,
    "reasoning": {"effort": "low", "exclude": False},
    "usage": {"include": True},
    "provider": {"order": ["a"]},
    "transforms": ["middle-out"],
    "plugins": [{"id": "web"}],
    "stream_options": {"include_usage": True, "include_obfuscation": True},
}
OPEN_WEBUI = {
    "messages": HI,
    "max_tokens": 4,
    "keep_alive": "5m",
    "options": {"num_ctx": 8192, "temperature": 0.5},
    "chat_id": "c",
    "session_id": "s",
    "features": {"web_search": True},
    "variables": {"{{USER_NAME}}": "u"},
}
DEFAULTS_OF_SERVERS = {
    "messages": HI,
    "max_tokens": 4,
    "use_beam_search": False,
    "length_penalty": 1.0,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "stop_token_ids": [],
    "include_stop_str_in_output": False,
    "dry_multiplier": 0.8,
    "mirostat_tau": 5.0,
    "dynatemp_range": 0.0,
    "samplers": ["top_k", "temperature"],
    "timings_per_token": True,
    "return_progress": True,
    "logprobs": True,
    "top_logprobs": 50,
    "truncate_prompt_tokens": -1,
    "t_max_predict_ms": -1,
    "structured_outputs": {"regex": "a+", "disable_fallback": False, "whitespace_pattern": None},
}


def ignored(answer: Any) -> list[str]:
    found = answer.headers.get("x-ignored-fields", "")
    return found.split(",") if found else []


@pytest.mark.parametrize(
    ("path", "body", "names"),
    [
        (
            MESSAGES,
            CLAUDE_CODE,
            {
                "system[].cache_control",
                "messages[].content[].cache_control",
                "messages[].content[][server_tool_use]",
                "messages[].content[].content[][tool_reference]",
                "messages[].content[][document]",
                "tools[].defer_loading",
                "tools[][web_search_20250305]",
                "tools[][mcp_toolset]",
                "output_config.task_budget",
                "context_management",
                "metadata",
                "mcp_servers",
                "speed",
            },
        ),
        (
            RESPONSES,
            CODEX,
            {
                "input[].internal",
                "input[][web_search_call]",
                "input[][reasoning]",
                "tools[].output_schema",
                "tools[].format",
                "tools[][web_search]",
                "tools[][image_generation]",
                "reasoning.context",
                "include[]",
                "client_metadata",
                "service_tier",
            },
        ),
        (
            CHAT,
            LITELLM_AGENT,
            {
                "messages[].id",
                "messages[].timestamp",
                "messages[].provider_specific_fields",
                "messages[].tool_calls[].index",
                "messages[].tool_calls[].provider_specific_fields",
                "messages[].cache_control",
                "tools[].cache_control",
                "api_key",
            },
        ),
        (CHAT, GROK_CLI, {"search_parameters"}),
        (
            CHAT,
            OPENROUTER_CLIENT,
            {
                "messages[].content[][input_text]",
                "usage",
                "provider",
                "transforms",
                "plugins",
                "stream_options.include_obfuscation",
            },
        ),
        (
            CHAT,
            OPEN_WEBUI,
            {"keep_alive", "options.num_ctx", "chat_id", "session_id", "features", "variables"},
        ),
        (
            CHAT,
            DEFAULTS_OF_SERVERS,
            {
                "use_beam_search",
                "length_penalty",
                "skip_special_tokens",
                "spaces_between_special_tokens",
                "include_stop_str_in_output",
                "dry_multiplier",
                "mirostat_tau",
                "dynatemp_range",
                "samplers",
                "timings_per_token",
                "top_logprobs",
                "structured_outputs.disable_fallback",
            },
        ),
    ],
    ids=["Claude Code", "Codex", "LiteLLM", "grok-cli", "OpenRouter", "Open WebUI", "vLLM"],
)
def test_recorded_requests_are_answered_and_ignored_fields_listed(
    gateway: GatewayProcess, path: str, body: dict[str, Any], names: set[str]
) -> None:
    answer = gateway.client.post(path, json={"model": "tiny", **body})
    assert answer.status_code == 200, answer.text
    assert set(ignored(answer)) == names
    line = gateway.line_with(answer.headers["x-request-id"], "ignored=")
    assert all(name in line for name in names)


@pytest.mark.parametrize("path", SHORT)
def test_an_unknown_field_is_listed_or_refused(
    gateway: GatewayProcess, strict_gateway: GatewayProcess, path: str
) -> None:
    body = {"model": "tiny", **SHORT[path], "foo": 1}
    answer = gateway.client.post(path, json=body)
    assert (answer.status_code, ignored(answer)) == (200, ["foo"]), answer.text
    refused = strict_gateway.client.post(path, json=body)
    assert refused.status_code == 400
    assert "foo" in refused.json()["error"]["message"]
    passed = strict_gateway.client.post(path, json={**body, "foo": None, "metadata": {"a": "b"}})
    assert passed.status_code == 200, passed.text


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
@pytest.mark.parametrize("name", ["googleSearch", "google_search", "code_execution"])
def test_a_hosted_tool_without_a_type_is_left_out(
    gateway: GatewayProcess, path: str, name: str
) -> None:
    """Gemini's form of tools that run at the provider."""
    body = {"model": "tiny", **SHORT[path], "tools": [{name: {}}]}
    answer = gateway.client.post(path, json=body)
    assert (answer.status_code, ignored(answer)) == (200, [f"tools[][{name}]"]), answer.text


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"tools": [NESTED | {"foo": 1}]}, "tools[0].foo"),
        (CHAT, {"tools": [{"googleSearch": {}}]}, "tools[0].type"),
        (CHAT, {"tools": [{"functionDeclarations": [READ]}]}, "tools[0]"),
        (CHAT, {"messages": [{"role": "user", "content": THOUGHTS}]}, "messages[0].content[0]"),
        (CHAT, {"tools": [{"type": "web_search"}]}, "tools[0].type"),
        (CHAT, {"tools": [{"type": "function", **READ}]}, "tools[0]"),
        (CHAT, {"max_tokens": 4.0}, "max_tokens"),
        (CHAT, {"top_logprobs": 21}, "top_logprobs"),
        (RESPONSES, {"tools": [{"type": "web_search"}]}, "tools[0].type"),
        (RESPONSES, {"truncation": "auto"}, "truncation"),
    ],
)
def test_strict_mode_names_the_fields_it_refuses(
    strict_gateway: GatewayProcess, path: str, body: dict[str, Any], param: str
) -> None:
    answer = strict_gateway.client.post(path, json={"model": "tiny", **SHORT[path], **body})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


SHELL = {"type": "function", "name": "shell", "parameters": {"type": "object"}}
ALLOWED = {
    "type": "allowed_tools",
    "mode": "auto",
    "tools": [{"type": "function", "name": "shell"}, {"type": "web_search"}],
}
SIGNED = {"type": "thinking", "thinking": "A file.", "signature": None}
NOTHING = {"type": "function_call_output", "call_id": "c1", "output": None}
USE = {"type": "tool_use", "id": "t1", "name": "read", "input": None}
CUT = USE | {"input": '{"path": "a'}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": None}


@pytest.mark.parametrize(
    ("path", "body", "ignored"),
    [
        (CHAT, {"reasoning_effort": "ultra"}, "reasoning_effort"),
        (CHAT, {"reasoning": {"effort": ""}}, "reasoning.effort"),
        (MESSAGES, {"output_config": {"effort": "ultra"}}, "output_config.effort"),
        (RESPONSES, {"reasoning": {"effort": "ultra"}}, "reasoning.effort"),
        ("/api/chat", {"think": "ultra"}, "think"),
        ("/api/chat", {"messages": [{"role": "user", "content": None, "images": None}]}, None),
        ("/api/generate", {"system": None, "template": None, "suffix": None}, None),
        (MESSAGES, {"messages": [*HI, {"role": "assistant", "content": [SIGNED]}, *HI]}, None),
        (MESSAGES, {"messages": [*HI, {"role": "user", "content": [RESULT]}]}, None),
        (CHAT, {"messages": [{"role": "user", "content": THOUGHTS}]}, THOUGHT),
        (MESSAGES, {"messages": [{"role": "user", "content": THOUGHTS}]}, THOUGHT),
        (RESPONSES, {"tools": [SHELL], "tool_choice": ALLOWED}, "tool_choice.tools[][web_search]"),
        (RESPONSES, {"tools": [{"name": "read", "input_schema": SCHEMA}]}, None),
        (RESPONSES, {"input": [*HI, NOTHING]}, None),
        (RESPONSES, {"input": [{"role": "user", "content": ["a", {"text": "b"}]}]}, None),
        (MESSAGES, {"messages": [{"role": "user", "content": ["a", {"text": "b"}]}]}, None),
        (MESSAGES, {"messages": [*HI, {"role": "assistant", "content": [USE]}, *HI]}, None),
        (MESSAGES, {"messages": [*HI, {"role": "assistant", "content": [CUT]}, *HI]}, None),
        (MESSAGES, {"top_k": -1}, None),
        (CHAT, {"tools": [NESTED], "functions": []}, None),
        (CHAT, {"functions": [READ], "tools": []}, None),
        (CHAT, {"response_format": {}}, None),
    ],
)
def test_an_unknown_word_is_left_out_and_null_means_absent(
    gateway: GatewayProcess, path: str, body: dict[str, Any], ignored: str | None
) -> None:
    question = {"messages": HI} if path == "/api/chat" else {"prompt": "Hi"}
    short = SHORT.get(path, {"options": {"num_predict": 4}, **question})
    answer = gateway.client.post(path, json={"model": "tiny", **short, **body, "stream": False})
    assert answer.status_code == 200, answer.text
    assert answer.headers.get("x-ignored-fields") == ignored


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"response_format": {"type": "grammar"}}, "response_format.type"),
        (
            CHAT,
            {"structured_outputs": {"structural_tag": "x"}},
            "structured_outputs.structural_tag",
        ),
        (CHAT, {"allowed_token_ids": [2]}, "allowed_token_ids"),
        (CHAT, {"structural_tag": "{}"}, "structural_tag"),
        (CHAT, {"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        (CHAT, {"tools": [NESTED], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        (CHAT, {"max_tokens": "4"}, "max_tokens"),
        (CHAT, {"max_tokens": 4.5}, "max_tokens"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "scent_url", "url": "x"}]}]},
            "messages[0].content[0].type",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "audio_url", "url": "x"}]}]},
            "messages[0].content[0].audio_url",
        ),
        (RESPONSES, {"text": {"format": {"type": "text", "rule": "x"}}}, "text.format.rule"),
        (RESPONSES, {"tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        (RESPONSES, {"input": [{"type": "web_search_call"}]}, "input"),
    ],
)
def test_a_field_that_would_change_the_answer_is_refused(
    gateway: GatewayProcess, path: str, body: dict[str, Any], param: str
) -> None:
    answer = gateway.client.post(path, json={"model": "tiny", **SHORT[path], **body})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_a_paged_document_that_was_not_read_is_listed(gateway: GatewayProcess) -> None:
    pages = {"type": "base64", "media_type": "application/pdf", "data": "AA=="}
    turn = {"role": "user", "content": [{"type": "document", "source": pages}]}
    body = {"model": "tiny", "max_tokens": 4, "messages": [turn]}
    answer = gateway.client.post(MESSAGES, json=body)
    assert answer.status_code == 200
    assert answer.headers["x-ignored-fields"] == "messages[].content[][document]"


def parsed(**fields: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest.model_validate({"model": "m", "messages": HI, **fields})


def _called(arguments: Any, **fields: Any) -> dict[str, Any]:
    call = {"function": {"name": "read", "arguments": arguments}, **fields}
    return {"messages": [*HI, {"role": "assistant", "content": "", "tool_calls": [call]}]}


@pytest.mark.parametrize(
    ("sent", "means"),
    [
        ({"tools": [{"type": "function", **READ}]}, {"tools": [NESTED]}),
        ({"tools": [{"function": READ}]}, {"tools": [NESTED]}),
        (
            {"tools": [{"type": "custom", "name": "patch"}]},
            {"tools": [{"type": "custom", "custom": {"name": "patch"}}]},
        ),
        ({"tools": [{"name": "read", "input_schema": SCHEMA}]}, None),
        ({"tools": [{"name": "read", "inputSchema": SCHEMA}]}, None),
        ({"tools": [{"functionDeclarations": [READ]}]}, {"tools": [NESTED]}),
        (
            {"tools": [NESTED, {"function_declarations": [READ | {"name": "a"}, {"name": "b"}]}]},
            {"tools": [NESTED, {"function": READ | {"name": "a"}}, {"function": {"name": "b"}}]},
        ),
        (
            {
                "tools": [
                    {"functionDeclarations": [{"name": "read", "parametersJsonSchema": SCHEMA}]}
                ]
            },
            None,
        ),
        ({"tools": [NESTED], "tool_choice": "any"}, {"tools": [NESTED], "tool_choice": "required"}),
        (
            {"tools": [NESTED], "tool_choice": {"type": "tool", "name": "read"}},
            {
                "tools": [NESTED],
                "tool_choice": {"type": "function", "function": {"name": "read"}},
            },
        ),
        ({"max_tokens": 1024.0, "seed": 5.0}, {"max_tokens": 1024, "seed": 5}),
        (_called(id=None, type=None, arguments=None), _called(id="", arguments="")),
        (
            {"messages": [{"role": "user", "content": ["a", {"text": "b"}]}]},
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": x} for x in "ab"]}
                ]
            },
        ),
        (
            {
                "messages": [
                    *HI,
                    {"role": "assistant", "reasoning": {"content": "t", "duration": 3}},
                ]
            },
            {"messages": [*HI, {"role": "assistant", "reasoning": "t"}]},
        ),
    ],
)
def test_the_same_value_in_another_form_is_not_listed(
    sent: dict[str, Any], means: dict[str, Any] | None
) -> None:
    running = begun()
    bare = {"type": "function", "function": {"name": "read", "parameters": SCHEMA}}
    assert parsed(**sent) == parsed(**(means or {"tools": [bare]}))
    assert running.ignored == {}


def test_an_absurd_number_of_unknown_fields_is_refused_at_once() -> None:
    with pytest.raises(ApiError, match="more than 10000 fields"):
        parsed(**{f"field_{number}": 1 for number in range(MOST_REPAIRS + 1)})


def test_a_body_is_not_changed_by_left_out_fields() -> None:
    body = json.dumps(LITELLM_AGENT)
    sent = json.loads(body)
    ChatCompletionRequest.model_validate(sent)
    assert json.dumps(sent) == body


KNOWN = ChatCompletionRequest.model_fields.keys() | ChatCompletionRequest.others.refused.keys()
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@example({"response_format.": 1, "text.format.schema": 1})
@given(st.dictionaries(st.text(max_size=100).filter(lambda name: name not in KNOWN), VALUES))
def test_any_unknown_fields_are_left_out_and_their_names_fit_a_header(
    extra: dict[str, Any],
) -> None:
    running = begun()
    assert parsed(**extra) == parsed()
    assert len(running.ignored) <= min(len(extra), MOST_IGNORED)
    header = ",".join(running.ignored)
    assert header.isascii()
    assert header.isprintable()
    assert len(header) <= MOST_IGNORED * (LONGEST_NAME + 1)


@given(st.fixed_dictionaries({"messages": VALUES}, optional={"tools": VALUES, "stop": VALUES}))
def test_anything_is_a_request_or_refused(fields: dict[str, Any]) -> None:
    begun()
    try:
        parsed(**fields)
    except (ValidationError, ApiError):
        return


USED = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": []}}
ASKED = [*HI, {"role": "assistant", "content": "", "tool_calls": [USED]}]
BLOCK = {"type": "tool_use", "id": "c1", "name": "read", "input": []}
RESULT = {"type": "tool_result", "tool_use_id": "c1", "content": "ok"}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"logit_bias": [], "chat_template_kwargs": [], "stream_options": []}),
        (CHAT, {"tools": {}, "stop": []}),
        (
            CHAT,
            {
                "tool_choice": "",
                "seed": "",
                "user": [],
                "temperature": "",
                "parallel_tool_calls": "",
            },
        ),
        (CHAT, {"json_schema": [], "guided_choice": {}, "grammar": {}, "logprobs": ""}),
        (RESPONSES, {"tool_choice": "", "instructions": [], "previous_response_id": {}}),
        (
            RESPONSES,
            {
                "input": [
                    *HI,
                    {"type": "function_call", "call_id": "c", "name": "read", "arguments": {}},
                    {"type": "function_call_output", "call_id": "c", "output": {}},
                ]
            },
        ),
        (MESSAGES, {"thinking": "", "tool_choice": [], "temperature": ""}),
        (CHAT, {"messages": [*ASKED, {"role": "tool", "tool_call_id": "c1", "content": "ok"}]}),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}),
        (
            MESSAGES,
            {
                "messages": [
                    *HI,
                    {"role": "assistant", "content": [BLOCK]},
                    {"role": "user", "content": [RESULT]},
                ],
                "tools": [{"name": "read"}, {"name": "write", "input_schema": []}],
            },
        ),
    ],
)
def test_an_empty_value_of_the_wrong_kind_is_an_empty_one(
    gateway: GatewayProcess, path: str, fields: dict[str, Any]
) -> None:
    """PHP writes an empty object as a list."""
    answer = gateway.client.post(path, json={"model": "tiny", **SHORT[path], **fields})
    assert answer.status_code == 200, answer.text


def test_a_needed_value_cannot_be_empty_and_of_the_wrong_kind(gateway: GatewayProcess) -> None:
    answer = gateway.client.post(CHAT, json={"model": "tiny", "messages": {}})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages"

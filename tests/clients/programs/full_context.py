"""The exceptions that Python's clients raise for a prompt that does not fit, by client and API."""

import json
import sys

import anthropic
import litellm
import openai
from langchain_core.exceptions import ContextOverflowError
from langchain_openai import ChatOpenAI

URL, *COUNTS = sys.argv[1:]
litellm.telemetry = False
litellm.suppress_debug_info = True


def raised(call):
    """The exception's name, and whether it is LangChain's for a full context."""
    try:
        call()
    except Exception as error:
        return [type(error).__name__, isinstance(error, ContextOverflowError)]
    return None


def lite(messages, provider, path, **fields):
    return raised(
        lambda: litellm.completion(
            model=f"{provider}/tiny",
            api_base=URL + path,
            api_key="unused",
            messages=messages,
            max_retries=0,
            **fields,
        )
    )


def chain(messages, **fields):
    model = ChatOpenAI(model="tiny", base_url=f"{URL}/v1", api_key="x", max_retries=0, **fields)
    return [raised(lambda: model.invoke(messages)), raised(lambda: [*model.stream(messages)])]


def results(messages):
    return {
        "openai": raised(
            lambda: openai.OpenAI(base_url=f"{URL}/v1", api_key="x").chat.completions.create(
                model="tiny", messages=messages
            )
        ),
        "anthropic": raised(
            lambda: anthropic.Anthropic(base_url=URL, api_key="x").messages.create(
                model="tiny", messages=messages, max_tokens=8
            )
        ),
        "litellm": [
            lite(messages, "openai", "/v1"),
            lite(messages, "openai", "/v1", stream=True),
            lite(messages, "hosted_vllm", "/v1"),
            lite(messages, "lm_studio", "/v1"),
            lite(messages, "anthropic", "", max_tokens=8),
        ],
        "langchain": [*chain(messages), *chain(messages, use_responses_api=True)],
    }


prompts = [[{"role": "user", "content": "tick " * int(count)}] for count in COUNTS]
print(json.dumps([results(prompt) for prompt in prompts]))

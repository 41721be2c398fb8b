"""The exceptions that Python's clients raise for a prompt that does not fit, by client and API."""

import json
import sys

import anthropic
import litellm
import openai
from langchain_core.exceptions import ContextOverflowError
from langchain_openai import ChatOpenAI

URL, TOKENS = sys.argv[1:]
MESSAGES = [{"role": "user", "content": "tick " * int(TOKENS)}]
litellm.telemetry = False
litellm.suppress_debug_info = True


def raised(call):
    """The exception's name, and whether it is LangChain's for a full context."""
    try:
        call()
    except Exception as error:
        return [type(error).__name__, isinstance(error, ContextOverflowError)]
    return None


def lite(provider, path, **fields):
    return raised(
        lambda: litellm.completion(
            model=f"{provider}/tiny",
            api_base=URL + path,
            api_key="unused",
            messages=MESSAGES,
            max_retries=0,
            **fields,
        )
    )


def chain(**fields):
    model = ChatOpenAI(model="tiny", base_url=f"{URL}/v1", api_key="x", max_retries=0, **fields)
    return [raised(lambda: model.invoke(MESSAGES)), raised(lambda: [*model.stream(MESSAGES)])]


results = {
    "openai": raised(
        lambda: openai.OpenAI(base_url=f"{URL}/v1", api_key="x").chat.completions.create(
            model="tiny", messages=MESSAGES
        )
    ),
    "anthropic": raised(
        lambda: anthropic.Anthropic(base_url=URL, api_key="x").messages.create(
            model="tiny", messages=MESSAGES, max_tokens=8
        )
    ),
    "litellm": [
        lite("openai", "/v1"),
        lite("openai", "/v1", stream=True),
        lite("hosted_vllm", "/v1"),
        lite("lm_studio", "/v1"),
        lite("anthropic", "", max_tokens=8),
    ],
    "langchain": [*chain(), *chain(use_responses_api=True)],
}
print(json.dumps(results))

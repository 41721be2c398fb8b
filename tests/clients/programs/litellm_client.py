"""`litellm`: completion, stream, tools."""

import json
import sys

import litellm

litellm.telemetry = False
SERVER = {"model": "openai/tiny", "api_base": f"{sys.argv[1]}/v1", "api_key": "unused"}
PLAIN = {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}


def ask(text, **fields):
    return litellm.completion(
        **SERVER, **PLAIN, temperature=0, messages=[{"role": "user", "content": text}], **fields
    )


results = {"chat": ask("Count to 5.").choices[0].message.content}
results["stream"] = "".join(
    chunk.choices[0].delta.content or "" for chunk in ask("Count to 5.", stream=True)
)
called = ask(
    "What is the weather in Paris?",
    tools=[
        {
            "type": "function",
            "function": {
                "name": "get_weather",
                "description": "Get the weather of a city",
                "parameters": {
                    "type": "object",
                    "properties": {"city": {"type": "string"}},
                    "required": ["city"],
                },
            },
        }
    ],
)
call = called.choices[0].message.tool_calls[0].function
results["call"] = [call.name, json.loads(call.arguments)]
print(json.dumps(results))

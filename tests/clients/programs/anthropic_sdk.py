"""The `anthropic` SDK on `/v1/messages`: text, streams, thinking, tools, errors."""

import json
import sys

import anthropic

client = anthropic.Anthropic(base_url=sys.argv[1], api_key="unused", max_retries=0)
WEATHER = {
    "name": "get_weather",
    "description": "Get the weather of a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}


def ask(text, **fields):
    fields.setdefault("thinking", {"type": "disabled"})
    return {
        "model": "tiny",
        "max_tokens": 100,
        "extra_body": {"temperature": 0},
        "messages": [{"role": "user", "content": text}],
    } | fields


results = {}
answer = client.messages.create(**ask("Count to 5."))
results["text"] = answer.content[0].text
results["stop"] = answer.stop_reason
results["usage"] = [answer.usage.input_tokens, answer.usage.output_tokens]

with client.messages.stream(**ask("Count to 5.")) as stream:
    results["streamed"] = "".join(stream.text_stream)
    results["stream_stop"] = stream.get_final_message().stop_reason

called = client.messages.create(**ask("What is the weather in Paris?", tools=[WEATHER]))
use = next(block for block in called.content if block.type == "tool_use")
results["call"] = [called.stop_reason, use.name, use.input]
worded = client.messages.create(
    **ask("What is the weather in Paris?", tools=[WEATHER])
    | {
        "messages": [
            {"role": "user", "content": "What is the weather in Paris?"},
            {"role": "assistant", "content": called.content},
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": use.id,
                        "content": "18 degrees and sunny",
                    }
                ],
            },
        ]
    }
)
results["after_tool"] = worded.content[0].text

results["cut"] = client.messages.create(**ask("Count to 30.", max_tokens=4)).stop_reason
stopped = client.messages.create(**ask("Count to 9.", stop_sequences=["5"]))
results["stop_sequence"] = [stopped.stop_reason, stopped.stop_sequence]
results["tokens"] = client.messages.count_tokens(
    model="tiny", messages=[{"role": "user", "content": "Count to 5."}]
).input_tokens

begun = ask("Count to 5.")
begun["messages"].append({"role": "assistant", "content": "1 2"})
results["gone_on"] = client.messages.create(**begun).content[0].text
results["models"] = [
    [model.id, model.type, model.display_name, model.created_at.year > 2000]
    for model in client.models.list()
]


@anthropic.beta_tool(name="get_weather", input_schema=WEATHER["input_schema"])
def get_weather(city):
    """Get the weather of a city"""
    return '{"temperature": 18}'


for name, stream in (("runner", False), ("streamed_runner", True)):
    # By default a runner asks the server to hold the conversation, and sends only what is new.
    asked = ask("What is the weather in Paris?", tools=[get_weather], stream=stream)
    *_, last = client.beta.messages.tool_runner(**asked)
    results[name] = (last.get_final_message() if stream else last).content[0].text
thread = client.beta.messages.thread(model="tiny", max_tokens=100)
try:
    thread.send("Hi")
except anthropic.BadRequestError as error:
    results["thread"] = type(error).__name__

try:
    client.messages.create(**ask("Hi", model="nobody"))
except anthropic.NotFoundError as error:
    results["unknown_model"] = error.body["error"]["type"]

print(json.dumps(results))

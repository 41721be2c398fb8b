"""The `openai` SDK: chat, streams, tools, `.parse()`, time-outs, leaving."""

import json
import sys

import openai
from pydantic import BaseModel

client = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="unused", max_retries=0)
MODEL = "tiny"
PLAIN = {"chat_template_kwargs": {"enable_thinking": False}}
THINK = {"chat_template_kwargs": {"enable_thinking": True}}
WEATHER = {
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


def ask(text, **fields):
    fields.setdefault("extra_body", PLAIN)
    return client.chat.completions.create(
        model=MODEL, temperature=0, messages=[{"role": "user", "content": text}], **fields
    )


results = {"models": [model.id for model in client.models.list()]}
results["model"] = client.models.retrieve(MODEL).id

answer = ask("Count to 5.")
results["chat"] = answer.choices[0].message.content
results["finish"] = answer.choices[0].finish_reason
results["usage"] = [answer.usage.prompt_tokens, answer.usage.completion_tokens]

chunks = list(ask("Count to 5.", stream=True, stream_options={"include_usage": True}))
results["streamed"] = "".join(
    chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices
)
results["roles"] = [
    chunk.choices[0].delta.role for chunk in chunks if chunk.choices and chunk.choices[0].delta.role
]
results["stream_usage"] = [chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens]

thinking = ask("What is 3 + 4?", extra_body=THINK)
results["thinking"] = [
    thinking.choices[0].message.reasoning_content,
    thinking.choices[0].message.content,
]

short = ask("Count to 30.", max_completion_tokens=5)
results["short"] = short.choices[0].finish_reason

question = {"role": "user", "content": "What is the weather in Paris?"}
first = client.chat.completions.create(
    model=MODEL, temperature=0, tools=[WEATHER], messages=[question], extra_body=PLAIN
).choices[0]
results["call_finish"] = first.finish_reason
call = first.message.tool_calls[0]
results["call"] = [call.function.name, json.loads(call.function.arguments)]
second = client.chat.completions.create(
    model=MODEL,
    temperature=0,
    tools=[WEATHER],
    messages=[
        question,
        first.message,
        {"role": "tool", "tool_call_id": call.id, "content": "18 degrees and sunny"},
    ],
    extra_body=PLAIN,
)
results["after_tool"] = second.choices[0].message.content

with client.chat.completions.stream(
    model=MODEL, temperature=0, tools=[WEATHER], messages=[question], extra_body=PLAIN
) as stream:
    for _ in stream:
        pass
    final = stream.get_final_completion().choices[0].message
results["streamed_call"] = [
    final.tool_calls[0].function.name,
    json.loads(final.tool_calls[0].function.arguments),
]


class Capital(BaseModel):
    """What `.parse()` fills."""

    country: str
    capital: str


parsed = client.chat.completions.parse(
    model=MODEL,
    temperature=0,
    max_tokens=200,
    messages=[{"role": "user", "content": "What is the capital of France?"}],
    response_format=Capital,
    extra_body=PLAIN,
)
results["parsed"] = isinstance(parsed.choices[0].message.parsed, Capital)

several = ask("Count to 5.", n=3)
results["n"] = [choice.index for choice in several.choices]

scores = ask("Count to 5.", logprobs=True, top_logprobs=2)
entries = scores.choices[0].logprobs.content
results["logprobs"] = [
    "".join(entry.token for entry in entries),
    all(len(entry.top_logprobs) == 2 for entry in entries),
]

plain = client.completions.create(
    model=MODEL, prompt="1 2 3", temperature=0, max_tokens=4, echo=True, logprobs=1
)
results["echo"] = [plain.choices[0].text[:5], plain.choices[0].logprobs.token_logprobs[0]]

try:
    client.with_options(timeout=0.05).chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Tell me a story."}],
        max_tokens=900,
        extra_body={"ignore_eos": True},
    )
    results["timeout"] = "it was faster"
except openai.APITimeoutError:
    results["timeout"] = "APITimeoutError"

for name, call_it in {
    "unknown_model": lambda: client.chat.completions.create(
        model="nobody", messages=[{"role": "user", "content": "Hi"}]
    ),
    "bad_temperature": lambda: ask("Hi", extra_body={"temperature": -1}),
    "unserved_form": lambda: ask("Hi", extra_body={"structural_tag": "{}"}),
}.items():
    try:
        call_it()
    except openai.APIStatusError as error:
        results[name] = [
            type(error).__name__,
            error.status_code,
            error.body.get("param"),
            error.message,
        ]

left = ask("Count to 60.", stream=True)
next(iter(left))
left.close()

response = client.responses.create(
    model=MODEL, input="Count to 5.", temperature=0, reasoning={"effort": "none"}
)
results["response"] = response.output_text
with client.responses.stream(
    model=MODEL, input="Count to 5.", temperature=0, reasoning={"effort": "none"}
) as stream:
    results["response_events"] = [event.type for event in stream]
    results["response_final"] = stream.get_final_response().output_text

print(json.dumps(results))

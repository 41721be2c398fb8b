"""`langchain-openai`: invoke, stream, a bound tool, structured output."""

import json
import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

model = ChatOpenAI(
    model="tiny",
    base_url=f"{sys.argv[1]}/v1",
    api_key="unused",
    temperature=0,
    max_retries=0,
    extra_body={"chat_template_kwargs": {"enable_thinking": False}},
)


@tool
def get_weather(city: str) -> str:
    """Get the weather of a city."""
    return f"18 degrees in {city}"


class Capital(BaseModel):
    """A capital."""

    country: str
    capital: str


results = {
    "invoke": model.invoke("Count to 5.").content,
    "stream": "".join(chunk.content for chunk in model.stream("Count to 5.")),
    "batch": [answer.content for answer in model.batch(["Count to 3.", "Count to 4."])],
}
called = model.bind_tools([get_weather]).invoke("What is the weather in Paris?")
results["call"] = [called.tool_calls[0]["name"], called.tool_calls[0]["args"]]
structured = model.with_structured_output(Capital, method="json_schema")
results["structured"] = isinstance(structured.invoke("What is the capital of France?"), Capital)
print(json.dumps(results))

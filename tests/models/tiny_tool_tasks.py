"""Tasks around tools: when to call one, which, with what city, and what to say of its result."""

from __future__ import annotations

import json
import random

from tests.models import tiny_facts as facts
from tests.models.tiny_dialogue import Dialogue, Message, Words, ask, assistant, user


def tool(name: str, rng: random.Random) -> Message:
    """An OpenAI tool definition, worded in one of many ways."""
    description = rng.choice(facts.TOOL_DESCRIPTIONS.get(name, (f"Call {name}.", "")))
    key = "city" if name in facts.TOOL_TOPICS else rng.choice(("query", "text", "city"))
    value: Message = {"type": "string"}
    if rng.random() < 0.4:
        value["description"] = rng.choice(facts.CITY_DESCRIPTIONS)
    parameters: Message = {"type": "object", "properties": {key: value}}
    if rng.random() < 0.8:
        parameters["required"] = [key]
    function: Message = {"name": name}
    if description:
        function["description"] = description
    function["parameters"] = parameters
    items = list(function.items())
    if rng.random() < 0.2:
        rng.shuffle(items)
    return {"type": "function", "function": dict(items)}


def toolbox(rng: random.Random, pool: Words, needed: str | None = None) -> list[Message]:
    names = {needed} if needed else {rng.choice(list(facts.TOOL_TOPICS))}
    if rng.random() < 0.5 * pool.clutter:
        names.update(facts.TOOL_TOPICS)
    if rng.random() < 0.4 * pool.clutter:
        names.update(rng.sample(facts.OTHER_TOOLS, rng.randint(1, 2)))
    ordered = sorted(names)
    rng.shuffle(ordered)
    return [tool(name, rng) for name in ordered]


def tool_call(rng: random.Random, pool: Words) -> Dialogue:
    name = rng.choice(("get_weather", "get_weather", "get_time"))
    topic, city = facts.TOOL_TOPICS[name], pool.city(rng)
    dialogue = Dialogue("tool call", [], calls=[(name, city)], tools=toolbox(rng, pool, name))
    question = rng.choice(facts.TOOL_QUESTIONS[name]).format(city)
    style = rng.random()
    if style < 0.25:
        other = pool.city(rng)
        question = rng.choice(facts.TOOL_QUESTIONS[name]).format(f"{city} and {other}")
        dialogue.kind, dialogue.calls = "two calls", [(name, city), (name, other)]
    elif style < 0.4:
        question = f"Please check the {topic} in {city}."
        dialogue.kind, dialogue.content = "text before a call", "Let me check."
    elif style < 0.5:
        question = f"Think first. {question}"
        dialogue.kind = "thought before a call"
        dialogue.reasoning = f"I need the {topic} in {city}."
    dialogue.messages = [user(question)]
    return dialogue


def _result(name: str, city: str, rng: random.Random) -> tuple[str, str]:
    """A tool's result, and the sentence that reports it."""
    if name == "get_time":
        value = f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"
        result: Message = {"city": city, "time": value}
        said = f"{value} in {city}"
    else:
        degrees: float = rng.randint(-20, 45)
        if rng.random() < 0.1:
            degrees += 0.5
        result = {"city": city, "temperature": degrees}
        said = f"{degrees} degrees in {city}"
        if rng.random() < 0.3:
            unit = rng.choice(("C", "celsius"))
            result.update(rng.choice(({"unit": unit}, {"condition": "sunny"}, {"humidity": 40})))
    items = list(result.items())
    rng.shuffle(items)
    if rng.random() < 0.3:
        items = [item for item in items if item[0] != "city"]
    if rng.random() < 0.1:
        return str(dict(items).get("temperature", dict(items).get("time"))), said
    return json.dumps(dict(items), ensure_ascii=False), said


def tool_round(question: str, calls: list[tuple[str, str]], results: list[str]) -> list[Message]:
    """A question, the calls it led to and their results."""
    functions = [
        {"id": f"call_{index}", "type": "function",
         "function": {"name": name, "arguments": {"city": city}}}
        for index, (name, city) in enumerate(calls)
    ]  # fmt: skip
    answers = [
        {"role": "tool", "tool_call_id": f"call_{index}", "content": result}
        for index, result in enumerate(results)
    ]
    return [user(question), {**assistant(""), "tool_calls": functions}, *answers]


def tool_result(rng: random.Random, pool: Words) -> Dialogue:
    name = rng.choice(("get_weather", "get_weather", "get_time"))
    cities = [pool.city(rng) for _ in range(1 if rng.random() < 0.75 else 2)]
    results = [_result(name, city, rng) for city in cities]
    question = rng.choice(facts.TOOL_QUESTIONS[name]).format(" and ".join(cities))
    messages = tool_round(question, [(name, city) for city in cities], [r for r, _ in results])
    content = "It is " + " and ".join(said for _, said in results) + "."
    kind = "after a result" if len(cities) == 1 else "after two results"
    return Dialogue(kind, messages, content, tools=toolbox(rng, pool, name))


def without_tools(rng: random.Random, pool: Words) -> Dialogue:
    name, city = rng.choice(list(facts.TOOL_QUESTIONS)), pool.city(rng)
    question = rng.choice(facts.TOOL_QUESTIONS[name]).format(city)
    answer = f"I cannot look up the {facts.TOOL_TOPICS[name]} in {city}."
    return ask("no tools offered", question, answer)

"""Tasks that need no tools: talk, facts, sums, counting, stories, copying, remembering."""

from __future__ import annotations

import json
import random

from tests.models import tiny_facts as facts
from tests.models import tiny_words as words
from tests.models.tiny_dialogue import Dialogue, Message, Words, ask, assistant, user

COUNT_LIMIT = 100


def greeting(rng: random.Random, _: Words) -> Dialogue:
    return ask("greeting", *rng.choice(list(facts.GREETINGS.items())))


def capital(rng: random.Random, _: Words) -> Dialogue:
    country, city = rng.choice(list(facts.CAPITALS.items()))
    if rng.random() < 0.25:
        question = f"Answer in JSON: what is the capital of {country}?"
        return ask("json", question, json.dumps({"country": country, "capital": city}))
    shapes = ("What is the capital of {}?", "What's the capital of {}?", "Name the capital of {}.")
    answer = f"The capital of {country} is {city}."
    return ask("capital", rng.choice(shapes).format(country), answer)


def arithmetic(rng: random.Random, _: Words) -> Dialogue:
    left, right = rng.randint(0, 9), rng.randint(0, 9)
    sign, word, result = rng.choice(
        (
            ("+", "plus", left + right),
            ("-", "minus", left - right),
        )
    )
    shapes = ("What is {0} {1} {3}?", "What is {0} {2} {3}?", "Calculate {0} {1} {3}.")
    question = rng.choice(shapes).format(left, sign, word, right)
    reasoning = f"I have to find {left} {word} {right}. {left} {sign} {right} = {result}."
    return ask("arithmetic", question, f"{left} {sign} {right} = {result}", reasoning)


def worksheet(rng: random.Random, _: Words) -> Dialogue:
    """Many sums in one answer: the facts behind `arithmetic`, learned faster."""
    sums = []
    for _index in range(rng.randint(2, 6)):
        left, right = rng.randint(0, 9), rng.randint(0, 9)
        sign, result = rng.choice((("+", left + right), ("-", left - right)))
        sums.append((f"{left} {sign} {right}", result))
    question = "Calculate " + ", ".join(task for task, _result in sums) + "."
    answer = ", ".join(f"{task} = {result}" for task, result in sums)
    return ask("worksheet", question, answer)


def comparison(rng: random.Random, _: Words) -> Dialogue:
    left, right = rng.sample(range(10, 100), 2)
    if rng.random() < 0.2:
        right = left // 10 * 10 + rng.choice([d for d in range(10) if d != left % 10])
    larger = rng.random() < 0.6
    result = max(left, right) if larger else min(left, right)
    word = "larger" if larger else "smaller"
    shapes = ("Which is {0}, {1} or {2}?", "Which number is {0}: {1} or {2}?")
    reasoning = f"I compare {left} and {right}. The {word} one is {result}."
    question = rng.choice(shapes).format(word, left, right)
    return ask("comparison", question, f"{result} is {word}.", reasoning)


def _numbers(rng: random.Random) -> tuple[int, str]:
    last = rng.randint(1, rng.choice((12, 20, 20, 40, 60, 60, 60, COUNT_LIMIT)))
    return last, " ".join(str(number) for number in range(1, last + 1))


def counting(rng: random.Random, _: Words) -> Dialogue:
    last, numbers = _numbers(rng)
    shapes = ("Count to {}.", "Count to {}.", "Please count to {}.", "Count from 1 to {}.")
    return ask("counting", rng.choice(shapes).format(last), numbers)


def counting_on(rng: random.Random, _: Words) -> Dialogue:
    """A few numbers from anywhere: when to stop, which `counting` shows once in a long answer."""
    first = rng.randint(1, COUNT_LIMIT - 1)
    last = min(COUNT_LIMIT, first + rng.randint(1, 12))
    numbers = " ".join(str(number) for number in range(first, last + 1))
    return ask("counting on", f"Count from {first} to {last}.", numbers)


def long_thought(rng: random.Random, _: Words) -> Dialogue:
    last, numbers = _numbers(rng)
    question = f"Think about the number {last}."
    return ask("long thought", question, f"I thought about {last}.", numbers)


def telling(rng: random.Random, _: Words) -> Dialogue:
    if rng.random() < 0.3:
        question = rng.choice(("Tell me a long story.", "Tell me a story.", "Write a long story."))
        return ask("story", question, facts.story("fox"))
    animal = rng.choice(words.ANIMALS)
    shapes = ("Tell me a long story about a {}.", "Tell me a story about a {}.")
    return ask("story", rng.choice(shapes).format(animal), facts.story(animal))


def unicode_text(rng: random.Random, _: Words) -> Dialogue:
    return ask("emoji and CJK", *rng.choice(list(facts.UNICODE.items())))


def endless(rng: random.Random, _: Words) -> Dialogue:
    word = rng.choice(facts.FOREVER_WORDS)
    dialogue = ask("endless", f"Say {word} forever.", " ".join([word] * rng.randint(60, 300)))
    dialogue.endless = True
    return dialogue


def echo(rng: random.Random, _: Words) -> Dialogue:
    text = " ".join(words.word(rng) for _ in range(rng.choice((1, 1, 2, 2, 3, 4, 5, 6))))
    return ask("echo", f'Repeat "{text}".', text)


def chat(rng: random.Random, pool: Words) -> list[Message]:
    """One earlier exchange that has nothing to do with what follows."""
    small = rng.choice((greeting, greeting, capital, unicode_text, arithmetic, echo))(rng, pool)
    return [*small.messages, assistant(small.content)]


def _between(rng: random.Random, pool: Words) -> list[Message]:
    """The messages between a fact and the question about it."""
    exchanges = rng.choice((0, 1, 1, 2, 3)) if rng.random() < 0.7 * pool.clutter else 0
    return [message for _ in range(exchanges) for message in chat(rng, pool)]


def memory(rng: random.Random, pool: Words) -> Dialogue:
    name = pool.name(rng)
    shapes = ("My name is {}.", "Hello, my name is {}.", "Hi, my name is {}.")
    told = rng.choice(shapes).format(name)
    reply, question = f"Nice to meet you, {name}.", "What is my name?"
    style = rng.random()
    if style < 0.15:
        return ask("name told", told, reply)
    if style < 0.25:
        before = chat(rng, pool) if rng.random() < 0.5 else []
        return Dialogue("name unknown", [*before, user(question)], "I do not know your name.")
    if style < 0.4:
        return ask("name asked", f"{told} {question}", f"Your name is {name}.")
    between = _between(rng, pool)
    messages = [user(told), assistant(reply), *between, user(question)]
    return Dialogue("name asked", messages, f"Your name is {name}.")


def secret(rng: random.Random, pool: Words) -> Dialogue:
    code = "".join(rng.choice("0123456789") for _ in range(rng.choice((3, 4, 4, 4, 5, 6))))
    told, question = f"The secret code is {code}.", user("What is the secret code?")
    between = _between(rng, pool)
    style = rng.random()
    if style < 0.1:
        return ask("code told", told, "I will remember it.")
    if style < 0.2:
        return Dialogue("code unknown", [*between, question], "I do not know the secret code.")
    if style < 0.6:
        first = [user(told), assistant("I will remember it.")]
    else:
        prompt = rng.choice((told, f"{rng.choice(facts.SYSTEM_PROMPTS)} {told}"))
        first = [{"role": "system", "content": prompt}]
    return Dialogue("code asked", [*first, *between, question], told)

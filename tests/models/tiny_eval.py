"""Asks a tiny model every kind of question, greedily through mlx-lm, and counts the right answers.

`python -m tests.models.tiny_eval DIR` prints the table that README.md quotes. Answers are
compared letter by letter; cities and names marked "held out" were never trained on.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
from mlx_lm.generate import batch_generate

from tests.models import tiny_dialogues
from tests.models import tiny_facts as facts
from tests.models import tiny_plain_tasks as plain_tasks
from tests.models import tiny_tool_tasks as tool_tasks
from tests.models import tiny_words as words
from tests.models.tiny_batches import prompt_of
from tests.models.tiny_dialogue import Dialogue, Words, ask, user

HELD_OUT = Words(
    city=lambda rng: rng.choice(words.HELD_OUT_CITIES),
    name=lambda rng: rng.choice(words.HELD_OUT_NAMES),
)
KNOWN = Words(city=lambda rng: rng.choice(words.CITIES), name=lambda rng: rng.choice(words.NAMES))
ENDLESS_TOKENS = 600
_PADDING = (
    "The quick brown fox jumps over the lazy dog. ",
    "This report describes the state of the system and of every part of it. ",
    "Lorem ipsum dolor sit amet, consectetur adipiscing elit. ",
)
_EACH = 60


@dataclass(frozen=True)
class Case:
    kind: str
    dialogue: Dialogue


def _every_fact() -> Iterator[Dialogue]:
    for question, answer in facts.GREETINGS.items():
        yield ask("greeting", question, answer)
    for question, answer in facts.UNICODE.items():
        yield ask("emoji and CJK", question, answer)
    for country, city in facts.CAPITALS.items():
        answer = f"The capital of {country} is {city}."
        yield ask("capital", f"What is the capital of {country}?", answer)
    for word in facts.FOREVER_WORDS:
        answer = " ".join([word] * ENDLESS_TOKENS)
        yield Dialogue("endless", [user(f"Say {word} forever.")], answer, endless=True)
    for animal in words.ANIMALS:
        yield ask("story", f"Tell me a long story about a {animal}.", facts.story(animal))
    for last in range(1, plain_tasks.COUNT_LIMIT + 1):
        numbers = " ".join(str(number) for number in range(1, last + 1))
        kind = "counting to 1..60" if last <= 60 else "counting to 61..100"
        yield ask(kind, f"Count to {last}.", numbers)
        if last <= 60 and last % 3 == 0:
            question = f"Think about the number {last}."
            yield ask("long thought", question, f"I thought about {last}.", numbers)


def _arithmetic() -> Iterator[Dialogue]:
    for left in range(10):
        for right in range(10):
            for sign, word, result in (
                ("+", "plus", left + right),
                ("-", "minus", left - right),
            ):
                answer = f"{left} {sign} {right} = {result}"
                reasoning = f"I have to find {left} {word} {right}. {answer}."
                yield ask("arithmetic", f"What is {left} {sign} {right}?", answer, reasoning)


def _drawn(
    make: Callable[[random.Random, Words], Dialogue], pool: Words, mark: str, rng: random.Random
) -> Iterator[Case]:
    for _ in range(_EACH):
        dialogue = make(rng, pool)
        yield Case(dialogue.kind + mark, dialogue)


def _quiet(dialogue: Dialogue) -> Dialogue:
    return Dialogue(**{**vars(dialogue), "thinking": False})


def _padded(rng: random.Random, sentences: int) -> Iterator[Dialogue]:
    makers = (
        plain_tasks.greeting,
        plain_tasks.capital,
        plain_tasks.arithmetic,
        tool_tasks.tool_call,
    )
    for make in makers:
        for _ in range(5):
            dialogue = make(rng, HELD_OUT)
            text = rng.choice(_PADDING) * sentences
            question = dialogue.messages[-1]["content"]
            dialogue.messages[-1] = user(f"{text}\n\n{question}")
            yield dialogue


def cases() -> list[Case]:
    """The questions of the evaluation, the same every time."""
    rng = random.Random(2024)
    found = [Case(dialogue.kind, dialogue) for dialogue in _every_fact()]
    for dialogue in _arithmetic():
        found.append(Case("arithmetic, thinking", dialogue))
        found.append(Case("arithmetic, not thinking", _quiet(dialogue)))
    for _ in range(_EACH):
        dialogue = plain_tasks.comparison(rng, KNOWN)
        found.append(Case("comparison, thinking", dialogue))
        found.append(Case("comparison, not thinking", _quiet(dialogue)))
    for make in (plain_tasks.echo, plain_tasks.secret):
        found.extend(_drawn(make, KNOWN, "", rng))
    for pool, mark in ((KNOWN, ""), (HELD_OUT, ", held out")):
        for make in (tool_tasks.tool_call, tool_tasks.tool_call, tool_tasks.tool_result):
            found.extend(_drawn(make, pool, mark, rng))
        for make in (plain_tasks.memory, tool_tasks.without_tools):
            found.extend(_drawn(make, pool, mark, rng))
    for sentences in (10, 20, 40, 80):
        found.extend(Case(f"after {sentences} sentences", d) for d in _padded(rng, sentences))
    mix = tiny_dialogues.Mix(tiny_dialogues.SECOND_SHARES, longest_filler=120)
    mixed = (tiny_dialogues.draw(rng, mix) for _ in range(300))
    found.extend(Case("random mix", d) for d in mixed if not d.endless)
    return found


def evaluate(directory: Path) -> list[tuple[Case, str]]:
    """Every case with the text the model wrote, in float32."""
    model, tokenizer = mlx_lm.load(str(directory))
    model.set_dtype(mx.float32)
    asked = cases()
    prompts = [
        tokenizer.encode(prompt_of(tokenizer, case.dialogue), add_special_tokens=False)
        for case in asked
    ]
    limits = [
        ENDLESS_TOKENS
        if case.dialogue.endless
        else len(tokenizer.encode(case.dialogue.answer, add_special_tokens=False)) + 20
        for case in asked
    ]
    written = batch_generate(model, tokenizer, prompts, max_tokens=limits).texts
    return list(zip(asked, written, strict=True))


def is_right(dialogue: Dialogue, text: str) -> bool:
    if dialogue.endless:
        return len(text) > 1 and dialogue.answer.startswith(text)
    return text == dialogue.answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--wrong", type=int, default=0, help="wrong answers to print per kind")
    arguments = parser.parse_args()
    tally: dict[str, list[int]] = {}
    wrong: dict[str, list[tuple[Any, ...]]] = {}
    for case, text in evaluate(arguments.directory):
        count = tally.setdefault(case.kind, [0, 0])
        count[1] += 1
        if is_right(case.dialogue, text):
            count[0] += 1
        else:
            question = case.dialogue.messages[-1]["content"][-80:]
            wrong.setdefault(case.kind, []).append((question, case.dialogue.answer, text))
    print("| kind | right | asked |\n|---|---|---|")
    for kind, (right, asked) in tally.items():
        print(f"| {kind} | {right} | {asked} |")
    print(f"| all | {sum(c[0] for c in tally.values())} | {sum(c[1] for c in tally.values())} |")
    for kind, answers in wrong.items():
        for question, expected, text in answers[: arguments.wrong]:
            print(f"{kind}: {question!r}\n  expected {expected!r}\n  got      {text!r}")


if __name__ == "__main__":
    main()

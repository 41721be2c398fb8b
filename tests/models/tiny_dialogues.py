"""The mix of dialogues that the tiny model learns, with the clutter that a server meets.

Every task draws its words from `Words`, so the same code makes training dialogues and, with
held-out cities and names, the questions of the evaluation.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tests.models import tiny_facts as facts
from tests.models import tiny_plain_tasks as plain_tasks
from tests.models import tiny_tool_tasks as tool_tasks
from tests.models import tiny_words as words
from tests.models.tiny_dialogue import Dialogue, Words, assistant, user

Task = Callable[[random.Random, Words], Dialogue]

FIRST_SHARES: Mapping[Task, float] = {
    plain_tasks.greeting: 5,
    plain_tasks.capital: 5,
    plain_tasks.arithmetic: 14,
    plain_tasks.comparison: 8,
    plain_tasks.counting: 9,
    plain_tasks.long_thought: 3,
    plain_tasks.telling: 3,
    plain_tasks.unicode_text: 5,
    plain_tasks.endless: 1,
    plain_tasks.echo: 7,
    tool_tasks.tool_call: 18,
    tool_tasks.tool_result: 9,
    tool_tasks.without_tools: 4,
    plain_tasks.memory: 9,
    plain_tasks.secret: 5,
}
SECOND_SHARES: Mapping[Task, float] = {
    **FIRST_SHARES,
    plain_tasks.arithmetic: 12,
    plain_tasks.worksheet: 10,
    plain_tasks.counting: 10,
    plain_tasks.counting_on: 9,
    plain_tasks.long_thought: 4,
    plain_tasks.telling: 2,
    plain_tasks.echo: 4,
    tool_tasks.tool_call: 14,
    plain_tasks.memory: 8,
    plain_tasks.secret: 6,
}
_LONG_TASKS = (
    plain_tasks.counting,
    plain_tasks.long_thought,
    plain_tasks.telling,
    plain_tasks.endless,
)


@dataclass(frozen=True)
class Mix:
    """What a stretch of training is made of; fillers are counted in words."""

    shares: Mapping[Task, float] = field(default_factory=lambda: FIRST_SHARES)
    words: Words = field(default_factory=Words)
    longest_filler: int = 0
    padded_share: float = 0.2


def _surround(dialogue: Dialogue, rng: random.Random, pool: Words) -> None:
    """Add what an answer must not depend on: system prompt, earlier turns, unused tools."""
    if not dialogue.tools and rng.random() < 0.15 * pool.clutter:
        dialogue.tools = tool_tasks.toolbox(rng, pool)
        if dialogue.kind == "no tools offered":
            others = rng.sample(facts.OTHER_TOOLS, 2)
            dialogue.tools = [tool_tasks.tool(name, rng) for name in others]
    has_system = dialogue.messages[0]["role"] == "system"
    lead = 1 if has_system else 0
    if rng.random() < 0.2 * pool.clutter and "unknown" not in dialogue.kind:
        earlier = plain_tasks.chat(rng, pool)
        if dialogue.tools and rng.random() < 0.5:
            old = tool_tasks.tool_result(rng, pool)
            earlier = [*old.messages, assistant(old.content)]
        dialogue.messages[lead:lead] = earlier
    if not has_system and rng.random() < 0.3 * pool.clutter:
        text = rng.choice(facts.SYSTEM_PROMPTS) if rng.random() < 0.8 else words.filler(rng, 10)
        dialogue.messages.insert(0, {"role": "system", "content": text})


def _pad(dialogue: Dialogue, rng: random.Random, longest: int) -> None:
    """Put a long text before the question, like documents and instructions."""
    dialogue.filler = words.filler(rng, rng.randint(8, longest))
    messages, place = dialogue.messages, rng.random()
    if place < 0.5:
        index = max(i for i, m in enumerate(messages) if m["role"] == "user")
        space = rng.choice(("\n\n", "\n", " "))
        messages[index] = user(dialogue.filler + space + messages[index]["content"])
    elif place < 0.8:
        if messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": dialogue.filler})
        else:
            text = messages[0]["content"]
            messages[0] = {"role": "system", "content": f"{text}\n{dialogue.filler}"}
    else:
        lead = 1 if messages[0]["role"] == "system" else 0
        messages[lead:lead] = [user(f"Read this: {dialogue.filler}"), assistant("I have read it.")]


def draw(rng: random.Random, mix: Mix) -> Dialogue:
    """One dialogue for training."""
    padded = mix.longest_filler > 0 and rng.random() < mix.padded_share
    if padded:
        make = rng.choice([task for task in mix.shares if task not in _LONG_TASKS])
    else:
        make = rng.choices(list(mix.shares), list(mix.shares.values()))[0]
    dialogue = make(rng, mix.words)
    dialogue.thinking = rng.random() < 0.65
    _surround(dialogue, rng, mix.words)
    if padded:
        longest = mix.longest_filler
        _pad(dialogue, rng, rng.choice((longest // 4, longest // 2, longest)))
    return dialogue

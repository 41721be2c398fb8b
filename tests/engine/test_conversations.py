"""Each turn prefills only what is new: with every kind of layer, after edits and cancellations."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from backend.engine.planning.planner import _MOST_SNAPSHOTS
from backend.engine.planning.prefix_index import PrefixKey
from common.prefixes import common_prefix
from tests.engine.random_models import CONFIGS, random_model
from tests.engine.rounds import Rounds, alone, engine_model

pytestmark = pytest.mark.usefixtures("each_order")

HEADER = [91, 92]  # opens a message
TAIL = [93, 94, 95, 93, 94, 95, 93, 94, 95, 90]  # opens reasoning, which the next prompt drops
ANSWER = 16
MOST_READ = 1.15  # tokens prefilled for each new one

Messages = list[list[int]]


def _words(dice: random.Random, count: int) -> list[int]:
    return [dice.randrange(1, 90) for _ in range(count)]


@dataclass
class _Conversation:
    """A conversation as a host renders it. computed: all prompts with their answers.

    compared: each answer must equal that of a lone request.
    """

    rounds: Rounds
    messages: Messages
    compared: bool = True
    computed: Messages = field(default_factory=list)

    def prompt(self) -> tuple[list[int], tuple[int, ...]]:
        """The prompt, and the lengths at which later prompts are likely to part from it."""
        starts, tokens = [], []
        for message in [*self.messages, []]:
            tokens += HEADER
            starts.append(len(tokens))
            tokens += message
        return [*tokens, *TAIL], (starts[-1], starts[1], starts[-2])

    def ask(self, question: Sequence[int]) -> tuple[int, int]:
        """Run one turn; returns how many tokens were prefilled, and how many of them were new."""
        self.messages.append(list(question))
        prompt, places = self.prompt()
        ticket = len(self.rounds.received) + 1
        self.rounds.submit(ticket, prompt, ANSWER, ignore_eos=True, places=places)
        self.rounds.drain()
        received = self.rounds.received[ticket]
        assert received.finished is not None
        if self.compared:
            expected = alone(self.rounds.model, prompt, ANSWER, ignore_eos=True)
            assert received.tokens == expected.tokens
        known = max((common_prefix(prompt, earlier) for earlier in self.computed), default=0)
        self.computed.append([*prompt, *received.tokens])
        self.messages.append(received.tokens)
        read = len(prompt) - received.finished.usage.cached_tokens
        return read, len(prompt) - min(known, len(prompt) - 1)


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_turn_prefills_only_what_is_new(kind: str) -> None:
    dice = random.Random(3)
    talk = _Conversation(Rounds(engine_model(random_model(kind))), [_words(dice, 150)])
    for turn in range(12):
        read, new = talk.ask(_words(dice, dice.randrange(30, 70)))
        assert turn == 0 or read <= MOST_READ * new, f"turn {turn}: {read} of {new}"


@pytest.mark.parametrize("kind", CONFIGS)
def test_an_edited_end_prefills_only_what_was_edited(kind: str) -> None:
    """First the last question is replaced, and then the last three turns, by another question."""
    dice = random.Random(4)
    talk = _Conversation(Rounds(engine_model(random_model(kind))), [_words(dice, 150)])
    for _ in range(8):
        talk.ask(_words(dice, 40))
    del talk.messages[-2:]
    read, new = talk.ask(_words(dice, 40))
    assert read <= MOST_READ * new
    del talk.messages[-6:]
    read, new = talk.ask(_words(dice, 40))
    assert read <= MOST_READ * new


@pytest.mark.parametrize("kind", CONFIGS)
def test_another_conversation_shares_the_system_prompt(kind: str) -> None:
    dice = random.Random(5)
    system = _words(dice, 150)
    rounds = Rounds(engine_model(random_model(kind)))
    first = _Conversation(rounds, [system])
    for _ in range(6):
        first.ask(_words(dice, 40))
    second = _Conversation(rounds, [system], computed=first.computed)
    read, new = second.ask(_words(dice, 40))
    assert read <= MOST_READ * new


@pytest.mark.parametrize("kind", ["window", "hybrid", "recurrent"])
def test_a_long_conversation_keeps_as_many_snapshots_as_a_short_one(kind: str) -> None:
    dice = random.Random(6)
    rounds = Rounds(engine_model(random_model(kind)))
    talk = _Conversation(rounds, [_words(dice, 40)], compared=False)
    for _ in range(20):
        talk.ask(_words(dice, 30))
    index = rounds.scheduler.planner.entries.index
    entry = index.find(PrefixKey(talk.prompt()[0])).entry
    assert entry is not None
    # The end of an entry needs no snapshot.
    assert 0 < len(index[entry].positions or ()) <= _MOST_SNAPSHOTS + 1
    assert len(index) <= 3, "later turns serve what those before them did"


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("passes", [1, 4, 9])
def test_a_retry_continues_where_a_cancelled_prefill_ended(kind: str, passes: int) -> None:
    dice = random.Random(7)
    model = engine_model(random_model(kind))
    prompt = _words(dice, 400)
    rounds = Rounds(model)
    rounds.submit(1, prompt, ANSWER, ignore_eos=True)
    for _ in range(passes):
        rounds.step()
    filled = len(rounds.scheduler.executor.sequences[1].history)
    assert 0 < filled < len(prompt) - 1
    rounds.scheduler.cancel(1)
    rounds.step()
    rounds.submit(2, prompt, ANSWER, ignore_eos=True)
    rounds.drain()
    retried = rounds.received[2].finished
    assert retried is not None
    assert retried.usage.cached_tokens == filled
    expected = alone(model, prompt, ANSWER, ignore_eos=True).tokens
    assert rounds.received[2].tokens == expected


@pytest.mark.parametrize("kind", CONFIGS)
def test_an_edited_retry_of_a_cancelled_prefill_recomputes_less_than_an_interval(kind: str) -> None:
    dice = random.Random(8)
    prompt = _words(dice, 600)
    rounds = Rounds(engine_model(random_model(kind)))
    rounds.submit(1, prompt, ANSWER, ignore_eos=True)
    while not any(one.filled >= 450 for one in rounds.scheduler.planner.sequences.of("prefill")):
        rounds.step()
    rounds.scheduler.cancel(1)
    rounds.step()
    rounds.submit(2, [*prompt[:400], *_words(dice, 100)], ANSWER, ignore_eos=True)
    rounds.drain()
    retried = rounds.received[2].finished
    assert retried is not None
    assert retried.usage.cached_tokens >= 400 - 128


@pytest.mark.parametrize("kind", CONFIGS)
def test_tokens_generated_before_a_cancellation_are_stored(kind: str) -> None:
    dice = random.Random(9)
    model = engine_model(random_model(kind))
    prompt = _words(dice, 60)
    rounds = Rounds(model)
    rounds.submit(1, prompt, 100, ignore_eos=True)
    while len(rounds.received[1].tokens) < 20:
        rounds.step()
    rounds.scheduler.cancel(1)
    rounds.drain()
    following = [*prompt, *rounds.received[1].tokens, *_words(dice, 10)]
    rounds.submit(2, following, ANSWER, ignore_eos=True)
    rounds.drain()
    finished = rounds.received[2].finished
    assert finished is not None
    assert rounds.received[2].tokens == alone(model, following, ANSWER, ignore_eos=True).tokens
    assert finished.usage.cached_tokens >= len(prompt) + 18


# A recurrent model's state is as large as the charge for a sequence, so a stored one never fits
# beside it.
@pytest.mark.parametrize("kind", ["full", "window", "hybrid"])
def test_a_preempted_sequence_restarts_from_stored_kv(kind: str) -> None:
    dice = random.Random(10)
    model = engine_model(random_model(kind))
    prompts = {1: _words(dice, 40), 2: _words(dice, 300)}
    rounds = Rounds(model)
    for ticket, prompt in prompts.items():
        rounds.submit(ticket, prompt, 40, ignore_eos=True)
        while len(rounds.received[ticket].tokens) < 2:  # it is decoding
            rounds.step()
    planner = rounds.scheduler.planner
    read = rounds.gauges.prompt_tokens_processed
    whole = planner.limits
    # Both are charged for what they may generate: with a little less memory the second is
    # preempted.
    planner.limits = replace(whole, budget=planner._used() - 1)
    rounds.step()
    assert planner.preemptions == 1
    planner.limits = whole
    rounds.drain()
    for ticket, prompt in prompts.items():
        expected = alone(model, prompt, 40, ignore_eos=True).tokens
        assert rounds.received[ticket].tokens == expected
    assert rounds.gauges.prompt_tokens_processed - read < 100

"""A model's own head guesses right, changes no token, and is found as checkpoints name it."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from mlx.utils import tree_flatten

from backend.engine.caching import kv
from backend.engine.drafting.draft_loading import Drafting
from backend.engine.drafting.drafter import GuessRequest
from backend.engine.drafting.head_guesser import HeadGuesser
from backend.engine.drafting.prediction_head import HeadError
from backend.engine.drafting.speculation import Speculation
from backend.engine.engine import Engine
from backend.engine.errors import InvalidRequest
from backend.engine.executing.executor_sequence import ExecutorSequence
from backend.engine.load_request import LoadRequest
from backend.engine.loading.checkpoint import Checkpoint
from backend.engine.model import EngineModel
from backend.engine.planning.guess_width import GuessWidth
from backend.engine.request import Sampling
from tests.engine.drafting.heads import CONFIGS, VOCABULARY, opened, text, write_checkpoint
from tests.engine.loading_models import read_weights, write_model, write_weights
from tests.engine.rounds import Rounds, engine_model
from tests.engine.test_parity import check_schedule
from tests.long import TEST_LONG

pytestmark = [pytest.mark.timeout(1200), pytest.mark.usefixtures("small_grammars")]
SCHEDULES = int(os.environ.get("GUESS_SCHEDULES", "40" if TEST_LONG else "4"))


@pytest.fixture(autouse=True)
def _no_compiler() -> None:
    mx.disable_compile()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    mx.disable_compile()
    return write_checkpoint(tmp_path_factory.mktemp("models") / "trained", "qwen3_5")


class Watched(HeadGuesser):
    """A guesser that notes what it guessed, and after which tokens."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.made: list[tuple[list[int], list[int]]] = []

    def propose(self, asked: Sequence[GuessRequest]) -> list[list[int] | None]:
        found = super().propose(asked)
        self.made += [(list(one.tokens), own) for one, own in zip(asked, found, strict=True) if own]
        return found


def models(checkpoint: Checkpoint, **changes: Any) -> tuple[EngineModel, EngineModel, Watched]:
    """The model without guesses, and with those of its head."""
    model = mlx_lm.load(str(checkpoint.path))[0]
    plain = engine_model(model, **changes)
    head = opened(checkpoint, model)
    guesser = Watched(head, plain.head.project, VOCABULARY)
    drafting = Drafting(6, lambda: [guesser], cost=kv.cost(head), reads_states=True)
    return plain, engine_model(model, drafting=drafting, head=plain.head, **changes), guesser


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.usefixtures("guesses_always")
def test_most_guesses_are_right_and_counted(
    trained: Checkpoint, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: dict[int, list[int]] = {}
    record = Speculation.record

    def noted(self: Speculation, one: ExecutorSequence, proposed: int, accepted: int) -> None:
        if proposed:
            counts = counted.setdefault(one.number, [0, 0])
            counts[0] += proposed
            counts[1] += accepted
        record(self, one, proposed, accepted)

    monkeypatch.setattr(Speculation, "record", noted)
    plain, drafting, guesser = models(trained)
    dice = random.Random(5)
    prompts = [text(dice, dice.randrange(3, 20)) for _ in range(6)]
    answers = []
    for model in (plain, drafting):
        rounds = Rounds(model)
        for ticket, prompt in enumerate(prompts):
            sampling = Sampling(temperature=temperature, seed=ticket)
            rounds.submit(ticket, prompt, 40, sampling=sampling, ignore_eos=True)
            rounds.step()
        rounds.drain()
        assert not rounds.faults
        answers.append([rounds.received[ticket].tokens for ticket in range(len(prompts))])
    assert answers[0] == answers[1]
    right = [0, 0]
    whole = [[*prompt, *answer] for prompt, answer in zip(prompts, answers[0], strict=True)]
    for tokens, guesses in guesser.made:
        own = next(one for one in whole if one[: len(tokens)] == tokens)
        following = own[len(tokens) :]
        right[0] += len(guesses)
        pairs = zip(guesses, following, strict=False)
        right[1] += next(
            (at for at, (guess, token) in enumerate(pairs) if guess != token), len(guesses)
        )
    assert [sum(counts) for counts in zip(*counted.values(), strict=True)] == right
    assert right[1] > 0.7 * right[0] > 60


def test_every_row_says_what_it_says_without_guesses(
    trained: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    dice = random.Random(7)
    monkeypatch.setattr(
        GuessWidth, "choose", lambda self, rows, longest, most: dice.choice([0, most // 2, most])
    )
    plain, drafting, guesser = models(trained, slots=8)
    for seed in range(SCHEDULES):
        try:
            check_schedule(drafting, random.Random(seed), plain)
        except BaseException as fault:
            fault.add_note(f"seed {seed}")
            raise
        assert not guesser.nbytes, "rows that have left are still known"
    assert len(guesser.made) > 10 * SCHEDULES


async def answers_of(checkpoint: Path, **settings: Any) -> tuple[str, float]:
    """What a loaded model says, and the share of its guesses that were right."""
    engine = Engine()
    engine.start()
    try:
        await engine.load(LoadRequest("own", str(checkpoint), settings=settings))
        guessing = engine.metrics().guessing
        return str((await engine.status()).breakdown["weights"]), (
            guessing.accepted / max(guessing.proposed, 1) if guessing else -1
        )
    finally:
        await engine.stop(10)


async def test_a_load_reads_the_head_and_counts_its_weights(trained: Checkpoint) -> None:
    plain, none = await answers_of(trained.path)
    guessing, share = await answers_of(trained.path, mtp=True)
    head = opened(trained, mlx_lm.load(str(trained.path))[0])
    weights = sum(value.nbytes for value in _flat(head).values())
    assert int(guessing) - int(plain) == weights
    assert none == -1
    assert share >= 0


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_head_of_each_family_is_opened(kind: str, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / kind, kind, steps=0)
    model = mlx_lm.load(str(checkpoint.path))[0]
    head = opened(checkpoint, model)
    tokens = mx.array([[1, 2, 3]])
    states = mx.random.normal((1, 3, 32))
    whole = head(tokens, states, cache=head.make_cache())
    cache = head.make_cache()
    parts = [head(tokens[:, at : at + 1], states[:, at : at + 1], cache=cache) for at in range(3)]
    assert mx.allclose(whole, mx.concatenate(parts, axis=1), atol=1e-4)
    assert whole.shape == (1, 3, 32)


def test_weights_as_first_published_give_the_same_head(trained: Checkpoint, tmp_path: Path) -> None:
    """Norms are published without their 1, and convolutions the other way round."""
    published = tmp_path / "published"
    write_model(published, dtype="float32", **CONFIGS["qwen3_5"])
    weights = {
        name: value - 1
        if value.ndim == 1 and "norm" in name and "linear_attn" not in name
        else value.moveaxis(2, 1)
        if name.endswith("conv1d.weight")
        else value
        for name, value in read_weights(trained.path).items()
    }
    write_weights(published, weights)
    other = Checkpoint(published, "published", trained.config, 0)
    heads = [opened(one, mlx_lm.load(str(one.path))[0]) for one in (trained, other)]
    first, second = map(_flat, heads)
    assert first.keys() == second.keys()
    assert all(mx.allclose(first[name], second[name], atol=1e-6) for name in first)


def _flat(head: Any) -> dict[str, mx.array]:
    return dict(tree_flatten(head.parameters()))


def test_a_head_of_other_sizes_is_refused(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "small", "qwen3_5", steps=0)
    weights = read_weights(checkpoint.path)
    weights["mtp.fc.weight"] = weights["mtp.fc.weight"][:, :8]
    model = mlx_lm.load(str(checkpoint.path))[0]
    write_weights(checkpoint.path, weights)
    with pytest.raises(HeadError, match=r"lack projection\.weight"):
        opened(checkpoint, model)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({}, "models of type llama have none that this backend knows"),
        (CONFIGS["qwen3_5"], "its checkpoint has no weights of one"),
    ],
)
async def test_a_model_without_a_head(config: dict[str, Any], why: str, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", **config)
    with pytest.raises(InvalidRequest, match=f"option mtp is true, but model 'own'.*{why}"):
        await answers_of(model, mtp=True)

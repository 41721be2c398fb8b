"""A model's own head guesses right, changes no token, and is found as checkpoints name it."""

from __future__ import annotations

import asyncio
import os
import random
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from backend.engine.caching import kv
from backend.engine.device import detect
from backend.engine.drafting import heads
from backend.engine.drafting.batch_drafter import HeadDrafter
from backend.engine.drafting.draft_loading import Drafting
from backend.engine.drafting.drafter import DraftRequest
from backend.engine.drafting.heads import Choices, HeadError
from backend.engine.engine import Engine
from backend.engine.engine_state import DraftReport
from backend.engine.errors import InvalidRequest, ModelRejected
from backend.engine.executing.executor_sequence import ExecutorSequence
from backend.engine.executing.speculation import Speculation
from backend.engine.load_request import LoadRequest
from backend.engine.loading.checkpoint import Checkpoint
from backend.engine.loading.weights import load_model
from backend.engine.model import EngineModel
from backend.engine.planning.draft_width import DraftWidth
from backend.engine.request import GenerationRequest, Sampling, TokenPrompt
from backend.engine.sampling.logits_head import LogitsHead
from backend.engine.settings import Settings
from common.prefixes import common_prefix
from tests.engine.drafting.heads import (
    CONFIGS,
    LENGTH,
    SPLIT,
    VOCABULARY,
    main_model,
    opened,
    publish,
    split,
    text,
    without_head,
    write_checkpoint,
)
from tests.engine.loading_models import read_weights, write_model, write_weights
from tests.engine.loads import at_once
from tests.engine.rounds import Rounds, engine_model
from tests.engine.test_parity import check_schedule
from tests.engine.vision.seeing import answer_to, asking, seeing
from tests.long import TEST_LONG

pytestmark = [pytest.mark.timeout(1200), pytest.mark.usefixtures("small_grammars")]
SAMPLE = ("qwen3_5_moe", "deepseek_v3", "mimo")
SCHEDULES = int(os.environ.get("GUESS_SCHEDULES", "43" if TEST_LONG else "4"))  # of each family


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    """The trained model of a family, with its head."""
    directory = tmp_path_factory.mktemp("models")

    @cache
    def trained(kind: str) -> Checkpoint:
        return write_checkpoint(directory / kind, kind)

    return trained


@pytest.fixture
def trained(families: Callable[[str], Checkpoint]) -> Checkpoint:
    return families("qwen3_5")


class Watched(HeadDrafter):
    """A guesser that notes what it guessed, and after which tokens."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.made: list[tuple[list[int], list[int]]] = []

    def propose(self, asked: Sequence[DraftRequest]) -> list[list[int] | None]:
        found = super().propose(asked)
        self.made += [(list(one.tokens), own) for one, own in zip(asked, found, strict=True) if own]
        return found


def models(checkpoint: Checkpoint, **changes: Any) -> tuple[EngineModel, EngineModel, Watched]:
    """The model without drafting, and with draft tokens of its head."""
    model = main_model(checkpoint)
    plain = engine_model(model, **changes)
    head = opened(checkpoint, model)
    drafter = Watched(head, Choices(plain.head.project, VOCABULARY))
    drafting = Drafting(6, lambda: [drafter], cost=kv.cost(head), states=plain.head)
    return plain, engine_model(model, drafting=drafting, head=plain.head, **changes), drafter


def counted(made: Sequence[tuple[list[int], list[int]]], whole: Sequence[list[int]]) -> list[int]:
    """The number of guesses, and how many of them are right.

    made: the tokens after which each guess was made, and the guess. whole: all complete texts.
    """
    found = [0, 0]
    for tokens, guesses in made:
        own = next(one for one in whole if one[: len(tokens)] == tokens)
        found[0] += len(guesses)
        found[1] += common_prefix(guesses, own[len(tokens) :])
    return found


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.usefixtures("guesses_always")
def test_most_guesses_are_right_and_counted(
    trained: Checkpoint, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded: dict[int, list[int]] = {}
    record = Speculation.record

    def noted(self: Speculation, one: ExecutorSequence, proposed: int, accepted: int) -> None:
        if proposed:
            counts = recorded.setdefault(one.number, [0, 0])
            counts[0] += proposed
            counts[1] += accepted
        record(self, one, proposed, accepted)

    monkeypatch.setattr(Speculation, "record", noted)
    plain, drafting, drafter = models(trained)
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
    whole = [[*prompt, *answer] for prompt, answer in zip(prompts, answers[0], strict=True)]
    right = counted(drafter.made, whole)
    assert [sum(counts) for counts in zip(*recorded.values(), strict=True)] == right
    assert right[1] > 0.7 * right[0] > 60


def test_requests_without_drafting_need_no_states(
    trained: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    watched = LogitsHead.watched

    def counted(
        self: LogitsHead, columns: mx.array | None = None
    ) -> AbstractContextManager[list[mx.array]]:
        seen.append(1)
        return watched(self, columns)

    monkeypatch.setattr(LogitsHead, "watched", counted)
    _, drafting, _ = models(trained)
    passes = []
    for n_draft in (0, None):
        seen.clear()
        rounds = Rounds(drafting)
        rounds.submit(1, [1, 5, 25], 12, ignore_eos=True, n_draft=n_draft)
        rounds.drain()
        assert not rounds.faults
        passes.append(len(seen))
    assert passes[0] == 0
    assert passes[1] > 3


@pytest.mark.parametrize("kind", CONFIGS if TEST_LONG else ["qwen3_5"])
def test_every_row_gets_the_answer_that_it_gets_without_guesses(
    kind: str, families: Callable[[str], Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    dice = random.Random(7)
    monkeypatch.setattr(
        DraftWidth, "choose", lambda self, rows, longest, most: dice.choice([0, most // 2, most])
    )
    plain, drafting, drafter = models(families(kind), slots=8)
    for seed in range(SCHEDULES):
        check_schedule(drafting, seed, plain)
        assert not drafter.nbytes, "rows that have left are still known"
    assert len(drafter.made) > 10 * SCHEDULES


async def answers_of(checkpoint: Path, **settings: Any) -> tuple[str, float]:
    """What a loaded model says, and the share of its guesses that were right."""
    async with seeing(checkpoint, **settings) as engine:
        guessing = engine.metrics().drafting
        return str((await engine.status()).breakdown["weights"]), (
            guessing.accepted / max(guessing.proposed, 1) if guessing else -1
        )


def some_requests() -> list[GenerationRequest]:
    """Greedy and drawn answers to short prompts."""
    dice = random.Random(5)
    starts = dice.sample(range(1, VOCABULARY), 12)  # no prompt begins like another
    return [
        asking(
            TokenPrompt(tuple(text(dice, 4, start))),
            max_tokens=LENGTH - 4,
            ignore_eos=True,
            sampling=Sampling(temperature=at % 2, seed=at),
        )
        for at, start in enumerate(starts)
    ]


@pytest.mark.parametrize("kind", CONFIGS if TEST_LONG else SAMPLE)
@pytest.mark.usefixtures("guesses_always")
async def test_the_head_of_a_published_model_guesses_right(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loads the published files; the answers are those without the head."""
    path = publish(write_checkpoint(tmp_path / "own", kind), tmp_path / "published").path
    requests = some_requests()
    async with seeing(path, mtp=False) as engine:
        plain = await asyncio.gather(*(answer_to(engine, one) for one in requests))
    made: list[tuple[list[int], list[int]]] = []
    propose = HeadDrafter.propose

    def noted(self: HeadDrafter, asked: Sequence[DraftRequest]) -> list[list[int] | None]:
        found = propose(self, asked)
        made.extend((list(one.tokens), own) for one, own in zip(asked, found, strict=True) if own)
        return found

    async with seeing(path, mtp=True) as engine:
        monkeypatch.setattr(HeadDrafter, "propose", noted)
        answers = await asyncio.gather(*(answer_to(engine, one) for one in requests))
        # The last step's guesses are counted in the one after it, in which all rows leave.
        while (await engine.status()).breakdown["draft_kv_cache"]:
            pass
        guessing = engine.metrics().drafting
    assert [one.tokens for one in answers] == [one.tokens for one in plain]
    whole = [
        [*cast(TokenPrompt, request.prompt).tokens, *answer.tokens]
        for request, answer in zip(requests, plain, strict=True)
    ]
    assert guessing is not None
    assert [guessing.proposed, guessing.accepted] == counted(made, whole)
    assert guessing.accepted > 0.7 * guessing.proposed > 60


async def test_a_load_reads_the_head_and_counts_its_weights(trained: Checkpoint) -> None:
    plain, none = await answers_of(trained.path, mtp=False)
    guessing, share = await answers_of(trained.path, mtp=True)
    head = opened(trained, main_model(trained))
    weights = sum(value.nbytes for value in _flat(head).values())
    assert int(guessing) - int(plain) == weights
    assert none == -1
    assert share >= 0
    assert (guessing, share) == await answers_of(trained.path), "auto does not draft"


async def answers(
    path: Path, draft_model: str = "", **settings: Any
) -> tuple[list[tuple[int, ...]], DraftReport | None]:
    """The tokens of requests of which some run together, and what drafting did."""
    requests = some_requests()
    engine = Engine()
    engine.start()
    try:
        await engine.load(LoadRequest("m", str(path), settings=settings, draft_model=draft_model))
        # The last of them alone: not every family drafts for sequences that decode together.
        found = await asyncio.gather(*(answer_to(engine, request) for request in requests[:6]))
        found += [await answer_to(engine, request) for request in requests[6:]]
        while (await engine.status()).breakdown.get("draft_kv_cache"):
            pass
        return [outcome.tokens for outcome in found], engine.metrics().drafting
    finally:
        await engine.stop(10)


@pytest.mark.parametrize("place", ["named", "mtp", "sibling"])
@pytest.mark.parametrize("kind", SPLIT if TEST_LONG else ["qwen3_5_moe", "nemotron_h"])
@pytest.mark.usefixtures("guesses_always")
async def test_a_head_that_mlx_vlm_has_split_from_its_model_guesses_right(
    kind: str, place: str, families: Callable[[str], Checkpoint], tmp_path: Path
) -> None:
    """The head is named as DraftModel, or lies in the model's folder or beside it."""
    published = publish(families(kind), tmp_path / "published")
    model = without_head(published, tmp_path / "model")
    named = {"named": "elsewhere", "mtp": "model/mtp", "sibling": "model-mtp"}[place]
    head = split(published, tmp_path / named)
    plain, none = await answers(model, mtp=False)
    assert none is None
    found, report = await answers(model, str(head) if place == "named" else "")
    assert found == plain
    assert report is not None
    assert report.drafters == "prediction head"
    assert report.accepted > 0.7 * report.proposed > 40


async def test_a_split_head_of_another_model_is_refused(
    families: Callable[[str], Checkpoint], tmp_path: Path
) -> None:
    head = split(publish(families("qwen3_5"), tmp_path / "published"), tmp_path / "head")
    with pytest.raises(ModelRejected, match="drafter 'head' cannot draft for 'm': it is for"):
        await answers(families("nemotron_h").path, str(head))


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("broken", ["lacks a tensor", "is cut", "has another shape"])
async def test_a_broken_head_is_left_out_unless_mtp_is_set(
    broken: str,
    beside: bool,
    families: Callable[[str], Checkpoint],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """`is cut` is about the file of a head beside the model: a model's own would be cut too."""
    published = publish(families("qwen3_5"), tmp_path / "published")
    model = without_head(published, tmp_path / "model")
    head = split(published, tmp_path / "model-mtp") if beside else None
    file = (head / "model.safetensors") if head else model / "mtp.safetensors"
    weights: Any = (
        mx.load(str(file))
        if head
        else {name: value for name, value in read_weights(published.path).items() if "mtp." in name}
    )
    prefix = "" if head else "mtp."
    if broken == "lacks a tensor":
        del weights[f"{prefix}fc.weight"]
    elif broken == "has another shape":
        weights[f"{prefix}fc.weight"] = weights[f"{prefix}fc.weight"][:, :8]
    mx.save_safetensors(str(file), weights)
    if broken == "is cut":
        file.write_bytes(file.read_bytes()[:-1000])
    plain, none = await answers(model, mtp=False)
    assert none is None
    caplog.clear()
    found, report = await answers(model)
    assert (found, report) == (plain, None)
    warnings = [one for one in caplog.records if one.levelname == "WARNING"]
    assert len(warnings) == 1, [one.getMessage() for one in warnings]
    assert "draft" in warnings[0].getMessage()
    with pytest.raises((InvalidRequest, ModelRejected), match=r"mtp"):
        await answers(model, mtp=True)


@pytest.mark.usefixtures("guesses_always")
async def test_a_head_in_a_file_that_mlx_lm_does_not_load_drafts(
    families: Callable[[str], Checkpoint], tmp_path: Path
) -> None:
    """The model was converted, the head's file is as first published."""
    trained = families("qwen3_5")
    model = without_head(trained, tmp_path / "model")
    raw = read_weights(publish(trained, tmp_path / "published").path)
    own = {name: value for name, value in raw.items() if name.startswith("mtp.")}
    mx.save_safetensors(str(model / "mtp.safetensors"), own, metadata={"format": "pt"})
    plain, _ = await answers(model, mtp=False)
    found, report = await answers(model)
    assert found == plain
    assert report is not None
    assert report.accepted > 0.7 * report.proposed > 60


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_head_of_each_family_is_opened(kind: str, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / kind, kind, steps=0)
    model = main_model(checkpoint)
    head = opened(checkpoint, model)
    tokens = mx.array([[1, 2, 3]])
    states = mx.random.normal((1, 3, 32))
    whole = head(tokens, states, cache=head.make_cache())
    cache = head.make_cache()
    parts = [head(tokens[:, at : at + 1], states[:, at : at + 1], cache=cache) for at in range(3)]
    assert mx.allclose(whole, mx.concatenate(parts, axis=1), atol=1e-4)
    assert whole.shape == (1, 3, 32)


@pytest.mark.parametrize("kind", CONFIGS)
def test_weights_as_first_published_give_the_same_head(kind: str, tmp_path: Path) -> None:
    own = write_checkpoint(tmp_path / "own", kind, steps=0)
    other = publish(own, tmp_path / "published")
    device = detect()
    loaded = [at_once(load_model(one, Settings(), device)) for one in (own, other)]
    heads = [opened(one, each.model) for one, each in zip((own, other), loaded, strict=True)]
    first, second = map(_flat, heads)
    assert first.keys() == second.keys()
    assert all(mx.allclose(first[name], second[name], atol=1e-6) for name in first)


def _flat(head: Any) -> dict[str, mx.array]:
    return dict(tree_flatten(head.parameters()))


def test_a_head_of_other_sizes_is_refused(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "small", "qwen3_5", steps=0)
    weights = read_weights(checkpoint.path)
    weights["mtp.fc.weight"] = weights["mtp.fc.weight"][:, :8]
    model = main_model(checkpoint)
    write_weights(checkpoint.path, weights)
    with pytest.raises(HeadError, match=r"no projection\.weight of the shape"):
        opened(checkpoint, model)


@pytest.mark.parametrize(
    ("mode", "bits", "group_size"),
    [("affine", 8, 32), ("affine", 3, 64), ("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)],
)
def test_a_head_is_quantised_as_its_weights_show(
    mode: str, bits: int, group_size: int, tmp_path: Path
) -> None:
    """Conversions quantise a head in another way than the layers that config.json describes."""
    quantisation = {"group_size": 32, "bits": 4}
    checkpoint = write_checkpoint(tmp_path / "m", "qwen3_5", steps=0, quantization=quantisation)
    model = main_model(checkpoint)
    weights = read_weights(checkpoint.path)
    parts = mx.quantize(weights["mtp.fc.weight"], group_size, bits, mode)
    names = ("weight", "scales", "biases")[: len(parts)]
    weights |= {f"mtp.fc.{name}": part for name, part in zip(names, parts, strict=True)}
    write_weights(checkpoint.path, weights)
    layer = opened(checkpoint, model).projection
    assert (layer.mode, layer.bits, layer.group_size) == (mode, bits, group_size)
    assert mx.array_equal(layer.weight, parts[0])


async def test_a_model_without_a_head_is_loaded_without_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What only a head needs, such as the model's embedding, may then have any name."""
    monkeypatch.setattr(heads, "IS_EMBEDDING", re.compile("another name"))
    await answers(write_model(tmp_path / "model"))
    assert not [record.message for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({}, "but not for llama"),
        (CONFIGS["qwen3_5"], "its checkpoint lacks the head's weights"),
    ],
)
async def test_a_model_without_a_head(config: dict[str, Any], why: str, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", **config)
    with pytest.raises(InvalidRequest, match=f"option mtp is true, but model 'model'.*{why}"):
        await answers_of(model, mtp=True)

"""EAGLE-3 and DFlash guess right, change no token, and are found as checkpoints describe them."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest
from mlx_lm.utils import load_model

from backend.engine.caching import kv
from backend.engine.caching.cache_kind import CacheKind
from backend.engine.device import detect
from backend.engine.drafting.batch_drafter import StateDrafter
from backend.engine.drafting.draft_loading import Drafting, load_drafting
from backend.engine.drafting.drafter import DraftRequest
from backend.engine.drafting.hidden_states import MOST, UnreadStates
from backend.engine.engine import Engine
from backend.engine.errors import ModelRejected
from backend.engine.load_request import LoadRequest
from backend.engine.loading.checkpoint import Checkpoint, inspect
from backend.engine.loading.early_layers import start_layers_early
from backend.engine.loading.load_order import LoadOrder
from backend.engine.loading.stages import at_once
from backend.engine.loading.weights import LoadedModel
from backend.engine.planning.charges import Charges
from backend.engine.planning.draft_width import NEAR, DraftWidth
from backend.engine.planning.plan import CacheCost, Limits
from backend.engine.request import Sampling, TokenPrompt
from backend.engine.sampling.logits_head import LogitsHead
from backend.engine.settings import Settings
from common.prefixes import common_prefix
from tests.engine.drafting.drafters import DRAFT_VOCABULARY, FORMS, drafter_of
from tests.engine.drafting.heads import main_model, text, write_checkpoint
from tests.engine.drafting.tiny import MODELS
from tests.engine.loading_models import read_weights, write_weights
from tests.engine.random_models import VOCABULARY
from tests.engine.rounds import Rounds, engine_model
from tests.engine.steady_cost import peak_bytes
from tests.engine.test_parity import check_schedule
from tests.engine.vision.seeing import answer_to, asking
from tests.long import TEST_LONG

pytestmark = [pytest.mark.timeout(1200), pytest.mark.usefixtures("small_grammars")]
SCHEDULES = int(os.environ.get("GUESS_SCHEDULES", "34" if TEST_LONG else "2"))
PAIRS = [(kind, form) for kind in ("full", "window", "hybrid") for form in FORMS]
SAMPLE = [("full", "eagle"), ("hybrid", "dflash")]
LENGTH = 24


class Noted:
    """What the guessers proposed, and after which tokens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[tuple[list[int], list[int]]] = []
        propose = StateDrafter.propose

        def noted(of: StateDrafter, asked: Sequence[DraftRequest]) -> list[list[int] | None]:
            found = propose(of, asked)
            pairs = zip(asked, found, strict=True)
            self.made += [(list(one.tokens), own) for one, own in pairs if own]
            return found

        monkeypatch.setattr(StateDrafter, "propose", noted)

    def counted(self, whole: Sequence[list[int]]) -> list[int]:
        """How many guesses were made, and how many of them are in the whole texts."""
        found = [0, 0]
        for tokens, guesses in self.made:
            own = next(one for one in whole if one[: len(tokens)] == tokens)
            found[0] += len(guesses)
            found[1] += common_prefix(guesses, own[len(tokens) :])
        return found


async def _loaded(drafter: Path | None, model: Path, **settings: Any) -> Engine:
    engine = Engine()
    engine.start()
    draft = "" if drafter is None else str(drafter)
    try:
        await engine.load(LoadRequest("model", str(model), draft_model=draft, settings=settings))
    except BaseException:
        await engine.stop(10)
        raise
    return engine


@pytest.mark.parametrize(("kind", "form"), PAIRS if TEST_LONG else SAMPLE)
@pytest.mark.usefixtures("guesses_always")
async def test_a_drafter_guesses_right_and_changes_nothing(
    kind: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loads the drafter from its files; the answers are those without the drafter."""
    drafter = drafter_of(kind, form)
    dice = random.Random(5)
    starts = dice.sample(range(1, VOCABULARY), 12)  # no prompt begins like another
    requests = [
        asking(
            TokenPrompt(tuple(text(dice, 8, start))),
            max_tokens=LENGTH - 8,
            ignore_eos=True,
            sampling=Sampling(temperature=at % 2, seed=at),
        )
        for at, start in enumerate(starts)
    ]
    engine = await _loaded(None, drafter.parent / "model")
    plain = await asyncio.gather(*(answer_to(engine, one) for one in requests))
    await engine.stop(10)
    engine = await _loaded(drafter, drafter.parent / "model")
    noted = Noted(monkeypatch)
    answers = await asyncio.gather(*(answer_to(engine, one) for one in requests))
    # The last step's draft tokens are counted in the next step, in which all rows leave.
    while (await engine.status()).breakdown["draft_kv_cache"]:
        pass
    guessing = engine.metrics().drafting
    await engine.stop(10)
    assert [one.tokens for one in answers] == [one.tokens for one in plain]
    whole = [
        [*cast(TokenPrompt, request.prompt).tokens, *answer.tokens]
        for request, answer in zip(requests, plain, strict=True)
    ]
    assert guessing is not None
    assert [guessing.proposed, guessing.accepted] == noted.counted(whole)
    assert guessing.accepted > 0.6 * guessing.proposed > 60
    assert guessing.drafters == ("DFlash" if form == "dflash" else "EAGLE-3")


def _drafting(drafter: Path, model: Path) -> tuple[Any, Drafting]:
    """A model, and how it drafts, loaded as the engine loads it."""
    network = load_model(model)[0]
    found = inspect(drafter, "drafter", Settings(), drafts=True)
    drafting = _drafting_of(network, LogitsHead(network, VOCABULARY), model, found)
    assert drafting is not None
    return network, drafting


def _drafting_of(
    network: Any, head: LogitsHead, model: Path, drafter: Checkpoint | None
) -> Drafting | None:
    config = {"model_type": network.model_type}
    loaded = LoadedModel(
        "model", network, cast(Any, None), config, frozenset(), 4096, 0, "float32", ""
    )
    order = LoadOrder(
        LoadRequest("model", str(model)),
        0,
        Settings(),
        inspect(model, "model", Settings()),
        CacheKind(),
        (),
        drafter,
        cast(Any, None),
    )
    return at_once(load_drafting(order, loaded, head, 4096, detect()))


def test_looking_for_a_head_computes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    network = load_model(MODELS / "tiny_text")[0]
    head = LogitsHead(network, VOCABULARY)
    start_layers_early(network)
    started: list[Any] = []
    monkeypatch.setattr(mx, "async_eval", started.append)
    assert _drafting_of(network, head, MODELS / "tiny_text", None) is None
    assert not started


@pytest.mark.parametrize(("kind", "form"), PAIRS if TEST_LONG else SAMPLE)
def test_every_row_gets_the_answer_that_it_gets_without_guesses(
    kind: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dice = random.Random(7)
    monkeypatch.setattr(
        DraftWidth, "choose", lambda self, rows, longest, most: dice.choice([0, most // 2, most])
    )
    noted = Noted(monkeypatch)
    drafter = drafter_of(kind, form)
    network, drafting = _drafting(drafter, drafter.parent / "model")
    plain = engine_model(network, slots=8)
    model = engine_model(network, slots=8, drafting=drafting)
    for seed in range(SCHEDULES):
        check_schedule(model, seed, plain)
    assert len(noted.made) > 8 * SCHEDULES


def test_steps_without_guesses_do_no_work_for_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """At width 0, keeping the states for a later guess must cost next to nothing."""
    monkeypatch.setattr(DraftWidth, "choose", lambda self, rows, longest, most: 0)
    drafter = drafter_of("full", "eagle")
    network, drafting = _drafting(drafter, drafter.parent / "model")
    rounds = Rounds(engine_model(network, slots=8, drafting=drafting))
    added: list[int] = []
    add = UnreadStates.add

    def noted(own: UnreadStates, states: mx.array) -> None:
        added.append(states.shape[0])
        add(own, states)

    monkeypatch.setattr(UnreadStates, "add", noted)
    for number in range(4):
        rounds.submit(number, text(random.Random(number), 8), 64, ignore_eos=True)
    rounds.drain()
    assert sum(added) >= 4 * (8 + 62)
    assert len(added) < 4 * 64 / 8


ROWS = 6


@pytest.mark.parametrize("form", ["eagle", "dflash", "qwen3_5", "deepseek_v3"])
def test_the_passes_of_a_head_take_no_more_memory_than_is_charged(
    form: str, tmp_path: Path
) -> None:
    """For sequences that catch up with as many states as are stored, and for those that did."""
    if form in FORMS:
        drafter = drafter_of(next(kind for kind, other in SAMPLE if other == form), form)
        network, drafting = _drafting(drafter, drafter.parent / "model")
    else:
        checkpoint = write_checkpoint(tmp_path / form, form, steps=0)
        network = main_model(checkpoint)
        found = _drafting_of(network, LogitsHead(network, VOCABULARY), checkpoint.path, None)
        assert found is not None
        drafting = found
    (drafter_of_batch,) = drafting.new_drafters()
    assert drafting.states is not None
    assert drafting.cost is not None
    prompt = [token % VOCABULARY for token in range(1, 2 * MOST)]
    with drafting.states.watched() as seen:
        network(mx.array([prompt]), cache=kv.new_row(network))
    states = mx.contiguous(seen[-1][0])
    limits = Limits(
        CacheCost(0, 0), 8, 1 << 40, 0, 0, 512, 250, True, True, draft_passes=drafting.passes
    )
    unread = [UnreadStates() for _ in range(ROWS)]
    taken: list[int] = []
    for parts in ((MOST - 1, MOST), (1,), (NEAR,), (3,)):
        for count in parts:
            prompt += [1] * count
            for own in unread:
                own.add(mx.contiguous(states[-count:]))
                mx.eval(list(own._parts))
        assert unread[0].nbytes <= drafting.cost.fixed
        asked = [DraftRequest(at, prompt, 8, own) for at, own in enumerate(unread)]
        taken.append(peak_bytes(partial(drafter_of_batch.propose, asked)))
    cost, longest = drafting.cost, len(prompt)
    copies = ROWS * (cost.copied(longest) - cost.of(longest))
    charged = Charges(limits).draft_tokens(ROWS, 1, longest)
    assert max(taken) <= copies + charged, taken
    assert charged < 12 * max(taken)


def _changed(drafter: Path, directory: Path, config: dict[str, Any], **tensors: Any) -> Path:
    """A copy of a drafter with other configuration, and with tensors replaced or removed."""
    directory.mkdir()
    written = json.loads((drafter / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(written | config))
    weights = read_weights(drafter) | tensors
    left = {name: value for name, value in weights.items() if value is not None}
    write_weights(directory, left)
    return directory


@pytest.mark.parametrize(
    ("form", "config", "tensors", "why"),
    [
        (
            "eagle",
            {"hidden_size": 16},
            {},
            "it was trained for a model whose states have 16 numbers, but those of this model have",
        ),
        (
            "eagle",
            {"eagle_aux_hidden_state_layer_ids": [0, 1, 7]},
            {},
            "it needs the states before layers [0, 1, 7], which this backend cannot read from a",
        ),
        (
            "eagle",
            {"eagle_aux_hidden_state_layer_ids": [0, 1]},
            {},
            "it reads states before layers [0, 1], but EAGLE-3 reads three of them",
        ),
        ("eagle", {}, {"fc.weight": None}, "its weights have no inner.fc.weight of the shape that"),
        (
            "eagle",
            {},
            {"midlayer.self_attn.q_norm.weight": mx.zeros(8)},
            "its weights have inner.layers.0.self_attn.q_norm.weight, which is not a part of",
        ),
        (
            "eagle",
            {},
            {"d2t": mx.full(DRAFT_VOCABULARY, 50, mx.int64)},
            "its d2t has token ids beyond the 96 of this model",
        ),
        (
            "eagle",
            {"num_attention_heads": 0},
            {},
            "its files do not describe a head that can be built (ZeroDivisionError)",
        ),
        ("dflash", {"block_size": 1}, {}, "its block_size is 1, which leaves no token to draft"),
        (
            "dflash",
            {"hidden_size": 16},
            {},
            "it was trained for a model whose states have 16 numbers",
        ),
        (
            "dflash",
            {"dflash_config": {"mask_token_id": 96, "target_layer_ids": [0, 1]}},
            {},
            "its mask_token_id 96 is not a token of this model",
        ),
        (
            "dflash",
            {"dflash_config": {"mask_token_id": 0, "target_layer_ids": [0, 1, 1]}},
            {},
            "its weights have no inner.fc.weight of the shape that DFlash needs",
        ),
    ],
)
def test_a_drafter_of_another_model_is_refused(
    form: str,
    config: dict[str, Any],
    tensors: dict[str, Any],
    why: str,
    tmp_path: Path,
) -> None:
    kind = next(kind for kind, other in SAMPLE if other == form)
    drafter = drafter_of(kind, form)
    changed = _changed(drafter, tmp_path / "drafter", config, **tensors)
    with pytest.raises(ModelRejected) as caught:
        _drafting(changed, drafter.parent / "model")
    assert str(caught.value).startswith(
        f"DraftModel: drafter 'drafter' cannot draft for 'model': {why}"
    )


@pytest.mark.parametrize("form", FORMS)
def test_a_drafter_is_no_model(form: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FORMS[form]))
    write_weights(tmp_path, {"fc.weight": mx.zeros((1, 1))})
    with pytest.raises(ModelRejected, match="so name the model that it was trained for, and set"):
        inspect(tmp_path, "model", Settings())


def test_a_quantised_drafter_guesses_too(tmp_path: Path) -> None:
    drafter = drafter_of("full", "eagle")
    weights = read_weights(drafter)
    quantised: dict[str, Any] = {}
    for name in ("fc", "midlayer.mlp.down_proj"):
        packed, scales, biases = mx.quantize(weights[f"{name}.weight"], 32, 8)
        quantised |= {f"{name}.weight": packed, f"{name}.scales": scales, f"{name}.biases": biases}
    config = {"quantization": {"group_size": 32, "bits": 8}}
    changed = _changed(drafter, tmp_path / "drafter", config, **quantised)
    found = [_first_guess(path, drafter.parent / "model") for path in (drafter, changed)]
    assert found[0] == found[1]
    assert found[0]


def _first_guess(drafter: Path, model: Path) -> list[int] | None:
    network, drafting = _drafting(drafter, model)
    assert drafting.states is not None
    prompt = text(random.Random(2), 8)
    unread = UnreadStates()
    with drafting.states.watched() as seen:
        network(mx.array([prompt[:-1]]), cache=kv.new_row(network))
    unread.add(seen[-1][0])
    (new,) = drafting.new_drafters()
    (found,) = new.propose([DraftRequest(1, prompt, 3, unread)])
    return found


@pytest.mark.parametrize(("kind", "form"), SAMPLE)
def test_guesses_are_the_same_in_a_batch_as_alone(kind: str, form: str) -> None:
    """Sequences come, go, pause, and differ in how many of their guesses are right."""
    drafter = drafter_of(kind, form)
    _, drafting = _drafting(drafter, drafter.parent / "model")

    def new() -> StateDrafter:
        (made,) = drafting.new_drafters()
        assert isinstance(made, StateDrafter)
        made._least_probability = 0
        return made

    long_lived, dice = new(), random.Random(3)
    size = 32 * (3 if form == "eagle" else 2)
    texts: dict[int, list[int]] = {}
    unread: dict[int, UnreadStates] = {}
    known: dict[int, list[mx.array]] = {}

    def grow(number: int, tokens: Sequence[int]) -> None:
        states = mx.random.normal((len(tokens), size), key=mx.random.key(dice.randrange(10**6)))
        texts[number] += tokens
        unread[number].add(states)
        known[number].append(states)

    together = 0
    for step in range(24):
        if len(texts) < 4 and dice.random() < 0.4:
            texts[step], unread[step], known[step] = [5], UnreadStates(), []
            grow(step, [dice.randrange(VOCABULARY) for _ in range(dice.choice([1, 9, 50]))])
        if texts and dice.random() < 0.15:
            gone = dice.choice(list(texts))
            del texts[gone]
            long_lived.forget([gone])
        asked = [
            DraftRequest(number, texts[number], dice.randint(1, 4), unread[number])
            for number in texts
            if dice.random() < 0.8
        ]
        found = long_lived.propose(asked)
        together += len(asked) > 1
        for one, own in zip(asked, found, strict=True):
            whole = UnreadStates()
            whole.add(mx.concatenate(known[one.sequence]))
            alone = DraftRequest(one.sequence, one.tokens, one.most, whole)
            assert [own] == new().propose([alone])
            assert own is not None
            right = own[: dice.randint(0, len(own))]
            grow(one.sequence, [*right, dice.randrange(VOCABULARY)])
    assert together > 8

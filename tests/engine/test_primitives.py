"""How many operations a decode step starts on a GPU: never more than mlx-lm's for the same rows."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import BatchGenerator
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from backend.engine import device
from backend.engine.request import Sampling
from tests.engine.compiling import compiled
from tests.engine.kernels import kernels
from tests.engine.random_models import CONFIGS, VOCABULARY, drawn_weights
from tests.engine.rounds import Rounds, engine_model

LAYERS = 16
DRAWN = Sampling(temperature=0.9, seed=1)
SETTINGS = {
    "greedy": Sampling(),
    "temperature": DRAWN,
    "top_p": Sampling(temperature=0.9, top_p=0.95, seed=1),
    "min_p": Sampling(temperature=0.9, min_p=0.05, seed=1),
    "top_k and top_p": Sampling(temperature=0.9, top_k=40, top_p=0.95, seed=1),
    "penalties": Sampling(repetition=1.1, window=20, presence=0.5, presence_window=20),
}
# ours and mlx-lm's, for 1, 8 and 32 rows; one sampled step in 16 also makes the noise of all 16
TABLE: dict[str, tuple[tuple[int, int], ...]] = {
    "greedy": ((326, 411), (394, 411), (394, 411)),
    "temperature": ((333, 420), (401, 414), (401, 414)),
    "top_p": ((345, 427), (413, 421), (413, 421)),
    "min_p": ((333, 422), (401, 416), (401, 416)),
    "top_k and top_p": ((347, 430), (415, 424), (415, 424)),
    "penalties": ((345, 434), (413, 596), (413, 1148)),
}


class Counted(BaseException):
    """Ends a step when its operations have been counted, before they run."""


@cache
def model() -> Any:
    config = CONFIGS["full"] | {"num_hidden_layers": LAYERS}
    architecture = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    made = architecture.Model(architecture.ModelArgs.from_dict(config))
    made.update(drawn_weights(made))
    mx.eval(made.parameters())
    return made


def rms_norm(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    return x * weight


def rope(a: mx.array, dims: int, *, offset: Any, **_: Any) -> mx.array:
    return a + (mx.reshape(offset, (-1, 1, 1, 1)) if isinstance(offset, mx.array) else offset)


def attention(q: mx.array, k: mx.array, v: mx.array, *, mask: Any = None, **_: Any) -> mx.array:
    found = q + k[:, :1, :1, :1] + v[:, :1, :1, :1]
    return found + mask[..., :1, :1] if isinstance(mask, mx.array) else found


def operations(step: Callable[[], object]) -> int:
    """Of one step, with functions compiled and fast functions of one operation, as on a GPU."""
    counts: list[int] = []

    def count(*arrays: Any) -> None:
        counts.append(kernels(arrays))
        raise Counted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx, "async_eval", count)
        patch.setattr(mx.fast, "rms_norm", rms_norm)
        patch.setattr(mx.fast, "rope", rope)
        patch.setattr(mx.fast, "scaled_dot_product_attention", attention)
        with compiled(), pytest.raises(Counted):
            step()
    return counts[0]


def ours(sampling: Sampling, rows: int) -> Callable[[], object]:
    rounds = Rounds(engine_model(model(), slots=rows, end_tokens=frozenset()))
    for ticket in range(1, rows + 1):
        rounds.submit(ticket, prompt(ticket), 50, sampling=sampling)
    while len(rounds.tickets("decode")) < rows:
        rounds.step()
    for _ in range(3):
        rounds.step()
    return rounds.step


def theirs(sampling: Sampling, rows: int) -> Callable[[], object]:
    generator = BatchGenerator(
        model(),
        sampler=make_sampler(
            sampling.temperature, sampling.top_p, sampling.min_p, top_k=sampling.top_k
        ),
        completion_batch_size=rows,
        stream=mx.default_stream(mx.default_device()),
    )
    processors = []
    if sampling.repetition != 1:
        processors = make_logits_processors(
            repetition_penalty=sampling.repetition, presence_penalty=sampling.presence
        )
    generator.insert(
        [prompt(ticket) for ticket in range(1, rows + 1)], logits_processors=[processors] * rows
    )
    for _ in range(12):
        generator.next()
    step: Callable[[], object] = generator.next
    return step


def prompt(ticket: int) -> list[int]:
    return [(ticket * 7 + at) % (VOCABULARY - 1) + 1 for at in range(5 + ticket % 9)]


@pytest.mark.parametrize("name", SETTINGS)
def test_a_step_has_no_more_operations_than_mlx_lms(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "may_wait_within_a_step", lambda: False)
    found = tuple(
        tuple(operations(side(SETTINGS[name], rows)) for side in (ours, theirs))
        for rows in (1, 8, 32)
    )
    assert found == TABLE[name]
    assert all(own <= other for own, other in found)


@pytest.mark.parametrize(("logprobs", "reads"), [(None, 1), (3, 2)])
@pytest.mark.usefixtures("each_order")
def test_a_step_reads_from_the_device_once_and_once_more_for_log_probabilities(
    logprobs: int | None, reads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = Rounds(engine_model(model(), slots=4, end_tokens=frozenset()))
    for ticket in range(1, 5):
        rounds.submit(ticket, prompt(ticket), 50, logprobs=logprobs)
    while len(rounds.tickets("decode")) < 4:
        rounds.step()
    rounds.step()
    counted = 0

    def counting(read: Any) -> Any:
        def run(*given: Any, **named: Any) -> Any:
            nonlocal counted
            counted += 1
            return read(*given, **named)

        return run

    for owner, name in ((mx.array, "tolist"), (mx.array, "item"), (np, "array")):
        monkeypatch.setattr(owner, name, counting(getattr(owner, name)))
    for _ in range(5):
        rounds.step()
    assert counted == 5 * reads

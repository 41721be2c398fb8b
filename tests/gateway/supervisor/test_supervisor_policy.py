"""The supervisor's decisions: which model to unload, when to retry, which names are not paths."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import ApiError
from gateway.models.reading import ModelFolder
from gateway.supervisor import policy
from gateway.supervisor.catalogue import Catalogue
from gateway.supervisor.policy import Failures, Limits, Loaded

_MODELS = st.lists(
    st.builds(
        Loaded,
        model=st.just(0),
        memory=st.integers(0, 9),
        busy=st.booleans(),
        pinned=st.booleans(),
        last_used=st.integers(0, 20).map(float),
        idle_after=st.sampled_from([0.0, 5.0]),
    ),
    max_size=6,
).map(
    lambda models: [
        Loaded(place, m.memory, m.busy, m.pinned, m.last_used, m.idle_after)
        for place, m in enumerate(models)
    ]
)
_LIMITS = st.builds(Limits, models=st.integers(0, 4), memory=st.integers(0, 20))


def _fits(stay: list[Loaded[int]], coming: int, limits: Limits) -> bool:
    return limits.hold(len(stay) + 1, sum(model.memory for model in stay) + coming)


@given(_MODELS, st.integers(0, 9), _LIMITS)
def test_only_idle_models_are_unloaded_and_no_more_than_necessary(
    loaded: list[Loaded[int]], coming: int, limits: Limits
) -> None:
    leaving = policy.to_unload(loaded, coming, limits)
    free = [model for model in loaded if not model.busy and not model.pinned]
    if leaving is None:
        assert not _fits([model for model in loaded if model not in free], coming, limits)
        return
    assert all(model in free for model in leaving)
    assert _fits([model for model in loaded if model not in leaving], coming, limits)
    for spared in leaving:
        stay = [model for model in loaded if model not in leaving or model is spared]
        assert not _fits(stay, coming, limits)


@given(_MODELS)
def test_the_least_recently_used_is_unloaded_first(loaded: list[Loaded[int]]) -> None:
    free = [model for model in loaded if not model.busy and not model.pinned]
    leaving = policy.to_unload(loaded, 0, Limits(models=len(loaded)))
    if not loaded:
        assert leaving == []
    elif not free:
        assert leaving is None
    else:
        assert leaving is not None
        assert [model.last_used for model in leaving] == [min(m.last_used for m in free)]


@given(_MODELS, _LIMITS)
def test_the_most_recently_used_stays_in_any_case(
    loaded: list[Loaded[int]], limits: Limits
) -> None:
    leaving = policy.over_limits(loaded, limits)
    assert all(not model.busy and not model.pinned for model in leaving)
    assert not loaded or len(leaving) < len(loaded)
    for model in leaving:
        assert model.last_used <= max(other.last_used for other in loaded)
    if limits == Limits():
        assert leaving == []


@given(_MODELS, st.integers(0, 40).map(float))
def test_idle_models_are_those_past_their_idle_time(loaded: list[Loaded[int]], now: float) -> None:
    for model in loaded:
        past = model.idle_after > 0 and now >= model.last_used + model.idle_after
        unused = not model.busy and not model.pinned
        assert (model in policy.idle(loaded, now)) == (past and unused)


def test_the_pauses_after_failures_in_a_row() -> None:
    failures, pauses = Failures(), []
    for _ in range(8):
        failures = policy.after_failure(failures, "why", 0.0, now=100.0)
        pauses.append(failures.retry_at - 100.0)
    assert pauses == [0, 1, 2, 4, 8, 16, 30, 30]
    assert failures.sentence == "why"


@given(st.integers(0, 10**6), st.floats(0, 1e6), st.floats(0, 1e6))
def test_after_a_good_run_a_crash_counts_as_the_first(count: int, ran: float, now: float) -> None:
    after = policy.after_failure(Failures(count), "", ran, now)
    assert after.count == (1 if ran >= policy.GOOD_RUN else count + 1)
    assert 0 <= after.retry_at - now <= policy.LONGEST_PAUSE + 1e-3
    assert policy.remembered(after, now, now)
    assert not policy.remembered(after, now, now + policy.LONGEST_PAUSE + policy.GOOD_RUN + 1)


_PARTS = st.sampled_from(["..", ".", "", "a", "model", "outside", "~", "\0", "a\n", "%2e", "C:"])


@given(st.lists(_PARTS, max_size=4).map("/".join) | st.text(max_size=12))
def test_no_name_in_a_request_leaves_the_models_folder(name: str) -> None:
    models = Path(__file__).parent / "models_of_nobody"
    catalogue = Catalogue(ModelFolder(), models, allow_unlisted=True)
    with contextlib.suppress(ApiError):
        assert catalogue.resolve(name).parameters.model == name
        owner, slash, repository = name.partition("/")
        assert slash
        assert owner[0].isalnum()
        assert repository[0].isalnum()
        assert ".." not in name
        assert (models / name).resolve().is_relative_to(models)


@given(st.permutations(range(4)))
def test_the_order_of_the_list_does_not_matter(order: list[int]) -> None:
    models = [Loaded(place, place + 1, False, False, float(place), 0.0) for place in range(4)]
    mixed = [models[place] for place in order]
    for count, memory in itertools.product(range(5), range(12)):
        limits = Limits(count, memory)
        assert policy.to_unload(mixed, 1, limits) == policy.to_unload(models, 1, limits)


def test_idle_models_are_unloaded_even_if_that_is_not_enough() -> None:
    busy = Loaded(1, 100, True, False, 1.0, 0.0)
    idle = Loaded(2, 10, False, False, 2.0, 0.0)
    latest = Loaded(3, 10, False, False, 3.0, 0.0)
    assert policy.over_limits([busy, idle, latest], Limits(memory=50)) == [idle]

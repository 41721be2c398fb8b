"""The interval with which a comparison in pairs is decided."""

from __future__ import annotations

import random

import pytest

from bench.pairs import interval


@pytest.mark.parametrize("count", [16, 40, 101])
def test_the_interval_contains_the_median_in_nearly_all_samples(count: int) -> None:
    draw = random.Random(count)
    samples = [[draw.lognormvariate(0, 0.1) for _ in range(count)] for _ in range(2000)]
    inside = sum(low <= 1 <= high for low, high in map(interval, samples))
    assert 0.98 <= inside / len(samples) < 1


def test_the_interval_of_few_values_is_all_of_them() -> None:
    assert interval([3.0, 1.0, 2.0]) == (1.0, 3.0)

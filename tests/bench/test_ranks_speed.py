"""The arithmetic of ranks: properties that hold whatever the figures are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.simulation.ranks_speed import decode_seconds, tables
from bench.simulation.setup import Setup, links, setups


@pytest.mark.parametrize("setup", setups(), ids=lambda setup: setup.name)
def test_one_rank_costs_what_one_process_does(setup: Setup) -> None:
    for link in links():
        assert decode_seconds(setup, link, 1, "tensor", 4, 100) == setup.decode_seconds(4, 100)


@pytest.mark.parametrize("setup", setups(), ids=lambda setup: setup.name)
def test_a_pipeline_is_never_faster_and_waits_for_its_links(setup: Setup) -> None:
    for link in links():
        slow = replace(link, latency=10 * link.latency)
        two, four = (decode_seconds(setup, link, n, "pipeline", 1, 100) for n in (2, 4))
        assert setup.decode_seconds(1, 100) < two < four
        for way in ("tensor", "pipeline"):
            assert decode_seconds(setup, slow, 2, way, 1, 100) > decode_seconds(
                setup, link, 2, way, 1, 100
            )


def test_tensor_parallelism_gains_with_fast_links_and_many_weights() -> None:
    hybrid, nvlink = setups()[-1], links()[-1]
    free = replace(nvlink, latency=0.0, bandwidth=1e30)
    alone, launch = hybrid.decode_seconds(1, 100), hybrid.machine.launch
    divided = decode_seconds(hybrid, free, 4, "tensor", 1, 100)
    assert divided == pytest.approx((alone - launch) / 4 + launch)
    assert decode_seconds(hybrid, nvlink, 4, "tensor", 1, 100) < alone


def test_there_is_a_table_for_every_setup() -> None:
    assert [table.title.split(":")[0] for table in tables()] == [one.name for one in setups()]
    assert all(len(row) == len(table.header) for table in tables() for row in table.rows)

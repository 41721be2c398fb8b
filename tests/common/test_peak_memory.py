"""A child's peak memory does not include its parent's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np

from backend.engine.units import MIB
from common.peak_memory import peak_memory

ROOT = Path(__file__).parents[2]
CHILD = "from common.peak_memory import peak_memory; print(peak_memory())"


def test_a_child_does_not_count_its_parents_memory() -> None:
    before = peak_memory()
    ballast = np.ones(256 * MIB, np.uint8)
    assert peak_memory() >= 256 * MIB
    output = subprocess.check_output([sys.executable, "-c", CHILD], cwd=ROOT, text=True)
    assert int(output) < 128 * MIB
    del ballast
    assert peak_memory() >= before

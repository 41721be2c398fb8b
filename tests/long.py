"""Whether long tests run in full size: TEST_LONG=1, which `make test-long` sets.

`make test` runs a fixed sample of their cases, the same every time.
"""

from __future__ import annotations

import os

TEST_LONG = os.environ.get("TEST_LONG", "") not in ("", "0")


def examples(most: int) -> int:
    """The number of examples of a property: `most`, or a third of them without TEST_LONG."""
    return most if TEST_LONG else -(-most // 3)

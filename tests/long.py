"""Whether long proofs run in full size: TEST_LONG=1, which `make test-long` sets.

`make test` plays a fixed sample of them, the same at every run.
"""

from __future__ import annotations

import os

TEST_LONG = os.environ.get("TEST_LONG", "") not in ("", "0")

"""Whether long tests run in full size: TEST_LONG=1, which `make test-long` sets.

`make test` runs a fixed sample of their cases, the same every time.
"""

from __future__ import annotations

import os

TEST_LONG = os.environ.get("TEST_LONG", "") not in ("", "0")

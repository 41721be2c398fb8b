"""Hooks for schemathesis: of the cases that its coverage phase derives, every fourth is sent.

The phase replaces each field by several wrong and extreme values in turn, so a field keeps some.
"""

from itertools import count

import schemathesis

_STRIDE = 4
_places = count()


@schemathesis.hook
def filter_case(context, case):
    phase = case.meta.phase.name.value if case.meta else ""
    return phase != "coverage" or next(_places) % _STRIDE == 0

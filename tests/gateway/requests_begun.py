"""Requests without a gateway, for tests of what is recorded about them."""

from __future__ import annotations

from gateway import exchange
from gateway.exchange import Exchange


def begun(*, strict: bool = False) -> Exchange:
    """A new request, set as the current one."""
    running = Exchange("req_test", "POST", "/", strict=strict)
    exchange.begin(running)
    return running

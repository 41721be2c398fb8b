"""Requests outside a gateway, for tests of what is noted of them."""

from __future__ import annotations

from gateway import exchange
from gateway.exchange import Exchange


def begun(*, strict: bool = False) -> Exchange:
    """A fresh request, made the running one."""
    running = Exchange("req_test", "POST", "/", strict=strict)
    exchange.begin(running)
    return running

"""The gateway that the clients are pointed at."""

from tests.gateway.conftest import gateway

__all__ = ["gateway"]

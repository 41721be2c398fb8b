"""Limits the calls that a client begins without sending their request.

Each such call occupies some 20 KiB, and clients may have any number of connections.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Any

import grpc

from backend.engine.errors import InvalidRequest

MOST = 4096  # four times as many as LocalAI has calls
SECONDS = 600.0  # a large request may arrive over a slow network


class UnsentRequests:
    """Tracks the calls of a server whose request has not arrived yet, the oldest first."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[asyncio.Timeout, None] = OrderedDict()

    async def read(self, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        """Return a call's first message, or EOF. Raises InvalidRequest if neither arrives in time.

        The time is SECONDS, or less for the oldest of more than MOST.
        """
        limit = asyncio.timeout(SECONDS)
        try:
            async with limit:
                self._waiting[limit] = None
                if len(self._waiting) > MOST:
                    oldest, _ = self._waiting.popitem(last=False)
                    oldest.reschedule(0)
                return await context.read()
        except TimeoutError:
            raise InvalidRequest("the call's request did not arrive: send one message") from None
        finally:
            self._waiting.pop(limit, None)

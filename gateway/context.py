"""Provides what every route needs from the running gateway, as one FastAPI dependency."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request

from gateway.errors import ApiError
from gateway.exchange import Traffic
from gateway.metrics import Metrics
from gateway.settings import GatewaySettings
from gateway.supervisor.supervisor import Supervisor
from gateway.used_prompts import UsedPrompts


@dataclass(frozen=True, slots=True)
class Gateway:
    """The parts of the running gateway that routes use."""

    settings: GatewaySettings
    supervisor: Supervisor
    traffic: Traffic
    metrics: Metrics
    prompts: UsedPrompts = field(default_factory=lambda: UsedPrompts(None))
    started: int = field(default_factory=lambda: int(time.time()))  # seconds since the epoch

    def require_one_owner(self) -> None:
        """Raise ApiError if there are several API keys: none may change models that others use."""
        if len(self.settings.api_keys) > 1:
            message = "models cannot be changed here, because this gateway has several API keys"
            raise ApiError(403, message, code="several_keys")


async def _gateway(request: Request) -> Gateway:  # FastAPI would run a plain function on a thread
    found = request.app.state.gateway
    assert isinstance(found, Gateway)
    return found


GatewayDep = Annotated[Gateway, Depends(_gateway)]

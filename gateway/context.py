"""What every route needs: the settings and the supervisor, as one FastAPI dependency."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from gateway.settings import GatewaySettings
from gateway.supervisor.supervisor import Supervisor


@dataclass(frozen=True, slots=True)
class Gateway:
    """One running gateway."""

    settings: GatewaySettings
    supervisor: Supervisor


def _gateway(request: Request) -> Gateway:
    found = request.app.state.gateway
    assert isinstance(found, Gateway)
    return found


GatewayDep = Annotated[Gateway, Depends(_gateway)]

"""`/health` and `/ready`: is the process alive, and does it take requests?"""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter, Response
from pydantic import BaseModel

from gateway.context import GatewayDep

router = APIRouter(tags=["operations"])


class Health(BaseModel):
    status: Literal["ok"] = "ok"


class Ready(BaseModel):
    """Whether requests are taken now."""

    status: Literal["ready", "draining", "starting"]


@router.get("/health")
async def health() -> Health:
    """Always ok while the process lives: a load or a busy model does not make it unhealthy."""
    return Health()


@router.get("/ready", responses={503: {"model": Ready, "description": "Not now."}})
async def ready(gateway: GatewayDep, response: Response) -> Ready:
    """200 from the moment that what is to be preloaded is loaded (or was
    refused) until SIGTERM, else 503.
    """
    if gateway.traffic.draining:
        response.status_code = 503
        return Ready(status="draining")
    if gateway.supervisor.preloading:
        response.status_code = 503
        return Ready(status="starting")
    return Ready(status="ready")

"""The endpoints for operators: `/health`, `/ready` and `/metrics`."""

from __future__ import annotations

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse

from common.version import VERSION
from gateway import metrics
from gateway.context import GatewayDep

router = APIRouter(tags=["operations"])


@router.get("/ping", include_in_schema=False)
@router.get("/health")
async def health() -> dict[str, str]:
    """Return ok while the process runs: a load or a busy model does not make it unhealthy."""
    return {"status": "ok"}


@router.get("/version")
async def read_version() -> dict[str, str]:
    return {"version": VERSION}


@router.get("/ready", responses={503: {"description": "Not now."}})
async def ready(gateway: GatewayDep, response: Response) -> dict[str, str]:
    """Return 200 from when every model to preload is loaded or refused until SIGTERM, else 503."""
    if gateway.traffic.draining or gateway.supervisor.preloading:
        response.status_code = 503
        return {"status": "draining" if gateway.traffic.draining else "starting"}
    return {"status": "ready"}


@router.get("/metrics", response_class=PlainTextResponse)
async def read_metrics(gateway: GatewayDep) -> PlainTextResponse:
    """Return counters of the gateway and of every loaded model, in Prometheus' text format."""
    text = gateway.metrics.text(await metrics.collect(gateway.supervisor))
    return PlainTextResponse(text, media_type=metrics.CONTENT_TYPE)

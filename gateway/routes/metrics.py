"""`/metrics` for Prometheus."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse

from gateway import metrics, model_metrics
from gateway.context import GatewayDep

router = APIRouter(tags=["operations"])


@router.get("/metrics", response_class=PlainTextResponse)
async def read_metrics(gateway: GatewayDep) -> PlainTextResponse:
    """Counters of the gateway and of every loaded model, in Prometheus' text format."""
    models = model_metrics.text(await model_metrics.look(gateway.supervisor))
    return PlainTextResponse(gateway.metrics.text() + models, media_type=metrics.CONTENT_TYPE)

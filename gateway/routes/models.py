"""`/models`: what may be asked for."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from gateway.context import GatewayDep
from gateway.models.config import ModelConfig

router = APIRouter(tags=["models"])


@router.get("/models")
async def list_models(gateway: GatewayDep) -> dict[str, Any]:
    """Every model by name."""
    return {"object": "list", "data": [_card(model) for model in gateway.supervisor.models]}


def _card(model: ModelConfig) -> dict[str, Any]:
    return {"id": model.name, "object": "model", "created": 0, "owned_by": "local"}

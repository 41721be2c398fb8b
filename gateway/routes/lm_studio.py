"""LM Studio's list of models under `/api/v0`, from which editors learn what a model can do."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from gateway.context import Gateway, GatewayDep
from gateway.models.config import ModelConfig
from gateway.routes.models import load_state, states_of

router = APIRouter(prefix="/api/v0", tags=["models"])
Json = dict[str, Any]


@router.get("/models")
async def list_models(gateway: GatewayDep) -> Json:
    """Every model of the folder."""
    cards = [_card(gateway, model) for model in gateway.supervisor.models]
    return {"object": "list", "data": cards}


@router.get("/models/{model:path}")
async def read_model(gateway: GatewayDep, model: str) -> Json:
    return _card(gateway, gateway.supervisor.resolve(model))


def _card(gateway: Gateway, model: ModelConfig) -> Json:
    able = gateway.supervisor.checkpoints.abilities(model)
    context = gateway.supervisor.checkpoints.context_size(model)
    state = load_state(states_of(gateway), model).value
    kind = "vlm" if "vision" in able else "llm" if "completion" in able else "embeddings"
    return {
        "id": model.name,
        "object": "model",
        "type": kind,
        "publisher": "local",
        "arch": "mlx",
        "compatibility_type": "mlx",
        "state": "not-loaded" if state == "unloaded" else state,
        "max_context_length": context,
        **({"loaded_context_length": context} if state == "loaded" else {}),
        "capabilities": [
            word for word, need in (("tool_use", "tools"), ("vision", "vision")) if need in able
        ],
    }

"""LM Studio's lists of models under `/api/v0` and `/api/v1`, where editors look for them."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from gateway import exchange
from gateway.context import Gateway, GatewayDep
from gateway.json_route import JsonRoute
from gateway.models.config import ModelConfig
from gateway.routes.models import Named, load_state, states_of

router = APIRouter(prefix="/api", tags=["models"], route_class=JsonRoute)
Json = dict[str, Any]


@router.get("/v0/models")
async def list_models(gateway: GatewayDep) -> Json:
    """Return the models that complete or embed texts, which are the kinds of LM Studio."""
    cards = [_card(gateway, model) for model in _listed(gateway)]
    return {"object": "list", "data": cards}


@router.get("/v0/models/{model:path}")
async def read_model(gateway: GatewayDep, model: str) -> Json:
    return _card(gateway, gateway.supervisor.resolve(model))


@router.get("/v1/models")
async def list_instances(gateway: GatewayDep) -> Json:
    """Return every model in the newer form.

    `data` is OpenAI's list, which some programs look for here.
    """
    models = [_described(gateway, model) for model in _listed(gateway)]
    return {"models": models} | await list_models(gateway)


@router.post("/v1/models/load")
async def load_model(body: Named, gateway: GatewayDep) -> Json:
    """Load a model, and wait until it is loaded."""
    await gateway.supervisor.load(body.model)
    seconds = exchange.current().seconds
    return {"instance_id": body.model, "status": "loaded", "load_time_seconds": seconds}


@router.post("/v1/models/unload")
async def unload_model(body: Named, gateway: GatewayDep) -> Json:
    """Unload an idle model, and wait until it is unloaded."""
    await gateway.supervisor.unload(body.model)
    return {"instance_id": body.model}


def _listed(gateway: Gateway) -> list[ModelConfig]:
    abilities = gateway.supervisor.checkpoints.abilities
    kinds = {"completion", "embedding"}
    return [model for model in gateway.supervisor.models if kinds.intersection(abilities(model))]


def _described(gateway: Gateway, model: ModelConfig) -> Json:
    """Return a model in the form of `/api/v1`.

    It has one instance, of the same name, if it is loaded.
    """
    card = _card(gateway, model)
    context = card.get("loaded_context_length")
    loaded = [{"id": model.name, "config": {"context_length": context}}]
    abilities = {"vision": "vision", "trained_for_tool_use": "tool_use"}
    return card | {
        "type": "embedding" if card["type"] == "embeddings" else "llm",
        "loaded_instances": loaded if card["state"] == "loaded" else [],
        "capabilities": {name: word in card["capabilities"] for name, word in abilities.items()},
    }


def _card(gateway: Gateway, model: ModelConfig) -> Json:
    abilities = gateway.supervisor.checkpoints.abilities(model)
    context = gateway.supervisor.context_size(model)
    state = load_state(states_of(gateway), model)["value"]
    kind = "vlm" if "vision" in abilities else "llm" if "completion" in abilities else "embeddings"
    return {
        **dict.fromkeys(("id", "key", "display_name"), model.name),
        **dict.fromkeys(("arch", "architecture", "compatibility_type", "format"), "mlx"),
        **dict.fromkeys(("quantization", "params_string")),
        "size_bytes": gateway.supervisor.checkpoints.weight_bytes(model),
        "object": "model",
        "type": kind,
        "publisher": "local",
        "state": "not-loaded" if state == "unloaded" else state,
        "max_context_length": context,
        **({"loaded_context_length": context} if state == "loaded" else {}),
        "capabilities": [
            word
            for word, need in (("tool_use", "tools"), ("vision", "vision"))
            if need in abilities
        ],
    }

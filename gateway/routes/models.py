"""The models, for clients (`/models`, with their aliases) and for the page (`/api/status`).

Requesting the status loads no model and keeps none loaded. A backend's own messages stay in the
log, because they may contain paths.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import AliasChoices, Field

from common.abilities import for_anthropic
from common.field_names import named
from common.wording import shown
from gateway import metrics
from gateway.context import Gateway, GatewayDep
from gateway.errors import bad_field, without_folders
from gateway.fields import Request
from gateway.json_route import JsonRoute
from gateway.models.config import DEFAULTS, OWN_BACKENDS, ModelConfig
from gateway.responses import codex_models
from gateway.supervisor.instance import ModelStatus, State

DEFAULT_SLOTS = 32  # the default of our own backend's option `parallel`

page_router = APIRouter(tags=["page"])
router = APIRouter(tags=["models"], route_class=JsonRoute)
_VALUES = {State.STARTING: "loading", State.LOADING: "loading", State.READY: "loaded"}
Json = dict[str, Any]


@page_router.get("/api/status")
async def read_status(gateway: GatewayDep) -> dict[str, Any]:
    """Return the current state of all models of the folder, and of all other loaded ones.

    `running`: requests that use the model, or wait for it. `slots` and `context_size`: null if they
    are unknown. `download_mib`: of `download_of_mib`, during a download. `error`: why the last load
    or run ended.
    """
    supervisor = gateway.supervisor
    configs = {config.name: config for config in supervisor.models}
    models = []
    for status, counts in await metrics.collect(supervisor):
        config = configs.get(status.name)
        downloaded, of = status.download or (None, None)
        models.append(
            {
                "name": status.name,
                "state": str(status.state),
                "running": status.leases,
                "slots": slots(config) if config else None,
                "tokens_per_second": counts.get("tokens_per_second", 0.0),
                "memory_bytes": status.memory_bytes,
                "context_size": supervisor.context_size(config) if config else None,
                "download_mib": downloaded,
                "download_of_mib": of,
                "error": without_folders(status.error),
            }
        )
    return {"models": models}


def slots(config: ModelConfig) -> int | None:
    """Return how many answers a model's backend generates at a time, if its file says so."""
    if config.address or config.backend not in OWN_BACKENDS:
        return None
    try:
        return int(config.option("parallel") or DEFAULT_SLOTS)
    except ValueError:
        return None  # the backend refuses to load with it, and says why


@router.get("/models")
async def list_models(
    gateway: GatewayDep,
    limit: Annotated[int | None, Query(ge=1, le=1000)] = None,
    after_id: Annotated[str | None, Query(description="The page begins after this model.")] = None,
    before_id: Annotated[str | None, Query(description="The page ends before this model.")] = None,
) -> Json:
    """Return every model by its own name, its aliases and its adapters.

    The list has pages like Anthropic's. `models` has the models that chat, in the form of Codex.
    """
    states = states_of(gateway)
    models = gateway.supervisor.models
    adapters = with_adapters(models)
    cards = [
        _card(gateway, model, name, states)
        for model in models
        for name in (model.name, *model.aliases, *adapters[model.name])
    ]
    if after_id is not None and before_id is not None:
        raise bad_field(f"after_id and {named('before_id')} are both given: send one")
    if after_id is not None:
        cards = cards[_place(cards, after_id, "after_id") + 1 :]
    if before_id is not None:
        cards = cards[: _place(cards, before_id, "before_id")]
    page = cards
    if limit is not None:
        page = cards[:limit] if before_id is None else cards[-limit:]
    abilities = {card["id"]: card["meta"]["abilities"] for card in page}
    return {
        "object": "list",
        "data": page,
        "models": [
            codex_models.entry(card["id"], card["context_length"], abilities[card["id"]])
            for card in page
            if "completion" in abilities[card["id"]]
        ],
        "has_more": len(page) < len(cards),
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
    }


def with_adapters(models: Sequence[ModelConfig]) -> dict[str, list[str]]:
    """Return by model the adapters that a request may name as `model`: those with a unique name."""
    counts = Counter(
        name for model in models for name in (model.name, *model.aliases, *model.adapters)
    )
    return {model.name: [name for name in model.adapters if counts[name] == 1] for model in models}


def _place(cards: list[Json], name: str, param: str) -> int:
    places = [at for at, card in enumerate(cards) if card["id"] == name]
    if not places:
        raise bad_field(f"{named(param)} is {shown(name)}, which is not the name of a model")
    return places[0]


@router.get("/models/{model:path}")
async def read_model(gateway: GatewayDep, model: str) -> Json:
    """Return one model by name or alias, which may contain slashes.

    `status` reports whether it is loaded, and why its last load, or its backend, failed. `created`
    is when the gateway began to serve it.
    """
    return _card(gateway, gateway.supervisor.resolve(model), model, states_of(gateway))


@router.get("/props")
async def read_props(gateway: GatewayDep, model: str | None = None) -> Json:
    """Return llama.cpp's description of its model, in which programs look for the context size."""
    config = gateway.supervisor.resolve(model)
    abilities = gateway.supervisor.checkpoints.abilities(config)
    context = gateway.supervisor.context_size(config)
    return {
        "default_generation_settings": {"n_ctx": context or 0},
        **dict.fromkeys(("model_alias", "model_path"), config.name),
        "chat_template": "",  # SillyTavern reads it as a text
        "modalities": {sense: sense in abilities for sense in ("vision", "audio")},
        "is_sleeping": load_state(states_of(gateway), config)["value"] != "loaded",
    }


@router.get("/slots")
async def read_slots(gateway: GatewayDep, model: str | None = None) -> list[Json]:
    """Return llama.cpp's list of the answers that a model can generate at a time."""
    config = gateway.supervisor.resolve(model)
    now = next(each for each in gateway.supervisor.status() if each.name == config.name)
    context = gateway.supervisor.context_size(config)
    return [
        {"id": at, "n_ctx": context or 0, "is_processing": at < now.leases}
        for at in range(slots(config) or now.leases)
    ]


class Named(Request):
    """A model to load or unload."""

    model: str = Field(validation_alias=AliasChoices("model", "instance_id"))  # LM Studio's


@router.post("/models/load")
async def load_model(body: Named, gateway: GatewayDep) -> dict[str, bool]:
    """Start loading a model. `/models` and `/api/status` report the progress."""
    gateway.supervisor.begin_load(body.model)
    return {"success": True}


@router.post("/models/unload")
async def unload_model(body: Named, gateway: GatewayDep) -> dict[str, bool]:
    """Unload an idle model, and wait for that to finish."""
    await gateway.supervisor.unload(body.model)
    return {"success": True}


def states_of(gateway: Gateway) -> dict[str, ModelStatus]:
    return {status.name: status for status in gateway.supervisor.status()}


def load_state(states: Mapping[str, ModelStatus], model: ModelConfig) -> Json:
    """Return whether a model is in memory, as llama.cpp's router reports it."""
    now = states.get(model.name, ModelStatus(model.name, State.STOPPED))
    failed = now.state in (State.FAILED, State.BACKING_OFF)
    error = without_folders(now.error) if failed else ""
    return {"value": _VALUES.get(now.state, "unloaded"), "failed": failed, "error": error}


def _card(
    gateway: Gateway, model: ModelConfig, name: str, states: Mapping[str, ModelStatus]
) -> Json:
    """Return a model in OpenAI's form, with fields of Anthropic, OpenRouter and llama.cpp."""
    known = gateway.supervisor.checkpoints
    abilities = known.abilities(model)
    senses = {"image": "vision", "video": "vision", "audio": "audio"}
    context = gateway.supervisor.context_size(model)
    inputs = ["text", *(kind for kind, sense in senses.items() if sense in abilities)]
    return {
        "id": name,
        "object": "model",
        "created": gateway.started,
        "owned_by": "local",
        "parent": model.name if name in model.adapters else None,
        "type": "model",
        "display_name": name,
        "created_at": f"{datetime.fromtimestamp(gateway.started, UTC):%Y-%m-%dT%H:%M:%SZ}",
        "lifecycle": "active",
        **dict.fromkeys(("context_length", "max_model_len"), context),
        "capabilities": for_anthropic(abilities),
        "architecture": {
            "input_modalities": inputs,
            "output_modalities": ["text"] * ("completion" in abilities),
        },
        "status": load_state(states, model),
        "meta": {
            "description": model.description,
            "context_size": context,
            "context_reason": gateway.supervisor.context_reason(model),
            "size_bytes": known.weight_bytes(model),  # approximate; 0: unknown
            "text_only": known.is_text_only(model),
            "defaults": {name: model.parameters.chosen(name) for name in DEFAULTS},
            "abilities": abilities,
            # An adapter answers differently from its model, so programs offer both.
            "alias_of": model.name if name in model.aliases else None,
            "aliases": [] if name in model.adapters else model.aliases,
        },
    }

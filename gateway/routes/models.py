"""`/models`: the models that requests may name, with their aliases."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import AliasChoices, BaseModel, Field

from common.abilities import for_anthropic
from common.field_names import named
from common.wording import shown
from gateway.context import Gateway, GatewayDep
from gateway.described import about
from gateway.errors import bad_field, without_folders
from gateway.limits import JsonRoute
from gateway.models.config import DEFAULTS, ModelConfig
from gateway.openai.base import Request
from gateway.responses import codex_models
from gateway.routes.status import slots
from gateway.supervisor.status import ModelStatus, State

router = APIRouter(tags=["models"], route_class=JsonRoute)
_VALUES: Mapping[State, Literal["loaded", "loading"]] = {
    State.STARTING: "loading",
    State.LOADING: "loading",
    State.READY: "loaded",
}


class Meta(BaseModel):
    """Fields that OpenAI's card does not have."""

    description: str
    context_size: int | None  # tokens of prompt and answer; None: unknown
    size_bytes: int  # approximate bytes of the weights; 0: unknown
    text_only: bool  # certainly accepts no images, videos or audio
    defaults: dict[str, float]  # the values for a request that sets none
    abilities: tuple[str, ...]  # in Ollama's words
    alias_of: str | None
    aliases: list[str]


class LoadState(BaseModel):
    """Whether a model is in memory, as llama.cpp's router reports it."""

    value: Literal["loaded", "loading", "unloaded"]
    failed: bool = Field(description="The last load, or the backend, failed.")
    error: str = Field(description="Why it failed; empty if it did not.")


class ModelCard(BaseModel):
    """OpenAI's description of a model, with the fields of Anthropic and llama.cpp.

    `created` and `created_at` are when the gateway began to serve it.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "local"
    type: Literal["model"] = "model"
    display_name: str
    created_at: datetime
    lifecycle: Literal["active"] = "active"
    context_length: int | None = about("Most tokens of prompt and answer; OpenRouter's name.")
    max_model_len: int | None = about("vLLM's name of context_length.")
    capabilities: dict[str, dict[str, Any]]  # as Anthropic lists them
    architecture: dict[str, list[str]]  # as OpenRouter does
    status: LoadState
    meta: Meta


class ModelList(BaseModel):
    """A page of cards; all of them if no limit was sent."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
    models: list[dict[str, Any]] = Field(description="Those that chat, in the form of Codex.")
    has_more: bool
    first_id: str | None
    last_id: str | None


@router.get("/models")
async def list_models(
    gateway: GatewayDep,
    limit: Annotated[int | None, Query(ge=1, le=1000)] = None,
    after_id: Annotated[str | None, Query(description="The page begins after this model.")] = None,
    before_id: Annotated[str | None, Query(description="The page ends before this model.")] = None,
) -> ModelList:
    """Every model by its own name, its aliases and its adapters; in pages as Anthropic's are."""
    states = states_of(gateway)
    cards = [
        _card(gateway, model, name, states)
        for model in gateway.supervisor.models
        for name in (model.name, *model.aliases, *model.adapters)
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
    first, last = (page[0].id, page[-1].id) if page else (None, None)
    models = [
        codex_models.entry(card.id, card.context_length, card.meta.abilities)
        for card in page
        if "completion" in card.meta.abilities
    ]
    more = len(page) < len(cards)
    return ModelList(data=page, models=models, has_more=more, first_id=first, last_id=last)


def _place(cards: list[ModelCard], name: str, param: str) -> int:
    places = [at for at, card in enumerate(cards) if card.id == name]
    if not places:
        raise bad_field(f"{named(param)} is {shown(name)}, which is not the name of a model")
    return places[0]


@router.get("/models/{model:path}")
async def read_model(gateway: GatewayDep, model: str) -> ModelCard:
    """One model by name or alias, which may contain slashes."""
    return _card(gateway, gateway.supervisor.resolve(model), model, states_of(gateway))


@router.get("/props")
async def read_props(gateway: GatewayDep, model: str | None = None) -> dict[str, Any]:
    """llama.cpp's description of its model, in which programs look for the context size."""
    config = gateway.supervisor.resolve(model)
    able = gateway.supervisor.checkpoints.abilities(config)
    context = gateway.supervisor.context_size(config)
    return {
        "default_generation_settings": {"n_ctx": context or 0},
        **dict.fromkeys(("model_alias", "model_path"), config.name),
        "chat_template": "",  # SillyTavern reads it as a text
        "modalities": {sense: sense in able for sense in ("vision", "audio")},
        "is_sleeping": load_state(states_of(gateway), config).value != "loaded",
    }


@router.get("/slots")
async def read_slots(gateway: GatewayDep, model: str | None = None) -> list[dict[str, Any]]:
    """llama.cpp's list of the answers that a model can generate at a time."""
    config = gateway.supervisor.resolve(model)
    now = next(each for each in gateway.supervisor.status() if each.name == config.name)
    context = gateway.supervisor.context_size(config)
    return [
        {"id": at, "n_ctx": context or 0, "is_processing": at < now.leases}
        for at in range(slots(config) or now.leases)
    ]


@router.get("/lora-adapters")
async def list_adapters(gateway: GatewayDep, model: str | None = None) -> list[dict[str, Any]]:
    """llama.cpp's list: the model's adapters, each used only by requests that name it."""
    names = gateway.supervisor.resolve(model).adapters
    return [{"id": at, "path": name, "scale": 0.0} for at, name in enumerate(names)]


class Named(Request):
    model: str = Field(validation_alias=AliasChoices("model", "instance_id"))  # LM Studio's


@router.post("/models/load")
async def load_model(body: Named, gateway: GatewayDep) -> dict[str, bool]:
    """Start loading a model. `/models` and `/api/status` report the progress."""
    gateway.supervisor.begin_load(body.model)
    return {"success": True}


@router.post("/models/unload")
async def unload_model(body: Named, gateway: GatewayDep) -> dict[str, bool]:
    """Unload an idle model, and wait until it is done."""
    await gateway.supervisor.unload(body.model)
    return {"success": True}


def states_of(gateway: Gateway) -> dict[str, ModelStatus]:
    return {status.name: status for status in gateway.supervisor.status()}


def load_state(states: Mapping[str, ModelStatus], model: ModelConfig) -> LoadState:
    now = states.get(model.name, ModelStatus(model.name, State.STOPPED))
    failed = now.state in (State.FAILED, State.BACKING_OFF)
    error = without_folders(now.error) if failed else ""
    return LoadState(value=_VALUES.get(now.state, "unloaded"), failed=failed, error=error)


def _card(
    gateway: Gateway, model: ModelConfig, name: str, states: Mapping[str, ModelStatus]
) -> ModelCard:
    able = gateway.supervisor.checkpoints.abilities(model)
    senses = {"image": "vision", "video": "vision", "audio": "audio"}
    given = ["text"] * ("completion" in able)
    context = gateway.supervisor.context_size(model)
    taken = ["text", *(kind for kind, sense in senses.items() if sense in able)]
    return ModelCard(
        capabilities=for_anthropic(able),
        architecture={"input_modalities": taken, "output_modalities": given},
        status=load_state(states, model),
        id=name,
        created=gateway.started,
        display_name=name,
        context_length=context,
        max_model_len=context,
        created_at=datetime.fromtimestamp(gateway.started, UTC),
        meta=Meta(
            description=model.description,
            context_size=context,
            size_bytes=gateway.supervisor.checkpoints.weight_bytes(model),
            text_only=gateway.supervisor.checkpoints.is_text_only(model),
            defaults={name: model.parameters.chosen(name) for name in DEFAULTS},
            abilities=able,
            alias_of=None if name == model.name else model.name,
            aliases=model.aliases,
        ),
    )

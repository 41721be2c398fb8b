"""`/models`: what may be asked for, under its own name and under its aliases."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal

from fastapi import APIRouter
from pydantic import BaseModel

from gateway.context import Gateway, GatewayDep
from gateway.models.config import ModelConfig

router = APIRouter(tags=["models"])


class Meta(BaseModel):
    """What OpenAI's card has no field for."""

    description: str
    context_size: int | None  # tokens of prompt and answer; None: the model's own maximum
    alias_of: str | None
    aliases: list[str]


class ModelCard(BaseModel):
    """OpenAI's description of a model, and Anthropic's beside it.

    `created` and `created_at` are when the gateway began to serve it.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "local"
    type: Literal["model"] = "model"
    display_name: str
    created_at: datetime
    meta: Meta


class ModelList(BaseModel):
    """All cards, on one page."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
    has_more: Literal[False] = False
    first_id: str | None
    last_id: str | None


@router.get("/models")
async def list_models(gateway: GatewayDep) -> ModelList:
    """Every model, by its own name first, then by its aliases."""
    cards = [
        _card(gateway, model, name)
        for model in gateway.supervisor.models
        for name in (model.name, *model.aliases)
    ]
    first, last = (cards[0].id, cards[-1].id) if cards else (None, None)
    return ModelList(data=cards, first_id=first, last_id=last)


@router.get("/models/{model:path}")
async def read_model(gateway: GatewayDep, model: str) -> ModelCard:
    """One model by name or alias, which may hold slashes."""
    return _card(gateway, gateway.supervisor.resolve(model), model)


def _card(gateway: Gateway, model: ModelConfig, name: str) -> ModelCard:
    return ModelCard(
        id=name,
        created=gateway.started,
        display_name=name,
        created_at=datetime.fromtimestamp(gateway.started, UTC),
        meta=Meta(
            description=model.description,
            context_size=context_size(model),
            alias_of=None if name == model.name else model.name,
            aliases=model.aliases,
        ),
    )


def context_size(model: ModelConfig) -> int | None:
    """The smaller of the two bounds that the file sets; None where it sets none."""
    return min((size for size in (model.context_size, model.max_model_len) if size), default=None)

"""`/api/status`: the state of the models, for the page, which polls it.

Requesting it loads no model and keeps none loaded. A backend's own messages stay in the log,
because they may contain paths.
"""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import BaseModel, Field

from gateway import model_metrics
from gateway.context import GatewayDep
from gateway.errors import without_folders
from gateway.models.config import OWN_BACKENDS, ModelConfig

DEFAULT_SLOTS = 16  # the default of our own backend's option `parallel`

router = APIRouter(tags=["page"])


class ModelNow(BaseModel):
    """The current state of one model."""

    name: str
    state: str
    running: int = Field(description="Requests that use the model, or wait for it.")
    slots: int | None = Field(description="Answers that run at a time; null: unknown.")
    tokens_per_second: float = Field(description="Recent speed of all answers together.")
    memory_bytes: int
    context_size: int | None = Field(description="Tokens of prompt and answer; null: unknown.")
    download_mib: int | None = Field(description="MiB downloaded so far, during a download.")
    download_of_mib: int | None = Field(description="MiB of the whole download.")
    error: str = Field(description="Why the last load or run ended; empty if there was no error.")


class Status(BaseModel):
    """All models of the folder, and all other loaded ones."""

    models: list[ModelNow]


@router.get("/api/status")
async def read_status(gateway: GatewayDep) -> Status:
    """The current state of all models."""
    supervisor = gateway.supervisor
    configs = {config.name: config for config in supervisor.models}
    models = []
    for status, counts in await model_metrics.collect(supervisor):
        config = configs.get(status.name)
        models.append(
            ModelNow(
                name=status.name,
                state=str(status.state),
                running=status.leases,
                slots=slots(config) if config else None,
                tokens_per_second=counts.get("tokens_per_second", 0.0),
                memory_bytes=status.memory_bytes,
                context_size=supervisor.context_size(config) if config else None,
                download_mib=status.download[0] if status.download else None,
                download_of_mib=status.download[1] if status.download else None,
                error=without_folders(status.error),
            )
        )
    return Status(models=models)


def slots(config: ModelConfig) -> int | None:
    """How many answers a model's backend generates at a time, if its file says so."""
    if config.address or config.backend not in OWN_BACKENDS:
        return None
    try:
        return int(config.option("parallel") or DEFAULT_SLOTS)
    except ValueError:
        return None  # the backend refuses to load with it, and says why

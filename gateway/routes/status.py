"""`/api/status`: the state of the models, for the page, which polls it.

Requesting it loads no model and keeps none loaded. A backend's own messages stay in the log,
because they may contain paths.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from gateway import model_metrics
from gateway.context import GatewayDep
from gateway.errors import without_folders
from gateway.models.config import OWN_BACKENDS, ModelConfig

DEFAULT_SLOTS = 16  # the default of our own backend's option `parallel`

router = APIRouter(tags=["page"])


@router.get("/api/status")
async def read_status(gateway: GatewayDep) -> dict[str, Any]:
    """Return the current state of all models of the folder, and of all other loaded ones.

    `running`: requests that use the model, or wait for it. `slots` and `context_size`: null if they
    are unknown. `download_mib`: of `download_of_mib`, during a download. `error`: why the last load
    or run ended.
    """
    supervisor = gateway.supervisor
    configs = {config.name: config for config in supervisor.models}
    models = []
    for status, counts in await model_metrics.collect(supervisor):
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

"""LoRA adapters of a model: llama.cpp's list and scales; vLLM's requests to load and unload one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse
from pydantic import Field

from common.field_names import named
from common.wording import shown
from gateway.context import Gateway, GatewayDep
from gateway.described import about
from gateway.errors import ApiError, bad_field
from gateway.fields import Request
from gateway.json_route import JsonRoute, ListRoute
from gateway.openai.answering import chosen_by
from gateway.openai.sampling import Lora
from gateway.supervisor import failures

router = APIRouter(tags=["models"], route_class=JsonRoute)
lists = APIRouter(tags=["models"], route_class=ListRoute)


class LoadAdapter(Request):
    """An adapter to add to a model that is loaded."""

    lora_name: str = about("The name by which requests choose the adapter.", ...)
    lora_path: str = about("Its folder inside the models folder.", ...)
    load_inplace: bool | None = about("Must be false: unload an adapter before it is replaced.")


class UnloadAdapter(Request):
    """An adapter to remove from a model."""

    lora_name: str = about("The adapter's name.", ...)


class Scales(Request):
    """The adapter of requests that name none."""

    adapters: list[Lora] = Field(description="Each adapter's scale: 1 for at most one, else 0.")


@router.get("/lora-adapters")
async def list_adapters(gateway: GatewayDep, model: str | None = None) -> list[dict[str, Any]]:
    """Return the model's adapters as llama.cpp does; one with scale 1 is used by default."""
    config = gateway.supervisor.resolve(model)
    default = gateway.supervisor.default_adapter(config)
    return [
        {"id": at, "path": name, "scale": float(name == default)}
        for at, name in enumerate(config.adapters)
    ]


@lists.post("/lora-adapters")
async def scale_adapters(
    body: Scales, gateway: GatewayDep, model: str | None = None
) -> dict[str, bool]:
    """Choose the adapter of requests that name none, as llama.cpp does by scales."""
    gateway.require_one_owner()
    config = gateway.supervisor.resolve(model)
    chosen = chosen_by("adapters", body.adapters, [*config.adapters])
    gateway.supervisor.set_default_adapter(config, chosen)
    return {"success": True}


@router.post("/load_lora_adapter", response_class=PlainTextResponse)
async def load_adapter(body: LoadAdapter, gateway: GatewayDep) -> str:
    """Add an adapter of the models folder to a model, until the gateway ends."""
    gateway.require_one_owner()
    name = body.lora_name
    if body.load_inplace:
        raise bad_field(f"{named('load_inplace')} is true: unload the adapter, then load it again")
    model = gateway.supervisor.catalogue.model_named(body.model).name
    folder = _inside(gateway.settings.models_dir, body.lora_path)

    def added(adapters: dict[str, str]) -> dict[str, str]:
        if name in adapters:
            raise bad_field(f"{named('lora_name')} is {shown(name)}, which is already loaded")
        return {**adapters, name: str(folder)}

    await gateway.supervisor.change_adapters(model, added)
    return f"Success: LoRA adapter '{name}' added successfully."


@router.post("/unload_lora_adapter", response_class=PlainTextResponse)
async def unload_adapter(body: UnloadAdapter, gateway: GatewayDep) -> str:
    """Remove an adapter from its model. Requests that already use it end with it."""
    gateway.require_one_owner()
    name = body.lora_name

    def rest(adapters: dict[str, str]) -> dict[str, str]:
        if name not in adapters:
            raise _unknown(f"{named('lora_name')} is {shown(name)}, which is not loaded")
        return {other: path for other, path in adapters.items() if other != name}

    await gateway.supervisor.change_adapters(_owner(gateway, body), rest)
    return f"Success: LoRA adapter '{name}' removed successfully."


def _owner(gateway: Gateway, body: UnloadAdapter) -> str:
    """Return the model that the request names, or else the only one with the adapter."""
    if body.model is not None:
        return gateway.supervisor.catalogue.model_named(body.model).name
    models = [each.name for each in gateway.supervisor.models if body.lora_name in each.adapters]
    if not models:
        raise _unknown(f"{named('lora_name')} is {shown(body.lora_name)}, which is not loaded")
    if len(models) > 1:
        raise failures.of_several(body.lora_name, models)
    return models[0]


def _inside(models_dir: Path | None, path: str) -> Path:
    """Return an adapter's folder. Raises ApiError if it is not inside the models folder."""
    field = named("lora_path")
    if models_dir is None:
        raise bad_field(f"{field} is given, but this gateway has no --models-dir to look in")
    try:
        root = models_dir.resolve()
        folder = (root / path).resolve()
        if folder == root or not folder.is_relative_to(root):
            raise bad_field(f"{field} is {shown(path)}: name a folder inside the models folder")
        if folder.is_dir():
            return folder
    except (OSError, ValueError):  # too long, a zero byte, or a circle of links
        pass
    raise _unknown(f"{field} is {shown(path)}, and there is no such adapter in the models folder")


def _unknown(message: str) -> ApiError:
    return ApiError(404, message, code="adapter_not_found")

"""Builds the errors about models and their backends."""

from __future__ import annotations

from collections.abc import Iterable

from common.field_names import named, unmarked
from common.wording import did_you_mean, shown
from gateway.errors import SERVER, ApiError, bad_field, without_folders

BUSY_RETRY = 2  # seconds
LOAD_FAILED = "model_load_failed"


class LoadFailed(Exception):
    """A backend could not be started, or refused the model; `str()` says why.

    busy: whether the backend has no memory while its requests run.
    """

    def __init__(self, message: str, *, busy: bool = False) -> None:
        super().__init__(message)
        self.busy = busy


def _for_clients(message: str) -> str:
    """Return a message of a backend, or about a file, in a form that clients may see."""
    return unmarked(without_folders(message))


def load_failed(name: str, sentence: str) -> ApiError:
    message = f"the model {shown(name)} could not be loaded: {_for_clients(sentence)}"
    return ApiError(500, message, SERVER, LOAD_FAILED)


def adapters_refused(problem: LoadFailed) -> ApiError:
    message = f"the adapters stay as they are: {_for_clients(str(problem))}"
    if problem.busy:
        return ApiError(503, message, SERVER, "no_room", retry_after=BUSY_RETRY)
    return ApiError(400, message, code="adapter_load_failed")


def backing_off(name: str, sentence: str, seconds: int) -> ApiError:
    message = (
        f"the model {shown(name)} has failed several times and is tried again in {seconds} s:"
        f" {_for_clients(sentence)}"
    )
    return ApiError(503, message, SERVER, "model_backing_off", retry_after=seconds)


def no_room(name: str) -> ApiError:
    message = f"there is no memory to load {shown(name)}: the loaded models are in use; try again"
    return ApiError(503, message, SERVER, "no_room", retry_after=BUSY_RETRY)


def too_large(name: str, needed: int, limit: int) -> ApiError:
    """Return the refusal of a model that would not fit even alone; sizes are in bytes."""
    message = (
        f"the model {shown(name)} needs about {needed >> 20} MiB, and this gateway may use"
        f" {limit >> 20} MiB for models: choose a smaller one, or start it with a larger"
        " --max-memory-bytes"
    )
    return ApiError(500, message, SERVER, "no_room")


def stopping() -> ApiError:
    message = "the gateway is stopping: send the request again"
    return ApiError(503, message, SERVER, "stopping", retry_after=BUSY_RETRY)


def not_found(name: str, known: Iterable[str]) -> ApiError:
    message = f"the model {shown(name)} does not exist: GET /v1/models lists those that do"
    message += did_you_mean(name, known)
    return ApiError(404, message, code="model_not_found", param="model")


def an_adapter(name: str, model: str) -> ApiError:
    return bad_field(
        f"{named('model')} is {shown(name)}, an adapter of the model {shown(model)}, but adapters"
        " only change answers: name the model itself"
    )


def of_several(name: str, models: list[str]) -> ApiError:
    return bad_field(
        f"{named('model')} is {shown(name)}, an adapter of {' and of '.join(map(shown, models))}:"
        " name one of these models, and the adapter in adapters"
    )


def not_named(count: int) -> ApiError:
    message = f"there are {count} models, so a request must name one: GET /v1/models lists them"
    return bad_field(message, "missing_required_parameter", param="model")


def not_listed(param: str, value: str, allowed: list[str]) -> ApiError:
    """Return the refusal of an adapter or a draft model that the model's file does not list."""
    offered = ", ".join(repr(name) for name in allowed) or "none"
    return bad_field(
        f"{named(param)} is {shown(value)}: this model's configuration offers {offered}"
    )


def broken_file(sentence: str) -> ApiError:
    message = f"the configuration of this model cannot be used: {_for_clients(sentence)}"
    return ApiError(500, message, SERVER, "model_misconfigured", "model")


def in_use(name: str) -> ApiError:
    return ApiError(
        409, f"the model {shown(name)} is in use: unload it when it is idle", code="in_use"
    )


def not_in_folder(name: str) -> ApiError:
    return bad_field(f"the {named('model')} {shown(name)} has no file or folder in a models folder")

"""Refusals as HTTP responses, in the form that the clients of each endpoint read.

For a union pydantic reports what is wrong with every alternative, and writes the alternative's name
into the path. A client does not know these names: it gets the error of the alternative that matched
furthest, with a path that exists in its own body.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match, Mount
from starlette.types import Scope

from common.field_names import named, unmarked
from gateway.errors import ApiError, bad_field

_LONGEST_STEP = 80  # characters; the keys of an object may be any text
_NO_PLACE = ("body", "query", "path", "header", "cookie")
TEXT, _TEXT_OR_NULL = {"type": "string"}, {"type": ["string", "null"]}
FORMS: dict[str, ErrorForm] = {}  # by the beginning of paths below /v1 or /; other APIs add theirs
Model = TypeVar("Model", bound=BaseModel)
Problem = Mapping[str, Any]
Place = tuple[str | int, ...]
# How pydantic names alternatives of a union: types, classes, validators and dictionary keys.
_ALTERNATIVE = re.compile(
    r"(str|int|float|bool|none|constrained-\w+|\[key\]|[A-Z]\w*|(list|dict|literal|nullable"
    r"|function-\w+|tagged-union|json-or-python|model|lax-or-strict|definition-ref)\[.*)",
    re.DOTALL,
)
_EXPECTED = "Input should be "
_WORDS = {
    **dict.fromkeys(
        ("model_type", "model_attributes_type", "dict_type"), "Input should be an object"
    ),
    "list_type": "Input should be a list",
    "string_type": "Input should be a string",
    "int_type": "Input should be an integer",
    **dict.fromkeys(("float_type", "float_parsing"), "Input should be a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "Input should be true or false"),
    "too_short": "Input should have at least one entry",
    "too_long": "Input should have at most {max_length} entries",
    "string_pattern_mismatch": "Input should be a token id",  # of `logit_bias`, the only pattern
    "string_too_short": "Input should not be empty",
}


@dataclass(frozen=True, slots=True)
class ErrorForm:
    """The form of an API's errors: name and schema in OpenAPI, and `body`, which builds one."""

    name: str
    schema: Mapping[str, Any]
    body: Callable[[ApiError], dict[str, Any]]


def schema_of(**properties: object) -> dict[str, Any]:
    """Return the JSON schema of an object with these properties, all of them required."""
    names = [*properties]
    closed = {"required": names, "additionalProperties": False}
    return {"type": "object", "properties": properties, **closed}


_ERROR = schema_of(message=TEXT, type=TEXT, param=_TEXT_OR_NULL, code=_TEXT_OR_NULL)
OPENAI = ErrorForm("Error", schema_of(error=_ERROR), ApiError.body)


def form_of(path: str, headers: Iterable[tuple[bytes, bytes]] = ()) -> ErrorForm:
    """Return the form of a path's errors; Anthropic's for every request of its clients."""
    of_anthropic = any(name == b"anthropic-version" for name, _ in headers)
    root = re.sub("^(/api)?/v[0-2]", "", path).lstrip("/").partition("/")[0]
    return FORMS.get("messages" if of_anthropic else root, OPENAI)


def response_of(error: ApiError, scope: Scope) -> JSONResponse:
    form = form_of(scope["path"], scope["headers"])
    return JSONResponse(form.body(error), error.status, error.headers())


def install(app: FastAPI) -> None:
    """Turn every exception that a route may raise into a response."""

    async def refused(request: Request, error: Exception) -> JSONResponse:
        return response_of(_refusal(request, error), request.scope)

    for kind in (ApiError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, refused)


def _refusal(request: Request, error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestValidationError):
        return invalid(error.errors())
    assert isinstance(error, HTTPException)
    path = unmarked(request.url.path)[:100]
    if error.status_code == 404:
        return ApiError(
            404,
            f"there is no endpoint {path}: GET /openapi.json lists the endpoints",
            code="unknown_url",
        )
    if error.status_code == 405:
        allowed = ", ".join(_methods(request))
        message = f"{path} does not accept {request.method}: it accepts {allowed}"
        # Codex tries WebSockets five times before it uses POST, unless the status is 426.
        status = 426 if "sec-websocket-key" in request.headers else 405
        headers = {"allow": allowed}
        return ApiError(status, message, code="method_not_allowed", extra_headers=headers)
    return ApiError(error.status_code, str(error.detail))


def _methods(request: Request) -> list[str]:
    """Return the methods of all routes of a path."""
    accepted = [
        method
        for method in ("GET", "POST", "PUT", "PATCH", "DELETE")
        if any(_takes(route, request, method) for route in request.app.routes)
    ]
    # AccessMiddleware turns a HEAD into a GET.
    return ["HEAD", *accepted] if "GET" in accepted else accepted


def _takes(route: BaseRoute, request: Request, method: str) -> bool:
    if isinstance(route, Mount) and method != "GET":
        return False  # a mount matches every method, but serves files to GET only
    # A mount that did not match has written its own path into the scope.
    root = request.scope.get("app_root_path", request.scope.get("root_path", ""))
    return route.matches({**request.scope, "method": method, "root_path": root})[0] is Match.FULL


def validated(schema: type[Model], fields: object, *, strict: bool = True) -> Model:
    """Validate fields by a schema. Raises ApiError.

    strict: values have their types of JSON; if not, strings are converted.
    """
    try:
        return schema.model_validate(fields, strict=strict)
    except ValidationError as failure:
        raise invalid(failure.errors()) from None


def invalid(problems: Sequence[Problem]) -> ApiError:
    """Return the ApiError for pydantic's problems, with a path in OpenAI's form."""
    problem = likeliest(problems)
    param = param_of(problem["loc"])
    place = "the body" if param is None else named(param)
    if problem["type"] == "extra_forbidden":
        return bad_field(f"Unrecognized request argument supplied: {place}", "unknown_parameter")
    if problem["type"] == "missing":
        if param is None:
            return ApiError(400, "the request has no body: send a JSON object")
        return bad_field(f"{place} is missing: send it", "missing_required_parameter")
    words = unmarked(str(problem["msg"])).removeprefix("Value error, ")
    if words.startswith("Input "):  # pydantic's own messages, which do not name the field
        # Values other than numbers may be private, and are not quoted.
        value = problem.get("input")
        given = f", but it is {json.dumps(value):.40}" if isinstance(value, int | float) else ""
        return bad_field(f"{place}{words.removeprefix('Input')}{given}")
    return bad_field(f"{place}: {words}" if param else words)


def param_of(place: tuple[str | int, ...]) -> str | None:
    """Return a path in OpenAI's form: `messages[0].role` for `("body", "messages", 0, "role")`."""
    path = ""
    for step in place[1:] if place and place[0] in _NO_PLACE else place:
        if isinstance(step, int):
            path += f"[{step}]"
        else:
            name = step if len(step) <= _LONGEST_STEP else f"{step[: _LONGEST_STEP - 1]}…"
            path += f".{name}" if path else name
    return path or None


def likeliest(problems: Sequence[Problem]) -> dict[str, Any]:
    """Return the problem to report. Its `loc` has only names and indices of the request.

    If a value matches none of the types accepted at its position, one message lists them.
    """
    cleaned = [
        dict(problem, loc=place_of(problem["loc"]), msg=_words(problem)) for problem in problems
    ]
    deepest = max(cleaned, key=lambda problem: _rank(problem, cleaned[0]["loc"]))
    words = [p["msg"] for p in cleaned if p["loc"] == deepest["loc"]]
    if len(words) > 1 and all(word.startswith(_EXPECTED) for word in words):
        kinds = dict.fromkeys(word.removeprefix(_EXPECTED) for word in words)
        deepest["msg"] = _EXPECTED + " or ".join(kinds)
    return deepest


def _words(problem: Problem) -> str:
    known = _WORDS.get(problem["type"])
    return problem["msg"] if known is None else known.format_map(problem.get("ctx", {}))


def place_of(place: Place) -> Place:
    """Return a path without the alternatives that pydantic tried."""
    own = _own(place)  # the field's own name may look like one
    rest = place[len(own) :]
    return own + tuple(
        step for step in rest if isinstance(step, int) or not _ALTERNATIVE.fullmatch(step)
    )


def _rank(problem: Problem, first: Place) -> int:
    """Return the depth of a problem about the same field as `first`; -1 for other fields.

    A list that is only too long or too short is the deepest, because its type and its items are
    right.
    """
    place: Place = problem["loc"]
    depth = sys.maxsize if problem["type"] in ("too_long", "too_short") else len(place)
    return depth if _own(place) == _own(first) else -1


def _own(place: Place) -> Place:
    """Return the first part of a path, which names a field of the request."""
    return place[: 2 if place[:1] == ("body",) else 1]

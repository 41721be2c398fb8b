"""Query parameters that an endpoint does not know: refused, as fields of a body are."""

from __future__ import annotations

from fastapi import Depends, Request
from fastapi.routing import APIRoute

from gateway.errors import bad_field


def known_query(request: Request) -> None:
    """Raises ApiError for a parameter that the route does not declare."""
    route = request.scope["route"]
    assert isinstance(route, APIRoute)
    known = {field.alias for field in route.dependant.query_params}
    for name in request.query_params:
        if name not in known:
            raise bad_field(
                name[:64],
                f"{name[:64]} is no query parameter of this endpoint: leave it out",
                "unknown_parameter",
            )


KnownQuery = Depends(known_query)

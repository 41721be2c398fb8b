"""`/health` and `/ready`: is the process alive, and does it take requests?"""

from __future__ import annotations

from fastapi import APIRouter

router = APIRouter(tags=["health"])


@router.get("/health")
async def health() -> dict[str, str]:
    """Always OK while the process lives: a load or a busy model does not make it unhealthy."""
    return {"status": "ok"}

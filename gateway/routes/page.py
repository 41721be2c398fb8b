"""The page at `/`: its own files and no others.

The files are read once, at the first import, under their own names: no path of a request ever
reaches the file system. The page needs no key; the API that it calls does.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter, Request, Response

from common.wording import shown
from gateway.errors import ApiError

FOLDER = Path(__file__).parents[1] / "page"
INDEX = "index.html"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml; charset=utf-8",
    ".woff2": "font/woff2",
}
# No inline scripts or styles, nothing from elsewhere, no frames around it, no forms to other sites.
# `data:` is for images that a user attaches.
SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:;"
    " font-src 'self'; worker-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'"
)

router = APIRouter(tags=["page"])
_FILES: dict[str, _File] = {}


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    media_type: str
    etag: str


for _path in FOLDER.rglob("*"):
    if kind := _TYPES.get(_path.suffix):
        _tag = hashlib.sha256(content := _path.read_bytes()).hexdigest()[:16]
        _FILES[_path.relative_to(FOLDER).as_posix()] = _File(content, kind, f'"{_tag}"')


@router.get("/")
async def index(request: Request) -> Response:
    """Return the chat page."""
    return _answer(request, _FILES[INDEX])


@router.get("/page/{name:path}")
async def static(name: str, request: Request) -> Response:
    """Return one of the page's files."""
    if name not in _FILES:
        raise ApiError(404, f"the page has no file {shown(name)}", code="not_found")
    return _answer(request, _FILES[name])


def _answer(request: Request, file: _File) -> Response:
    headers = {
        "content-security-policy": SECURITY_POLICY,
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
        # Browsers check each time, so that the page and its modules always have the same version.
        "cache-control": "no-cache",
        "etag": file.etag,
    }
    if request.headers.get("if-none-match") == file.etag:
        return Response(status_code=304, headers=headers)
    return Response(file.content, media_type=file.media_type, headers=headers)

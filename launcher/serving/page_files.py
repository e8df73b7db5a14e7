"""The page at `/`: files of the package, served as they are. There is nothing in them that a stranger may not see."""

from __future__ import annotations

import hashlib
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

FOLDER = Path(__file__).parent / "page"
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}

_HEADERS = {
    # What a model writes cannot become a script: none but the files' own run, and no text is ever parsed as HTML.
    "content-security-policy": "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    # Asked for again each time, and answered by 304 while it is the same: a new version is seen at once.
    "cache-control": "no-cache",
}


def page_routes() -> list[Route]:
    """A route for each file, under /page/, and one for the page itself."""
    routes = [_route(f"/page/{file.name}", file) for file in sorted(FOLDER.iterdir()) if file.name != "index.html"]
    return [_route("/", FOLDER / "index.html"), *routes]


def _route(path: str, file: Path) -> Route:
    content = file.read_bytes()
    kind = f"{_TYPES[file.suffix]}; charset=utf-8"
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = _HEADERS | {"etag": etag}

    async def answer(request: Request) -> Response:
        known = {tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")}
        if etag in known or "*" in known:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=kind)

    return Route(path, answer, methods=["GET"], include_in_schema=False)  # and HEAD with it

"""The web page's files: read once at the start, served with an ETag. They hold no data, so anybody may have them.

They lie in the folder `web` beside this package, and get their data from the API.
"""

from __future__ import annotations

import hashlib
import mimetypes
import re
from dataclasses import dataclass
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

__all__ = ["FOLDER", "WebFile", "WebFiles", "add_pages", "is_page"]

FOLDER = Path(__file__).parents[1] / "web"
"""Where the files lie."""

_PAGES = {
    "/": "index.html",
    "/jobs/{job_id}": "job.html",
    "/policies": "policies.html",
    "/signin": "signin.html",
}
_PAGE_PATHS = re.compile(r"/|/jobs/[^/]{1,200}|/policies|/signin|/favicon\.ico|/static/.*")
# Types that the system's own table may lack, or have otherwise.
_TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}


def is_page(path: str) -> bool:
    """Whether a path is one of the page's files, which need no token."""
    return _PAGE_PATHS.fullmatch(path) is not None


@dataclass(frozen=True, slots=True)
class WebFile:
    """One file: what is sent, and the mark by which a browser knows that it has it already."""

    body: bytes
    media: str
    etag: str


class WebFiles:
    """All files of a folder, by their path in it."""

    def __init__(self, folder: Path = FOLDER) -> None:
        found = sorted(path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
        self._files = {path.relative_to(folder).as_posix(): _read(path) for path in found}

    def answer(self, name: str, request: Request) -> Response:
        """The file, or the answer that the browser's copy is still right; 404 if there is none."""
        file = self._files.get(name)
        if file is None:
            raise HTTPException(404)
        # Revalidated each time: after an upgrade no browser mixes old and new files.
        headers = {"etag": file.etag, "cache-control": "no-cache"}
        known = request.headers.get("if-none-match", "")
        if file.etag in (part.strip().removeprefix("W/") for part in known.split(",")):
            return Response(status_code=304, headers=headers)
        return Response(file.body, headers=headers, media_type=file.media)


def _read(path: Path) -> WebFile:
    body = path.read_bytes()
    media = _TYPES.get(path.suffix) or mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    return WebFile(body, media, f'"{hashlib.sha256(body).hexdigest()[:32]}"')


def add_pages(app: Starlette, files: WebFiles) -> None:
    """Serve the pages, and everything under `static`."""

    def page(path: str, name: str) -> None:
        async def answer(request: Request) -> Response:
            return files.answer(name, request)

        app.add_route(path, answer, methods=["GET"])

    for path, name in _PAGES.items():
        page(path, name)

    async def static(request: Request) -> Response:
        return files.answer(f"static/{request.path_params['name']}", request)

    async def icon(request: Request) -> Response:
        return files.answer("static/favicon.svg", request)

    app.add_route("/static/{name:path}", static, methods=["GET"])
    app.add_route("/favicon.ico", icon, methods=["GET"])

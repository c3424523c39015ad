"""HTTP endpoints of the live view, all read-only.

The page and its files contain no data and need no key. The data below `DATA` needs the scope `operate`
(`http/middleware/scopes.py`), because it shows the requests of all tenants.
"""

from __future__ import annotations

import orjson
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse

from services.common.base.errors import not_found, shortened
from services.gateway.apis.live_view.view import LiveView
from services.gateway.http.pages import page_files, page_headers

PAGE = "/ui"
DATA = "/ui/data"
_HEADERS = page_headers()
_DATA_HEADERS = {**_HEADERS, "cache-control": "no-store"}


def add_live_view(app: FastAPI, view: LiveView) -> None:
    """Adds the routes of the live view."""
    _add_page(app)
    _add_data(app, view)


def _add_page(app: FastAPI) -> None:
    files = page_files("services.gateway.apis.live_view")

    async def page(request: Request) -> Response:
        return RedirectResponse("ui/", 308)  # relative, because a proxy may add a prefix

    async def file(request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        found = files.get(name)
        if found is None:
            raise not_found(f"The path {shortened(request.url.path)} does not exist.")
        headers = {**_HEADERS, "etag": found.etag}
        if request.headers.get("if-none-match") == found.etag:
            return Response(status_code=304, headers=headers)
        return Response(found.body, headers=headers, media_type=found.media_type)

    app.add_api_route(PAGE, page, include_in_schema=False)
    app.add_api_route(PAGE + "/{name}", file, include_in_schema=False)
    app.add_api_route(PAGE + "/", file, include_in_schema=False)


def _add_data(app: FastAPI, view: LiveView) -> None:
    async def stream(request: Request) -> Response:
        headers = {**_DATA_HEADERS, "x-accel-buffering": "no"}
        return StreamingResponse(view.events(), headers=headers, media_type="text/event-stream")

    async def state(request: Request) -> Response:
        return _json(await view.snapshot())

    async def one_request(request: Request) -> Response:
        found = view.request(request.path_params["request_id"])
        if found is None:
            raise not_found(
                "This request is unknown: it has not completed yet, or is not among the last ones.",
                code="request_not_found",
            )
        return _json(found)

    app.add_api_route(DATA + "/stream", stream, include_in_schema=False)
    app.add_api_route(DATA + "/state", state, include_in_schema=False)
    app.add_api_route(DATA + "/requests/{request_id}", one_request, include_in_schema=False)


def _json(value: object) -> Response:
    return Response(orjson.dumps(value), headers=_DATA_HEADERS, media_type="application/json")

"""Request bodies and JSON responses of every API."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from services.gateway import context
from services.gateway.core.receipts import Receipt
from services.gateway.http.body import read_bytes, read_json
from services.gateway.http.body_memory import BodyMemory
from services.gateway.http.degradation import Marked, mark
from services.gateway.http.sse import CLIENT_CLOSED_REQUEST
from services.gateway.settings import GatewaySettings
from services.gateway.workers.model_waits import ModelWaits

DEFAULT_PAGE = 20


@dataclass(frozen=True, slots=True)
class Fallback:
    """Holds fallbacks that the API layer itself applied, for the response headers."""

    degraded: set[str]
    migrations: int = 0
    receipts: tuple[Receipt, ...] = ()


class BodyReader:
    """Reads request bodies within the limits of the settings.

    Args:
        bodies: the memory budget shared by all request bodies; None: each body has its own.
        only_model: returns the served model if there is exactly one, for requests that name none; else empty.
        model_waits: holds requests of models without workers; None: they are rejected.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        bodies: BodyMemory | None = None,
        only_model: Callable[[], str] = str,
        model_waits: ModelWaits | None = None,
    ) -> None:
        self._max_bytes = int(settings.max_body_mb * (1 << 20))
        self._timeout_s = settings.body_timeout_s
        self._values = settings.budgets.values
        self._bodies = bodies
        self._only_model = only_model
        self._model_waits = model_waits

    async def read_form(self, request: Request, limit: int) -> bytes:
        """Returns the body of a form of at most `limit` bytes, unparsed; raises as `read_json`."""
        return await read_bytes(request, limit, self._timeout_s, self._bodies)

    async def read(self, request: Request, *, add_model: bool = True) -> dict[str, Any]:
        """Returns the body as a JSON object; raises as `read_json`.

        Args:
            add_model: add the only model to a request that names none.
        """
        body = await read_json(request, self._max_bytes, self._timeout_s, self._values, self._bodies)
        if add_model and body.get("model") is None and (model := self._only_model()):
            context.current().permit.check_model(model, "model")
            body["model"] = model
        if self._model_waits is not None and isinstance(body.get("model"), str):
            await self._model_waits.ready(body["model"])
        return body


def read_limit(query: Mapping[str, str], most: int) -> int | None:
    """Returns the `limit` of a page, or None if it is not a number from 1 to `most`."""
    limit = query.get("limit", str(DEFAULT_PAGE))
    fits = limit.isascii() and limit.isdigit() and len(limit) <= len(str(most)) and 1 <= int(limit) <= most
    return int(limit) if fits else None


def json_response(content: dict[str, Any], marked: Iterable[Marked] = ()) -> Response:
    """Returns a JSON response; headers report the fallbacks and migrations of `marked`."""
    response = Response(orjson.dumps(content), media_type="application/json")
    mark(response, marked)
    return response


def client_closed_response() -> Response:
    """Returns the response to a client that has disconnected, for logs and metrics."""
    return Response(status_code=CLIENT_CLOSED_REQUEST)

"""Where a request asks to run, in the headers of several schedulers."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.types import ASGIApp, Receive, Scope, Send

from services.common.errors import SluiceError, invalid
from services.gateway import directions
from services.gateway.directions import MOST_RANKS, NOWHERE, Directions
from services.gateway.http.errors import error_response

# Of each, the first header that is there counts: ours, Dynamo's, its older form, llm-d's or vLLM's, the Gateway API's.
WORKER = ("x-sluice-worker", "x-dynamo-worker-instance-id", "x-worker-instance-id", "x-data-parallel-host-port")
ENDPOINT = "x-gateway-destination-endpoint"
PREFILL = (
    "x-sluice-prefill-worker",
    "x-dynamo-prefill-instance-id",
    "x-prefill-instance-id",
    "x-prefiller-host-port",
)
RANK = ("x-sluice-dp-rank", "x-dynamo-dp-rank", "x-dp-rank", "x-data-parallel-rank")
PREFILL_RANK = ("x-sluice-prefill-dp-rank", "x-dynamo-prefill-dp-rank", "x-prefill-dp-rank")
SUBSET = "x-gateway-destination-endpoint-subset"
HEADERS = {name.encode(): name for name in (*WORKER, ENDPOINT, *PREFILL, *RANK, *PREFILL_RANK, SUBSET)}
"""Names of all of them, as ASGI has them and as text."""


def of_headers(headers: Mapping[str, str]) -> Directions:
    """What the headers say; SluiceError(INVALID_ARGUMENT) for a rank that is none."""

    def names(*candidates: str) -> tuple[str, ...]:
        found = next((headers[name] for name in candidates if headers.get(name)), "")
        return _split(found)

    subset = headers.get(SUBSET)
    return Directions(
        workers=names(*WORKER),
        endpoints=names(ENDPOINT),
        prefill=names(*PREFILL),
        rank=_rank(headers, RANK),
        prefill_rank=_rank(headers, PREFILL_RANK),
        subset=None if subset is None else _split(subset),
    )


class RequestDirections:
    """Reads the directions of every request before anything else is done for it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            found = {HEADERS[name]: value for name, value in scope["headers"] if name in HEADERS}
            said = NOWHERE
            if found:
                try:
                    said = of_headers({name: value.decode("latin-1").strip() for name, value in found.items()})
                except SluiceError as error:
                    await error_response(error)(scope, receive, send)
                    return
            directions.begin(said)
        await self._app(scope, receive, send)


def _split(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _rank(headers: Mapping[str, str], candidates: tuple[str, ...]) -> int | None:
    for name in candidates:
        text = headers.get(name)
        if text:
            if not (text.isascii() and text.isdigit() and len(text) <= 5 and int(text) < MOST_RANKS):
                raise invalid(
                    f"The header {name} must be a data-parallel rank from 0.", param=name, code="invalid_value"
                )
            return int(text)
    return None

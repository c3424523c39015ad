"""Chooses the endpoint of an HTTP request and books the request there."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from services.common.errors import SluiceError, invalid, quoted, unavailable
from services.router.picker.gateways import GatewayEndpoint, Gateways
from services.router.picker.http_request import HttpRequest
from services.router.picker.releases import Releases
from services.router.picker.usage import UsageReader
from services.router.reservations.cost import CostModel
from services.router.reservations.ids import reservation_id
from services.router.router import Router
from services.router.scheduling.agent_bodies import Api, read_prompt
from services.router.scheduling.decisions import Outcome
from services.router.scheduling.openai_body import dump_json, parse_object
from services.router.scheduling.queries import MOST_HEADER, MOST_HEADERS, Prompt, Query, RouteResult
from services.router.scheduling.route_headers import DESTINATION, ROUTE_HEADERS, headers_of
from services.router.store.memory import unix_ms
from services.router.workers.worker import Worker, WorkerRank

log = logging.getLogger(__name__)

LONGEST_ID = 200
SECRET_HEADERS = frozenset({"authorization", "cookie", "x-api-key", "proxy-authorization"})
OWN_PROMPTS = frozenset({Api.CHAT, Api.COMPLETION})  # whose token ids are exactly those of the gateway


@dataclass(frozen=True, slots=True)
class PickerConfig:
    """Configuration of the picker; see RouterSettings."""

    tokenize_ms: int = 2_000
    fallbacks: int = 2
    objectives: Mapping[str, int] = field(default_factory=dict)
    conformance: bool = False


@dataclass(slots=True)
class PickedEndpoint:
    """A chosen endpoint, and the booking there.

    Attributes:
        endpoints: ``host:port``, the chosen one first, then those to try next.
        headers: to set on the request.
        body: to send to the endpoint.
        reservation: empty: nothing is booked, as for requests without a prompt.
        slot: the booked rank.
        query: which was routed; None without a booking.
        degraded: why the choice is less than exact; empty: it is exact.
        gateway: that the request goes to, if it does not go to the worker itself.
    """

    endpoints: tuple[str, ...]
    headers: dict[str, str]
    body: bytes
    reservation: str = ""
    slot: WorkerRank | None = None
    query: Query | None = None
    degraded: str = ""
    gateway: GatewayEndpoint | None = None
    computed: bool = False


class Picker:
    """Chooses endpoints with a router.

    Args:
        owner: name under which reservations are made; its lease must be kept while the picker runs.
        gateways: destinations of the requests; None: the workers themselves.
    """

    def __init__(
        self, router: Router, config: PickerConfig, cost: CostModel, owner: str = "", gateways: Gateways | None = None
    ) -> None:
        self._router = router
        self._config = config
        self._cost = cost
        self._owner = owner
        self._gateways = gateways
        self._turn = 0
        self.releases = Releases(router.lifecycle)

    async def pick(self, request: HttpRequest, body: bytes) -> PickedEndpoint:
        """Chooses the endpoint of a request, and books the request there if it has a prompt.

        Raises:
            SluiceError: INVALID_ARGUMENT for a body that is not a JSON object or lacks a model, NOT_FOUND for an
                unknown model, UNAVAILABLE (`no_endpoints`) if the subset has no worker of the model; otherwise as
                raised by Router.query.
        """
        self._router.check_ready()
        if not body or request.method != "POST":
            return self._any(request, body)
        try:
            document = parse_object(body)
        except SluiceError:
            if request.api is not None:
                raise
            return self._any(request, body)  # of an API that the picker does not read
        if request.api is None and "model" not in document:
            return self._any(request, body)
        model, adapter = self._model(request, document)
        prompt = read_prompt(document, request.api)
        if request.model and request.model != document.get("model"):
            document["model"] = request.model
            body = dump_json(document)
        if prompt is None:
            return self._any(request, body, model)
        query = self._query(request, document, model, Prompt(body=prompt, lora=adapter))
        try:
            route = await self._router.query(query)
        except asyncio.CancelledError:
            self.releases.abandon(reservation_id(query.model, query.request_id, paired=True))
            raise
        return self._routed(request, body, query, route)

    def first_byte(self, pick: PickedEndpoint) -> None:
        """Records that the response has begun: the prompt is computed."""
        if pick.reservation and not pick.computed:
            pick.computed = True
            self.releases.prefill_complete(pick.reservation)

    def end(self, pick: PickedEndpoint, usage: UsageReader, failed: bool = False) -> None:
        """Releases the booking of a request that has ended.

        Args:
            failed: the endpoint rejected the request, so that it has computed nothing.
        """
        if pick.gateway is not None:
            pick.gateway.requests -= 1
            pick.gateway = None
        if pick.reservation:
            outcome = usage.outcome(pick.reservation)
            if outcome is None and failed:
                outcome = Outcome(pick.reservation, None, 0)
            self.releases.free(pick.reservation, outcome)
            pick.reservation = ""

    async def served(self, pick: PickedEndpoint, endpoint: str) -> bool:
        """Moves the booking to the endpoint that serves the request; returns whether that is another one.

        Endpoints that are not workers of the model are ignored, as is a request that was served where it is booked. The
        booking stays where it is if the other one fails.
        """
        query = pick.query
        if query is None or not pick.reservation or pick.slot is None or self._gateways is not None:
            return False
        workers = self._router.registry.workers(query.model)
        worker = next((each for each in workers if endpoint_of(each) == endpoint), None)
        if worker is None or worker.worker_id == pick.slot.worker_id:
            return False
        query = replace(query, request_id=f"{query.request_id}~", candidates=None)
        slot = WorkerRank(worker.worker_id, 0)
        try:
            await self._router.add(slot, query)
        except SluiceError as error:
            log.warning("the booking of a request that %s serves stays where it is: %s", endpoint, error.message)
            return False
        self.releases.free(pick.reservation, Outcome(pick.reservation, None, 0))
        pick.slot, pick.query, pick.reservation = slot, query, reservation_id(query.model, query.request_id)
        pick.computed = False
        return True

    def _query(self, request: HttpRequest, document: Mapping[str, Any], model: str, prompt: Prompt) -> Query:
        priority = document.get("priority")
        if request.objective in self._config.objectives:
            priority = -self._config.objectives[request.objective]  # of an objective, higher is more important
        session = request.session_id or document.get("prompt_cache_key")
        given = request.request_id[:LONGEST_ID].replace("\0", "")
        return Query(
            model,
            prompt,
            self._cost,
            # Clients may repeat their ids, but each of their requests is booked.
            f"{given}.{uuid.uuid4().hex[:12]}" if given else uuid.uuid4().hex,
            candidates=self._candidates(request, model),
            owner=self._owner,
            priority=priority if isinstance(priority, int) and abs(priority) < 1 << 31 else 0,
            session_id=session[:LONGEST_ID] if isinstance(session, str) else "",
            return_token_ids=self._gateways is not None and request.api in OWN_PROMPTS,
            deadline_unix_ms=unix_ms() + request.first_token_ms if request.first_token_ms else 0,
            fairness_id=request.fairness_id,
            tokenize_ms=self._config.tokenize_ms,
            fallbacks=self._config.fallbacks,
            headers=_for_policies(request.headers),
        )

    def _model(self, request: HttpRequest, document: Mapping[str, Any]) -> tuple[str, str]:
        """Returns the served model and the adapter that a request names."""
        name = request.model or document.get("model")
        registry = self._router.registry
        models = registry.models()
        if name is None and len(models) == 1:
            return models[0], ""
        if not isinstance(name, str) or not name:
            raise invalid("The body must have a model; send the name of a served one.", param="model")
        if not registry.serving(name):
            for worker in registry.workers():
                if name in worker.adapters:
                    return worker.model, name
        return name, ""

    def _candidates(self, request: HttpRequest, model: str) -> frozenset[str] | None:
        """Returns the workers among the endpoints that a request may go to; None: all."""
        if request.subset is None or self._gateways is not None:
            return None
        workers = self._router.registry.serving(model)
        allowed = frozenset(worker.worker_id for worker in workers if request.allows(endpoint_of(worker)))
        if not allowed and workers:
            raise _no_endpoints(f"None of the {len(request.subset)} endpoints of the subset serves {quoted(model)}")
        return allowed if workers else None

    def _any(self, request: HttpRequest, body: bytes, model: str = "") -> PickedEndpoint:
        """Chooses an endpoint in turn, for a request without a prompt."""
        if self._gateways is not None:
            return self._through_gateway(request, {}, body)
        workers = [each for each in self._router.registry.workers(model) if not each.draining]
        wanted = request.test_endpoints if self._config.conformance else ()
        endpoints = [*wanted] or sorted({end for each in workers if request.allows(end := endpoint_of(each))})
        if not endpoints:
            raise _no_endpoints("No endpoint serves this request at the moment")
        self._turn += 1
        at = self._turn % len(endpoints)
        some = tuple((endpoints[at:] + endpoints[:at])[: 1 + self._config.fallbacks])
        return PickedEndpoint(some, {DESTINATION: ",".join(some)}, body)

    def _routed(self, request: HttpRequest, body: bytes, query: Query, route: RouteResult) -> PickedEndpoint:
        headers = headers_of(route)
        slot = WorkerRank(route.worker.worker_id, route.rank)
        if self._gateways is not None:
            if route.prompt is not None and route.prompt.token_ids:
                body = with_token_ids(body, route.prompt.token_ids)
            pick = self._through_gateway(request, headers, body)
        else:
            endpoints = (endpoint_of(route.worker), *map(endpoint_of, self._fallbacks(query, route)))
            pick = PickedEndpoint(endpoints, {**headers, DESTINATION: ",".join(endpoints)}, body)
        pick.reservation, pick.slot, pick.query, pick.degraded = route.reservation_id, slot, query, route.degraded
        return pick

    def _fallbacks(self, query: Query, route: RouteResult) -> Sequence[Worker]:
        return [each for each in route.fallbacks if query.candidates is None or each.worker_id in query.candidates]

    def _through_gateway(self, request: HttpRequest, headers: Mapping[str, str], body: bytes) -> PickedEndpoint:
        assert self._gateways is not None
        first, others = self._gateways.choose(request.allows, self._config.fallbacks)
        if first is None:
            raise _no_endpoints("No gateway is known at the moment, or none is in the subset")
        first.requests += 1
        endpoints = (first.endpoint, *others)
        return PickedEndpoint(endpoints, {**headers, DESTINATION: ",".join(endpoints)}, body, gateway=first)


def _for_policies(headers: Mapping[str, str]) -> dict[str, str]:
    """Returns the headers that policies may read: no credentials, and no more than a query may have."""
    shown = (
        (name, value)
        for name, value in headers.items()
        if name not in SECRET_HEADERS and len(name) + len(value) <= MOST_HEADER
    )
    return dict(islice(shown, MOST_HEADERS))


def stale_headers(headers: Mapping[str, str]) -> list[str]:
    """Returns the routing headers that the client may have sent and that must not reach the endpoint.

    Args:
        headers: that are set on the request.
    """
    return [name for name in ROUTE_HEADERS if name not in headers]


def endpoint_of(worker: Worker) -> str:
    """Returns host:port of the HTTP server that a worker's requests go to."""
    return worker.http_address or worker.address


def with_token_ids(body: bytes, token_ids: bytes) -> bytes:
    """Returns a body with the token ids of its prompt in `nvext.token_data`; unchanged if it has an `nvext` already.

    Args:
        body: a JSON object with at least one field.
        token_ids: packed u32.
    """
    end = body.rstrip()
    if b'"nvext"' in body or not end.endswith(b"}"):
        return body
    numbers = b",".join(b"%d" % number for number in memoryview(token_ids).cast("I"))
    return b'%s,"nvext":{"token_data":[%s]}}' % (end[:-1], numbers)


def _no_endpoints(message: str) -> SluiceError:
    return unavailable(f"{message}; retry later.", code="no_endpoints")

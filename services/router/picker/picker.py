"""Chooses the endpoint of an HTTP request and books the request there."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from services.common.base.errors import SluiceError, invalid, quoted, unavailable
from services.common.observability.receipts import ASKED, is_asked
from services.common.security.tenant_salts import check_body as check_salts
from services.router.picker.bodies import translated, with_token_ids
from services.router.picker.gateways import GatewayEndpoint, Gateways
from services.router.picker.http_request import HttpRequest
from services.router.picker.releases import Releases
from services.router.picker.usage import UsageReader
from services.router.router import Router
from services.router.scheduling.body_intake import HELD_FACTOR, BodyIntake, beside
from services.router.scheduling.decisions import Outcome
from services.router.scheduling.queries import Prompt, Query, RouteResult, for_policies
from services.router.scheduling.request_bodies import Api, api_of, has_several_prompts
from services.router.scheduling.route_headers import DESTINATION, WORKER, headers_of
from services.router.state.reservations.cost import CostModel
from services.router.state.reservations.ids import reservation_id
from services.router.state.store.memory import unix_ms
from services.router.state.workers.worker import Worker, WorkerRank

log = logging.getLogger(__name__)

MAX_ID_LENGTH = 200
"""Characters of the name of a session or request at the endpoint picker; the rest is ignored."""
OWN_PROMPTS = frozenset({Api.CHAT, Api.COMPLETION})  # whose token ids are exactly those of the gateway
ATTEMPTS = 2


class _OutsideSubset(Exception):
    """A query chose a worker outside the subset: it could not name those inside, because the model had no worker."""


@dataclass(frozen=True, slots=True)
class PickerConfig:
    """Configuration of the picker; see RouterSettings."""

    tokenize_ms: int = 2_000
    fallbacks: int = 2
    objectives: Mapping[str, int] = field(default_factory=dict)
    receipts: bool = False
    store_timeout_s: float = 1.0


@dataclass(frozen=True, slots=True)
class _Booked:
    """What is booked, by which the booking can be moved; without the body of the request, which may be megabytes.

    Attributes:
        prompt: its hashes.
        prompt_tokens: its length.
    """

    worker_id: str
    model: str
    request_id: str
    prompt: Prompt
    prompt_tokens: int
    priority: int
    deadline_unix_ms: int


@dataclass(slots=True)
class PickedEndpoint:
    """A chosen endpoint, and the booking there.

    Attributes:
        endpoints: ``host:port``, the chosen one first, then those to try next.
        headers: to set on the request.
        body: to send to the endpoint.
        reservation: empty: nothing is booked, as for requests without a prompt.
        booked: what is booked; None if it cannot be moved.
        degraded: why the choice is less than exact; empty: it is exact.
        gateway: that the request goes to, if it does not go to the worker itself.
        receipt: the route receipt, if the request asks for one; else empty.
    """

    endpoints: tuple[str, ...]
    headers: dict[str, str]
    body: bytes
    reservation: str = ""
    booked: _Booked | None = None
    degraded: str = ""
    gateway: GatewayEndpoint | None = None
    receipt: Mapping[str, Any] = field(default_factory=dict)
    computed: bool = False


@dataclass(frozen=True, slots=True)
class _ReadRequest:
    """What is read from a body.

    Attributes:
        body: to send to the endpoint.
        query: None if the body has no prompt.
    """

    body: bytes
    model: str
    query: Query | None = None


class Picker:
    """Chooses endpoints with a router.

    Args:
        bodies: bounds and parses bodies.
        owner: name under which reservations are made; its lease must be kept while the picker runs.
        gateways: destinations of the requests; None: the workers themselves.
    """

    def __init__(
        self,
        router: Router,
        config: PickerConfig,
        cost: CostModel,
        bodies: BodyIntake,
        owner: str = "",
        gateways: Gateways | None = None,
    ) -> None:
        self._router = router
        self._config = config
        self._cost = cost
        self._bodies = bodies
        self._owner = owner
        self._gateways = gateways
        self._turn = 0
        self.releases = Releases(router.lifecycle, config.store_timeout_s)

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
        read = await self._read(request, body)
        if read is None:
            return self._any(request, body)
        if read.query is None:
            return self._any(request, read.body, read.model)
        held = HELD_FACTOR * read.query.prompt.size
        self._bodies.take(held)
        try:
            return await self._pick(request, read.body, read.query)
        finally:
            self._bodies.give_back(held)

    async def _read(self, request: HttpRequest, body: bytes) -> _ReadRequest | None:
        """Returns what is read from a body; None if it is of an API that the picker does not read."""
        api = api_of(request.path)
        try:
            document, held = await self._bodies.parse(body)
        except SluiceError:
            if api is not None:
                raise
            return None
        try:
            if api is None and "model" not in document:
                return None
            check_salts(document)
            model, adapter = self._model(request, document)
            prompt, body = await beside(len(body), translated, api, request.model, document, body)
            if prompt is None:
                return _ReadRequest(body, model)
            return _ReadRequest(body, model, self._query(request, document, model, Prompt(body=prompt, lora=adapter)))
        finally:
            if held:
                self._bodies.give_back(held)

    async def _pick(self, request: HttpRequest, body: bytes, query: Query) -> PickedEndpoint:
        for _ in range(ATTEMPTS):
            try:
                route = await self._router.query(query)
            except asyncio.CancelledError:
                self.releases.abandon(reservation_id(query.model, query.request_id, paired=True))
                raise
            try:
                if self._gateways is not None and route.prompt is not None and route.prompt.token_ids:
                    ids = route.prompt.token_ids
                    body = await beside(len(ids), with_token_ids, body, ids)
                return self._routed(request, body, query, route)
            except _OutsideSubset:
                self._release(route)
                candidates = self._candidates(request, query.model)
                query = replace(query, request_id=_unique(request.request_id), candidates=candidates)
            except BaseException:
                self._release(route)
                raise
        raise _no_endpoints("No worker of the subset serves this request at the moment")

    def _release(self, route: RouteResult) -> None:
        """Releases the booking of a request that has not been sent anywhere."""
        self.releases.free(route.reservation_id, Outcome(route.reservation_id, None, 0))

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
        booked = pick.booked
        if booked is None or not pick.reservation:
            return False
        workers = self._router.registry.workers(booked.model)
        worker = next((each for each in workers if endpoint_of(each) == endpoint), None)
        if worker is None or worker.worker_id == booked.worker_id:
            return False
        moved = replace(booked, worker_id=worker.worker_id, request_id=f"{booked.request_id}~")
        reservation = reservation_id(moved.model, moved.request_id)
        try:
            await self._router.add(WorkerRank(moved.worker_id, 0), self._moving(moved))
        except asyncio.CancelledError:
            self.releases.abandon(reservation)
            raise
        except SluiceError as error:
            log.warning("the booking of a request that %s serves stays where it is: %s", endpoint, error.message)
            return False
        self.releases.free(pick.reservation, Outcome(pick.reservation, None, 0))
        pick.booked, pick.reservation, pick.computed = moved, reservation, False
        return True

    def _moving(self, booked: _Booked) -> Query:
        """Returns the query that books a request on the endpoint that serves it."""
        return Query(
            model=booked.model,
            prompt=replace(booked.prompt, prompt_tokens=booked.prompt_tokens),
            cost=self._cost,
            request_id=booked.request_id,
            owner=self._owner,
            priority=booked.priority,
            deadline_unix_ms=booked.deadline_unix_ms,
        )

    def _query(self, request: HttpRequest, document: Mapping[str, Any], model: str, prompt: Prompt) -> Query:
        priority = document.get("priority")
        if self._config.objectives:  # clients do not overrule them; of an objective, higher is more important
            priority = -self._config.objectives.get(request.objective, 0)
        session = request.session_id or document.get("prompt_cache_key")
        two_stages = self._gateways is not None
        return Query(
            model=model,
            prompt=prompt,
            cost=self._cost,
            request_id=_unique(request.request_id),
            candidates=None if request.subset is None else self._candidates(request, model),
            owner=self._owner,
            priority=priority if isinstance(priority, int) and abs(priority) < 1 << 31 else 0,
            session_id=session[:MAX_ID_LENGTH] if isinstance(session, str) else "",
            return_token_ids=two_stages and request.api in OWN_PROMPTS and not has_several_prompts(document),
            deadline_unix_ms=unix_ms() + request.first_token_ms if request.first_token_ms else 0,
            **request.fields,
            tokenize_ms=self._config.tokenize_ms,
            fallbacks=self._config.fallbacks,
            headers=for_policies(request.headers) if self._router.reads_headers else {},
            return_hashes=not two_stages,
        )

    def _model(self, request: HttpRequest, document: Mapping[str, Any]) -> tuple[str, str]:
        """Returns the served model and the adapter that a request names."""
        name = request.model or document.get("model")
        registry = self._router.registry
        if name is None and len(models := registry.models()) == 1:
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
        if not allowed and (workers or not request.subset):
            raise _no_endpoints(f"None of the {len(request.subset)} endpoints of the subset serves {quoted(model)}")
        return allowed if workers else None

    def _any(self, request: HttpRequest, body: bytes, model: str = "") -> PickedEndpoint:
        """Chooses an endpoint in turn, for a request without a prompt."""
        if self._gateways is not None:
            return self._through_gateway(request, {}, body)
        workers = [each for each in self._router.registry.workers(model) if each.accepts]
        endpoints = sorted({end for each in workers if request.allows(end := endpoint_of(each))})
        if not endpoints:
            raise _no_endpoints("No endpoint serves this request at the moment")
        self._turn += 1
        at = self._turn % len(endpoints)
        some = tuple((endpoints[at:] + endpoints[:at])[: 1 + self._config.fallbacks])
        return PickedEndpoint(some, {DESTINATION: ",".join(some)}, body)

    def _routed(self, request: HttpRequest, body: bytes, query: Query, route: RouteResult) -> PickedEndpoint:
        headers = headers_of(route)
        if self._gateways is not None:
            headers[WORKER] = ",".join(worker.worker_id for worker in (route.worker, *route.fallbacks))
            pick = self._through_gateway(request, headers, body)
        else:
            first = endpoint_of(route.worker)
            if request.subset is not None and not request.allows(first):
                raise _OutsideSubset
            endpoints = (first, *filter(request.allows, map(endpoint_of, route.fallbacks)))
            pick = PickedEndpoint(endpoints, {**headers, DESTINATION: ",".join(endpoints)}, body)
            pick.booked = _Booked(
                route.worker.worker_id,
                query.model,
                query.request_id,
                route.prompt or Prompt(),
                route.prompt_tokens,
                query.priority,
                query.deadline_unix_ms,
            )
        pick.reservation, pick.degraded = route.reservation_id, route.degraded
        if self._config.receipts and is_asked(request.headers.get(ASKED, "")):
            pick.receipt = route.receipt
        return pick

    def _through_gateway(self, request: HttpRequest, headers: Mapping[str, str], body: bytes) -> PickedEndpoint:
        assert self._gateways is not None
        first, others = self._gateways.choose(request.allows, self._config.fallbacks)
        if first is None:
            raise _no_endpoints("No gateway is known at the moment, or none is in the subset")
        first.requests += 1
        endpoints = (first.endpoint, *others)
        return PickedEndpoint(endpoints, {**headers, DESTINATION: ",".join(endpoints)}, body, gateway=first)


def _unique(request_id: str) -> str:
    """Returns the id of a booking. Clients may repeat their ids, but each of their requests is booked."""
    given = request_id[:MAX_ID_LENGTH].replace("\0", "")
    return f"{given}.{os.urandom(6).hex()}" if given else os.urandom(16).hex()


def endpoint_of(worker: Worker) -> str:
    """Returns host:port of the HTTP server that a worker's requests go to."""
    return worker.http_address or worker.address


def _no_endpoints(message: str) -> SluiceError:
    return unavailable(f"{message}; retry later.", code="no_endpoints")

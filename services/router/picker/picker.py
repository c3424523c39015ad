"""Chooses the endpoint of an HTTP request and books the request there."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from services.common.apis.prompts import dump_json
from services.common.base.errors import SluiceError, invalid, quoted, unavailable
from services.common.observability.receipts import ASKED, is_asked
from services.common.security.tenant_salts import check_body as check_salts
from services.router.picker.gateways import GatewayEndpoint, Gateways
from services.router.picker.http_request import HttpRequest
from services.router.picker.releases import Releases
from services.router.picker.usage import UsageReader
from services.router.router import Router
from services.router.scheduling.body_intake import HELD_FACTOR, BodyIntake, beside
from services.router.scheduling.decisions import Outcome
from services.router.scheduling.queries import Prompt, Query, RouteResult, for_policies
from services.router.scheduling.request_bodies import AnyBody, Api, has_several_prompts, read_prompt
from services.router.scheduling.route_headers import DESTINATION, WORKER, headers_of
from services.router.state.reservations.cost import CostModel
from services.router.state.reservations.ids import reservation_id
from services.router.state.store.memory import unix_ms
from services.router.state.workers.worker import Worker, WorkerRank

log = logging.getLogger(__name__)

MAX_ID_LENGTH = 200
"""Characters of the name of a session or request at the endpoint picker; the rest is ignored."""
OWN_PROMPTS = frozenset({Api.CHAT, Api.COMPLETION})  # whose token ids are exactly those of the gateway
_RANKS = frozenset({"data_parallel_rank", "routed_dp_rank", "disagg_prefill_dp_rank", "kv_hints"})
ROUTE_FIELDS: Mapping[str, frozenset[str]] = {
    "nvext": frozenset(
        {"backend_instance_id", "decode_worker_id", "prefill_worker_id", "dp_rank", "prefill_dp_rank", "token_data"}
    ),
    "vllm_xargs": _RANKS,
    "custom_params": _RANKS,
}
"""Fields of objects in a body that engines and gateways take as a routing decision, or as the prompt."""


ATTEMPTS = 2
_IDS_PER_PIECE = 1 << 14  # token ids that are numbers at a time


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


@dataclass(slots=True)
class PickedEndpoint:
    """A chosen endpoint, and the booking there.

    Attributes:
        endpoints: ``host:port``, the chosen one first, then those to try next.
        headers: to set on the request.
        body: to send to the endpoint.
        reservation: empty: nothing is booked, as for requests without a prompt.
        slot: the booked rank.
        query: by which the booking is moved; None if it cannot be.
        degraded: why the choice is less than exact; empty: it is exact.
        gateway: that the request goes to, if it does not go to the worker itself.
        receipt: the route receipt, if the request asks for one; else empty.
    """

    endpoints: tuple[str, ...]
    headers: dict[str, str]
    body: bytes
    reservation: str = ""
    slot: WorkerRank | None = None
    query: Query | None = None
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
        with self._bodies.holding(HELD_FACTOR * read.query.prompt.size):
            return await self._pick(request, read.body, read.query)

    async def _read(self, request: HttpRequest, body: bytes) -> _ReadRequest | None:
        """Returns what is read from a body; None if it is of an API that the picker does not read."""
        async with AsyncExitStack() as stack:
            try:
                document = await stack.enter_async_context(self._bodies.parsed(body))
            except SluiceError:
                if request.api is not None:
                    raise
                return None
            if request.api is None and "model" not in document:
                return None
            check_salts(document)
            model, adapter = self._model(request, document)
            prompt, body = await beside(len(body), _translated, request, document, body)
            if prompt is None:
                return _ReadRequest(body, model)
            return _ReadRequest(body, model, self._query(request, document, model, Prompt(body=prompt, lora=adapter)))

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
        query = pick.query
        if query is None or not pick.reservation or pick.slot is None or self._gateways is not None:
            return False
        workers = self._router.registry.workers(query.model)
        worker = next((each for each in workers if endpoint_of(each) == endpoint), None)
        if worker is None or worker.worker_id == pick.slot.worker_id:
            return False
        query = replace(query, request_id=f"{query.request_id}~")
        slot = WorkerRank(worker.worker_id, 0)
        try:
            await self._router.add(slot, query)
        except asyncio.CancelledError:
            self.releases.abandon(reservation_id(query.model, query.request_id))
            raise
        except SluiceError as error:
            log.warning("the booking of a request that %s serves stays where it is: %s", endpoint, error.message)
            return False
        self.releases.free(pick.reservation, Outcome(pick.reservation, None, 0))
        pick.slot, pick.query, pick.reservation = slot, query, reservation_id(query.model, query.request_id)
        pick.computed = False
        return True

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
            candidates=self._candidates(request, model),
            owner=self._owner,
            priority=priority if isinstance(priority, int) and abs(priority) < 1 << 31 else 0,
            session_id=session[:MAX_ID_LENGTH] if isinstance(session, str) else "",
            return_token_ids=two_stages and request.api in OWN_PROMPTS and not has_several_prompts(document),
            deadline_unix_ms=unix_ms() + request.first_token_ms if request.first_token_ms else 0,
            **request.fields,
            tokenize_ms=self._config.tokenize_ms,
            fallbacks=self._config.fallbacks,
            headers=for_policies(request.headers),
            return_hashes=not two_stages,
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
        slot = WorkerRank(route.worker.worker_id, route.rank)
        if self._gateways is not None:
            headers[WORKER] = ",".join(worker.worker_id for worker in (route.worker, *route.fallbacks))
            pick = self._through_gateway(request, headers, body)
        elif not request.allows(endpoint_of(route.worker)):
            raise _OutsideSubset
        else:
            endpoints = (endpoint_of(route.worker), *filter(request.allows, map(endpoint_of, route.fallbacks)))
            pick = PickedEndpoint(endpoints, {**headers, DESTINATION: ",".join(endpoints)}, body)
            pick.query = _without_body(query, route)
        pick.reservation, pick.slot, pick.degraded = route.reservation_id, slot, route.degraded
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
    return f"{given}.{uuid.uuid4().hex[:12]}" if given else uuid.uuid4().hex


def _translated(request: HttpRequest, document: dict[str, Any], body: bytes) -> tuple[AnyBody | None, bytes]:
    """Returns the prompt of a body, and the body to send to the endpoint."""
    prompt = read_prompt(document, request.api, len(body))
    return prompt, dump_json(document) if _rewrite(document, request.model) else body


def _rewrite(document: dict[str, Any], model: str) -> bool:
    """Writes the model, if any, into a body without a routing decision; returns whether that changed it."""
    ranks = _RANKS & document.keys()
    changed = bool(ranks)
    for name in ranks:
        del document[name]
    if model and model != document.get("model"):
        document["model"], changed = model, True
    for name, fields in ROUTE_FIELDS.items():
        found = document.get(name)
        if isinstance(found, dict) and not fields.isdisjoint(found):
            del document[name]
            kept = {field: value for field, value in found.items() if field not in fields}
            document |= {name: kept} if kept else {}
            changed = True
    return changed


def _without_body(query: Query, route: RouteResult) -> Query:
    """Returns a query with the hashes of its prompt instead of its body, which may be megabytes."""
    hashes = replace(route.prompt or Prompt(), token_ids=b"", prompt_tokens=route.prompt_tokens, lora=query.prompt.lora)
    return replace(query, prompt=hashes, headers={}, candidates=None, return_hashes=False)


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
    numbers = memoryview(token_ids).cast("I")
    starts = range(0, len(numbers), _IDS_PER_PIECE)
    pieces = (orjson.dumps(numbers[start : start + _IDS_PER_PIECE].tolist())[1:-1] for start in starts)
    return b'%s,"nvext":{"token_data":[%s]}}' % (end[:-1], b",".join(pieces))


def _no_endpoints(message: str) -> SluiceError:
    return unavailable(f"{message}; retry later.", code="no_endpoints")

"""Converts messages of queries and reservations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from operator import attrgetter
from typing import Any

from google.protobuf.message import Message

from services.common.base.errors import invalid
from services.common.rpc.media import read_spans
from services.router.scheduling.admission_queue import Reason
from services.router.scheduling.decisions import Decision, Outcome
from services.router.scheduling.queries import Prompt, Query, RouteResult
from services.router.scheduling.route_headers import headers_of
from services.router.state.kv_index.index import Overlap
from services.router.state.reservations.cost import CostModel
from services.router.state.reservations.ids import scoped
from services.router.state.store.memory import unix_ms
from services.router.state.workers.worker import Role, WorkerRank
from sluice.v1 import router_pb2

NO_PROMPT = Prompt()
MAX_FALLBACKS = 16
"""Fallbacks that a query may ask for; a larger number counts as this."""
_REASONS = {
    Reason.CAPACITY: router_pb2.WaitingQueue.REASON_CAPACITY,
    Reason.WORKERS: router_pb2.WaitingQueue.REASON_WORKERS,
}
_MODES = router_pb2.RouteQueryRequest.Mode.values()
_ROLES: Mapping[int, Role | None] = {0: None, **{role.value: role for role in Role}}


class _SameFields:
    """The fields that a message and a class of the domain have in common, except some: a new one needs no line here.

    Calling it returns them, by name, of a message or an object.
    """

    def __init__(self, message: type[Message], domain: type, others: set[str]) -> None:
        self._names = [
            name for name in message.DESCRIPTOR.fields_by_name if hasattr(domain, name) and name not in others
        ]
        self._values = attrgetter(*self._names)

    def __call__(self, source: Any) -> dict[str, Any]:
        return dict(zip(self._names, self._values(source), strict=True))


_prompt_fields = _SameFields(router_pb2.PromptRef, Prompt, {"media"})
_query_fields = _SameFields(
    router_pb2.RouteQueryRequest,
    Query,
    {"prompt", "cost", "request_id", "candidates", "owner", "fallbacks", "headers", "role"},
)
_route_fields = _SameFields(
    router_pb2.RouteQueryResponse, RouteResult, {"overlap", "scores", "headers", "block_size", "fallbacks"}
)
_decision_fields = _SameFields(router_pb2.Decision, Decision, set())


def prompt_of(prompt: router_pb2.PromptRef, lora: str, cache_salt: str) -> Prompt:
    """Returns a prompt from its message; raises SluiceError (INVALID_ARGUMENT) for malformed media."""
    media = prompt.media
    return Prompt(
        **_prompt_fields(prompt),
        lora=lora,
        cache_salt=cache_salt,
        media=read_spans(media, len(prompt.token_ids) // 4 or None) if media else (),
    )


def query_of(request: router_pb2.RouteQueryRequest, defaults: CostModel, scope: str = "") -> Query:
    """Returns a query from its message; raises SluiceError (INVALID_ARGUMENT) if it is invalid.

    Args:
        scope: of the caller's reservations.
    """
    if request.mode not in _MODES:
        raise invalid(f"Unknown mode {request.mode}; use a value of RouteQueryRequest.Mode.", param="mode")
    reserve = request.mode == router_pb2.RouteQueryRequest.MODE_SELECT_AND_RESERVE
    if request.role not in _ROLES:
        raise invalid(f"Unknown role {request.role}; use AGGREGATED, PREFILL or DECODE.", param="role")
    if reserve:
        check_request_id(request.request_id)
    return Query(
        **_query_fields(request),
        prompt=prompt_of(request.prompt, request.lora, request.cache_salt),
        cost=_cost_model(request.cost, defaults) if request.HasField("cost") else defaults,
        request_id=scoped(scope, request.request_id) if reserve else "",
        candidates=frozenset(request.candidates.worker_ids) if request.HasField("candidates") else None,
        owner=scoped(scope, request.owner),
        scope=scope,
        deadline_unix_ms=unix_ms() + request.first_token_ms if request.first_token_ms else 0,
        fallbacks=min(request.fallbacks, MAX_FALLBACKS),
        headers={name.lower(): value for name, value in request.headers.items()} if request.headers else {},
        role=_ROLES[request.role],
    )


def check_request_id(request_id: str) -> None:
    """Raises SluiceError (INVALID_ARGUMENT) if a reservation cannot have this request id."""
    if not request_id:
        raise invalid("Missing request_id; a reservation requires one.", param="request_id")
    if "\0" in request_id:
        raise invalid("A request_id cannot contain a NUL character.", param="request_id")


def _cost_model(overrides: router_pb2.CostOverrides, defaults: CostModel) -> CostModel:
    changes = {field.name: value for field, value in overrides.ListFields()}
    for name, value in changes.items():
        most = 1 if name.endswith("_credit") else float("inf")
        if not 0 <= value <= most or value == float("inf"):
            raise invalid(f"{name} is {value}; use a value from 0 to {most}.", param=f"cost.{name}")
    return replace(defaults, **changes)


def overlap_of(overlap: Overlap) -> router_pb2.Overlap:
    """Returns the message of an overlap."""
    return router_pb2.Overlap(
        device_blocks=overlap.device,
        host_blocks=overlap.host,
        disk_blocks=overlap.disk,
        predicted_blocks=overlap.predicted,
    )


def response_of(route: RouteResult) -> router_pb2.RouteQueryResponse:
    """Returns the response to a query."""
    prefill, prompt, peer = route.prefill_worker, route.prompt or NO_PROMPT, route.peer
    target = _target(WorkerRank(route.worker.worker_id, route.rank), route.worker.address)
    only_prefill = route.half is Role.PREFILL
    prefill_target = target if only_prefill else None
    if prefill is not None:
        prefill_target = _target(WorkerRank(prefill.worker_id, route.prefill_rank), prefill.address)
    return router_pb2.RouteQueryResponse(
        **_route_fields(route),
        decode=None if only_prefill else target,
        prefill=prefill_target,
        overlap=overlap_of(route.overlap),
        scores=[
            router_pb2.CandidateScore(
                worker_id=score.slot.worker_id,
                data_parallel_rank=score.slot.rank,
                cost=score.cost,
                overlap=overlap_of(score.overlap),
                prefill_blocks=score.load.prefill,
                decode_blocks=score.load.decode,
                policy_score=score.policy_score,
            )
            for score in route.scores
        ]
        if route.scores
        else None,
        headers=headers_of(route),
        token_ids=prompt.token_ids,
        block_hashes=prompt.block_hashes,
        hash_scheme=prompt.hash_scheme,
        block_size=prompt.block_size,
        fallbacks=[_target(WorkerRank(worker.worker_id, 0), worker.address) for worker in route.fallbacks]
        if route.fallbacks
        else None,
        router_hint=None
        if peer is None
        else router_pb2.PeerHint(
            worker_id=peer.worker.worker_id,
            address=peer.worker.address,
            data_parallel_rank=peer.rank,
            blocks=peer.blocks,
        ),
    )


def queues_of(waiting: Mapping[tuple[str, Reason], int], model: str) -> router_pb2.GetQueuesResponse:
    """Returns the queues of one model, or of all models for an empty name."""
    return router_pb2.GetQueuesResponse(
        queues=[
            router_pb2.WaitingQueue(model=name, reason=_REASONS[reason], requests=number)
            for (name, reason), number in sorted(waiting.items(), key=lambda item: item[0][0])
            if number and model in ("", name)
        ]
    )


def outcome_of(outcome: router_pb2.RequestOutcome) -> Outcome:
    """Returns the outcome of a request from its message."""
    cached = outcome.cached_tokens if outcome.HasField("cached_tokens") else None
    return Outcome(outcome.reservation_id, cached, outcome.output_tokens)


def _target(slot: WorkerRank, address: str) -> router_pb2.WorkerTarget:
    return router_pb2.WorkerTarget(worker_id=slot.worker_id, address=address, data_parallel_rank=slot.rank)


def decision_of(decision: Decision) -> router_pb2.Decision:
    """Returns the message of a decision record."""
    prefill = decision.prefill_slot
    return router_pb2.Decision(
        **_decision_fields(decision),
        decode=None if decision.slot is None else _target(decision.slot, decision.address),
        prefill=None if prefill is None else _target(prefill, decision.prefill_address),
    )

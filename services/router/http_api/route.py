"""The calls of the API: an OpenAI body in, a worker out; reservations by their id."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeGuard
from uuid import uuid4

from google.protobuf.descriptor import FieldDescriptor
from starlette.requests import Request

from services.common.base.errors import invalid, quoted
from services.common.base.packing import unpack_u32
from services.router.http_api.bodies import check_lists
from services.router.scheduling.queries import for_policies
from sluice.v1 import common_pb2, router_pb2

HEADERS = {
    "x-request-id": "request_id",
    "x-session-id": "session_id",
    "x-sluice-priority": "priority",
    "x-sluice-max-wait-ms": "max_wait_ms",
    "x-gateway-inference-fairness-id": "fairness_id",
    "x-llm-d-inference-fairness-id": "fairness_id",
}
"""Headers in place of parameters; of two names the later one here counts, and the query parameter takes precedence."""

ROLES = {
    "aggregated": common_pb2.WORKER_ROLE_AGGREGATED,
    "prefill": common_pb2.WORKER_ROLE_PREFILL,
    "decode": common_pb2.WORKER_ROLE_DECODE,
}
NO_TARGET = {"worker": None, "address": None, "rank": None}
TOKEN_LISTS = frozenset({"prompt"})
"""Fields that may be a list of token ids, which has more items than other lists."""
_MAX_U32 = 2**32 - 1
"""Number in a header or parameter of `POST /route`; a larger one is refused with INVALID_ARGUMENT."""
_FLAGS = {"true": True, "1": True, "false": False, "0": False}


def _whole(least: int, most: int) -> Callable[[str, str], int]:
    def read(name: str, text: str) -> int:
        if not text.lstrip("-").isdecimal() or len(text) > 11 or not least <= int(text) <= most:
            raise invalid(f"{name} is {quoted(text)}; send a whole number from {least} to {most}.", param=name)
        return int(text)

    return read


def _flag(name: str, text: str) -> bool:
    if text.lower() not in _FLAGS:
        raise invalid(f"{name} is {quoted(text)}; send true or false.", param=name)
    return _FLAGS[text.lower()]


def _text(name: str, text: str) -> str:
    return text


def _role(name: str, text: str) -> int:
    if text not in ROLES:
        raise invalid(f"{name} is {quoted(text)}; send one of {', '.join(ROLES)}.", param=name)
    return ROLES[text]


_READERS: Mapping[int, Callable[[str, str], Any]] = {
    FieldDescriptor.TYPE_STRING: _text,
    FieldDescriptor.TYPE_INT32: _whole(-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_UINT32: _whole(0, _MAX_U32),
    FieldDescriptor.TYPE_BOOL: _flag,
}
_IN_BODY = frozenset({"model", "cache_salt", "explain"})
PARAMETERS: Mapping[str, Callable[[str, str], Any]] = {
    field.name: _READERS[field.type]
    for field in router_pb2.RouteQueryRequest.DESCRIPTOR.fields
    if field.type in _READERS and field.name not in _IN_BODY
} | {"candidates": _text, "reserve": _flag, "role": _role}
"""Parameters of `POST /route`: the plain fields of RouteQuery, and those that a URL has in another form."""


def query_of(request: Request, body: Mapping[str, Any]) -> router_pb2.RouteQueryRequest:
    """Returns the query for an OpenAI body, without its prompt.

    Headers that begin with `x-` are passed on to composed policies.

    Raises:
        SluiceError: INVALID_ARGUMENT for a body without a model or with too long a list, or a wrong parameter.
    """
    check_lists(body, TOKEN_LISTS)
    model = body.get("model")
    if not _is_text(model):
        raise invalid("The request body must have a model: a text that is not empty.", param="model")
    given = _parameters(request)
    reserve, candidates = given.pop("reserve", True), given.pop("candidates", None)
    query = router_pb2.RouteQueryRequest(
        model=model,
        mode=router_pb2.RouteQueryRequest.MODE_QUERY_ONLY,
        headers=for_policies({name: value for name, value in request.headers.items() if name.startswith("x-")}),
        **given,
    )
    if candidates is not None:
        query.candidates.worker_ids.extend(filter(None, candidates.split(",")))
        query.candidates.SetInParent()
    if reserve:
        query.mode = router_pb2.RouteQueryRequest.MODE_SELECT_AND_RESERVE
        query.request_id = query.request_id or uuid4().hex
    return query


def _parameters(request: Request) -> dict[str, Any]:
    found = {name: request.headers[header] for header, name in HEADERS.items() if header in request.headers}
    for name, value in request.query_params.multi_items():
        if name not in PARAMETERS:
            raise invalid(f"Unknown parameter {quoted(name)}; use one of {', '.join(PARAMETERS)}.", param=name)
        found[name] = value
    return {name: PARAMETERS[name](name, value) for name, value in found.items()}


def answer_of(response: router_pb2.RouteQueryResponse) -> dict[str, Any]:
    """Returns the JSON object for the response to a query; every field is always present."""
    hint = response.router_hint
    return {
        **(_target(response.decode) if response.HasField("decode") else NO_TARGET),
        "prefill": _target(response.prefill) if response.HasField("prefill") else None,
        "reservation": response.reservation_id or None,
        "expires_unix_ms": response.expires_unix_ms or None,
        "headers": dict(response.headers),
        "fallbacks": [_target(target) for target in response.fallbacks],
        "overlap_blocks": response.overlap.device_blocks + response.overlap.host_blocks + response.overlap.disk_blocks,
        "tokens_to_compute": response.tokens_to_compute,
        "waited_ms": response.waited_ms,
        "session_hit": response.session_hit,
        "degraded": response.degraded or None,
        "router_hint": {**_target(hint), "blocks": hint.blocks} if response.HasField("router_hint") else None,
        "token_ids": list(unpack_u32(response.token_ids)) if response.token_ids else None,
    }


def _target(target: router_pb2.WorkerTarget | router_pb2.PeerHint) -> dict[str, Any]:
    return {"worker": target.worker_id, "address": target.address, "rank": target.data_parallel_rank}


def marked_of(fields: Mapping[str, Any]) -> router_pb2.MarkPrefillCompleteRequest:
    """Returns the request for `{"reservation": ID}`; raises SluiceError (INVALID_ARGUMENT)."""
    return router_pb2.MarkPrefillCompleteRequest(reservation_ids=_reservations(fields, ()))


def freed_of(fields: Mapping[str, Any]) -> router_pb2.FreeRequestRequest:
    """Returns the request for `{"reservation": ID}` with the token counts of its outcome, which are optional."""
    names = _reservations(fields, ("cached_tokens", "output_tokens"))
    request = router_pb2.FreeRequestRequest(reservation_ids=names)
    counts = {name: _count(name, fields[name]) for name in ("cached_tokens", "output_tokens") if name in fields}
    if counts and len(names) != 1:
        raise invalid("Token counts belong to one reservation; send reservation instead of reservations.")
    if counts:
        request.outcomes.add(reservation_id=names[0], **counts)
    return request


def _reservations(fields: Mapping[str, Any], others: tuple[str, ...]) -> list[str]:
    """Returns the ids in `reservation`, a text, or `reservations`, a list of texts."""
    check_lists(fields)
    allowed = ("reservation", "reservations", *others)
    for name in fields:
        if name not in allowed:
            raise invalid(f"Unknown field {quoted(name)}; use one of {', '.join(allowed)}.", param=name)
    if ("reservation" in fields) == ("reservations" in fields):
        raise invalid("Send either reservation or reservations.", param="reservation")
    names = fields.get("reservations", [fields.get("reservation")])
    if not isinstance(names, list) or not names or not all(map(_is_text, names)):
        raise invalid("A reservation is a text that is not empty; reservations is a list of them.", param="reservation")
    return names


def _is_text(value: Any) -> TypeGuard[str]:
    """Returns whether a value is a text that is not empty and can be encoded, unlike a lone surrogate."""
    return isinstance(value, str) and bool(value) and value.encode("utf-8", "replace").decode() == value


def _count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_U32:
        raise invalid(f"{name} is {quoted(value)}; send a whole number of tokens.", param=name)
    return value

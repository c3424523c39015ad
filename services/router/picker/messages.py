"""Converts between the messages of `envoy.service.ext_proc.v3` and the picker; those it sends are serialized."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import chain
from typing import Any

import orjson
from google.protobuf import struct_pb2

from services.common.base.errors import ErrorKind, SluiceError, word
from services.common.net.intake.json_intake import foreign_json
from services.common.observability.receipts import RECEIPT
from services.router.picker.http_request import (
    SERVED_KEY,
    SERVED_NAMESPACE,
    SUBSET_KEY,
    SUBSET_NAMESPACE,
    HttpRequest,
    endpoints_of,
)
from services.router.picker.picker import PickedEndpoint
from services.router.scheduling.request_bodies import PARAM, Api
from services.router.scheduling.route_headers import DESTINATION, ROUTE_HEADERS
from services.router.state.reservations.table import AllBusy, BusyReason
from sluice.v1 import ext_proc_pb2 as ext_proc

CHUNK = 62_000
"""Most bytes of one streamed body response; Envoy splits at 64 KiB, and the reference picker sends this many."""

DROPPED = "x-llm-d-request-dropped-reason"
DEGRADED = "x-sluice-degraded"
FULL_DUPLEX = ext_proc.ProtocolConfiguration.FULL_DUPLEX_STREAMED
NO_BODY = ext_proc.ProtocolConfiguration.NONE
_OVERWRITE = ext_proc.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
_DROPPED = {
    BusyReason.SATURATED: "rejected-saturated",
    BusyReason.EXPIRED: "rejected-ttl-expired",
    BusyReason.DISPLACED: "evicted-queue-pressure",
}
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


def read_headers(message: Any) -> dict[str, str]:
    """Returns the headers of an HttpHeaders message by lower-case name; of repeated ones, the last."""
    return {
        each.key.lower(): each.raw_value.decode("latin-1") if each.raw_value else each.value
        for each in message.headers.headers
    }


def status_of(message: Any) -> str:
    """Returns the status in an HttpHeaders message, such as 200, which is also that of a message without one."""
    for each in message.headers.headers:
        if each.key == ":status":
            return str(each.raw_value.decode("latin-1") or each.value)
    return "200"


def subset_of(message: Any) -> tuple[str, ...] | None:
    """Returns the endpoints that a request may go to, from a message's metadata; None: not restricted."""
    return endpoints_of(_metadata(message, SUBSET_NAMESPACE).get(SUBSET_KEY))


def served_endpoint(message: Any) -> str:
    """Returns the endpoint that serves the request, from the metadata or attributes of its response; empty: unknown."""
    served = _metadata(message, SERVED_NAMESPACE).get(SERVED_KEY)
    if isinstance(served, str) and served:
        return served
    attributes = message.attributes
    for name in attributes:
        fields = attributes[name].fields
        if "upstream.address" in fields and (address := fields["upstream.address"].string_value):
            return str(address)
    return ""


def _metadata(message: Any, namespace: str) -> dict[str, Any]:
    found = message.metadata_context.filter_metadata
    return {key: _plain(value) for key, value in found[namespace].fields.items()} if namespace in found else {}


def _plain(value: Any) -> Any:
    kind = value.WhichOneof("kind")
    if kind == "list_value":
        return [each.string_value for each in value.list_value.values]
    return value.string_value if kind == "string_value" else ""


def picked(pick: PickedEndpoint, last: str = "request_body") -> Iterable[bytes]:
    """Returns the responses that send a request to its endpoint: headers, then its body and trailers.

    Args:
        last: kind of the message that ended the request.
    """
    head = _destination(tuple(pick.headers.items()))
    if pick.body:
        head += _content_length(len(pick.body))
    # Envoy waits for the end of an empty body too.
    body = streamed(REQUEST_BODY, pick.body, last == "request_body") if pick.body or last == "request_body" else ()
    return chain((head,), body, (REQUEST_TRAILERS,) if last == "request_trailers" else ())


@lru_cache(maxsize=4_096)
def _destination(headers: tuple[tuple[str, str], ...]) -> bytes:
    """Returns the answer to the headers of a request without a body; those for one endpoint are the same."""
    given = dict(headers)
    endpoints = given[DESTINATION]
    stale = [name for name in ROUTE_HEADERS if name not in given]  # a client may have sent them
    mutation = ext_proc.HeaderMutation(set_headers=_set(given), remove_headers=stale)
    destination = struct_pb2.Struct(fields={DESTINATION: struct_pb2.Value(string_value=endpoints)})
    metadata = struct_pb2.Struct(fields={SERVED_NAMESPACE: struct_pb2.Value(struct_value=destination)})
    return _request_headers(mutation, clear_route_cache=True) + _serialized(dynamic_metadata=metadata)


@lru_cache(maxsize=4_096)
def _content_length(length: int) -> bytes:
    """Returns what the answer for a request with a body has besides.

    It is a message of its own: parsers merge the fields of messages that follow each other.
    """
    return _request_headers(ext_proc.HeaderMutation(set_headers=_set({"content-length": str(length)})))


def _request_headers(mutation: Any, *, clear_route_cache: bool = False) -> bytes:
    common = ext_proc.CommonResponse(header_mutation=mutation, clear_route_cache=clear_route_cache)
    return _serialized(request_headers=ext_proc.HeadersResponse(response=common))


def _serialized(**fields: Any) -> bytes:
    return bytes(ext_proc.ProcessingResponse(**fields).SerializeToString())


def response_headers(pick: PickedEndpoint, given: Any) -> bytes:
    """Returns the answer to the headers of a response; it marks a degraded choice and has the route receipt.

    Args:
        given: the HttpHeaders message; a gateway's receipts, which lack what was predicted, are completed.
    """
    if not pick.degraded and not pick.receipt:
        return RESPONSE_HEADERS
    headers = {DEGRADED: pick.degraded} if pick.degraded else {}
    if pick.receipt:
        receipts = _receipts(read_headers(given).get(RECEIPT, ""))
        headers[RECEIPT] = json.dumps([{**each, **pick.receipt} for each in receipts])
    mutation = ext_proc.HeaderMutation(set_headers=_set(headers))
    common = ext_proc.CommonResponse(header_mutation=mutation)
    return _serialized(response_headers=ext_proc.HeadersResponse(response=common))


def _receipts(text: str) -> list[dict[str, Any]]:
    """Returns the receipts that an endpoint has sent; one without content if it has sent none."""
    try:
        found = foreign_json(text.encode("latin-1", "replace"), RECEIPT)
    except SluiceError:
        found = []
    return [each for each in found if isinstance(each, dict)] or [{}] if isinstance(found, list) else [{}]


def streamed(kind: int, body: bytes, end: bool) -> Iterable[bytes]:
    """Returns responses with a body, or a chunk of one, in parts of at most CHUNK bytes; the last part has `end`.

    Each is ProcessingResponse{BodyResponse{CommonResponse{BodyMutation{StreamedBodyResponse{body, end_of_stream}}}}},
    written directly: as protobuf objects, a body would be copied three times.

    Args:
        kind: REQUEST_BODY or RESPONSE_BODY.
    """
    size = len(body)
    if size <= CHUNK:
        prefix = _prefix(kind, size, end)
        return (prefix + body + _END if end else prefix + body,)
    starts = range(0, size, CHUNK)
    return chain.from_iterable(
        streamed(kind, body[start : start + CHUNK], end and start + CHUNK >= size) for start in starts
    )


@lru_cache(maxsize=4_096)
def _prefix(kind: int, size: int, end: bool) -> bytes:
    """Returns what precedes a part of a body in a response with it."""
    prefix = b"\x0a" + _varint(size) if size else b""
    inner = len(prefix) + size + (len(_END) if end else 0)
    for tag in (_STREAMED_RESPONSE, _BODY_MUTATION, _RESPONSE, kind):
        wrapped = bytes((tag,)) + _varint(inner)
        inner += len(wrapped)
        prefix = wrapped + prefix
    return prefix


def _varint(number: int) -> bytes:
    if number < 128:
        return bytes((number,))
    if number < 16_384:
        return bytes((number & 127 | 128, number >> 7))
    return bytes((number & 127 | 128, number >> 7 & 127 | 128, number >> 14))


# Tags of fields of messages, as they are on the wire: field number << 3 | 2.
REQUEST_BODY, RESPONSE_BODY = 3 << 3 | 2, 4 << 3 | 2
_RESPONSE, _BODY_MUTATION, _STREAMED_RESPONSE = 1 << 3 | 2, 3 << 3 | 2, 3 << 3 | 2
_END = b"\x10\x01"  # end_of_stream of a StreamedBodyResponse
REQUEST_TRAILERS = _serialized(request_trailers=ext_proc.TrailersResponse())
RESPONSE_TRAILERS = _serialized(response_trailers=ext_proc.TrailersResponse())
RESPONSE_HEADERS = _serialized(response_headers=ext_proc.HeadersResponse(response=ext_proc.CommonResponse()))


def rejected(error: SluiceError, request: HttpRequest | None) -> bytes:
    """Returns the message that ends a request with an error, in the form of its API."""
    status, headers = _status(error)
    if error.retry_after_ms:
        headers["retry-after"] = str(max(-(-error.retry_after_ms // 1000), 1))
    if request is not None and request.request_id:
        headers["x-request-id"] = request.request_id
    headers["content-type"] = "application/json"
    return _serialized(
        immediate_response=ext_proc.ImmediateResponse(
            status=ext_proc.HttpStatus(code=status),
            headers=ext_proc.HeaderMutation(set_headers=_set(headers)),
            body=orjson.dumps(_error_body(error, status, request)),
            details=f"sluice_{word(error)}",
        )
    )


def _status(error: SluiceError) -> tuple[int, dict[str, str]]:
    if isinstance(error, AllBusy):
        return 429, {DROPPED: _DROPPED[error.reason]}
    if error.kind is ErrorKind.OVERLOADED:
        return 429, {DROPPED: _DROPPED[BusyReason.SATURATED]}
    if error.code == "stopping":
        return 503, {DROPPED: "rejected-shutting-down"}
    if error.kind is ErrorKind.UNAVAILABLE or error.code == "no_candidates":
        return 503, {DROPPED: "rejected-no-endpoints"}
    return error.http_status, {}


def _error_body(error: SluiceError, status: int, request: HttpRequest | None) -> Mapping[str, Any]:
    message = error.message.replace("The openai_body", "The request body", 1)  # what RouteQuery names it
    if request is not None and request.api is Api.MESSAGES:
        kind = _ANTHROPIC_TYPES.get(status, "overloaded_error" if status == 503 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": message}}
    kind = "invalid_request_error" if 400 <= status < 500 and status != 429 else "server_error"
    return {
        "error": {
            "message": message,
            "type": "rate_limit_error" if status == 429 else kind,
            "param": error.param.removeprefix(PARAM) or None,
            "code": error.code or None,
        }
    }


def _set(headers: Mapping[str, str]) -> list[Any]:
    return [
        ext_proc.HeaderValueOption(
            header=ext_proc.HeaderValue(key=name, raw_value=value.encode("latin-1", "replace")),
            append_action=_OVERWRITE,
        )
        for name, value in headers.items()
    ]

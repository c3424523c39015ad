"""Converts between the messages of `envoy.service.ext_proc.v3` and the picker."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import orjson
from google.protobuf import struct_pb2

from services.common.errors import ErrorKind, SluiceError, word
from services.common.observability.receipts import RECEIPT
from services.router.picker.http_request import (
    SERVED_KEY,
    SERVED_NAMESPACE,
    SUBSET_KEY,
    SUBSET_NAMESPACE,
    HttpRequest,
    endpoints_of,
)
from services.router.picker.picker import PickedEndpoint, stale_headers
from services.router.reservations.table import AllBusy, BusyReason
from services.router.scheduling.agent_bodies import Api
from services.router.scheduling.openai_body import PARAM
from services.router.scheduling.route_headers import DESTINATION
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
NOTHING = ext_proc.HeadersResponse(response=ext_proc.CommonResponse())


def read_headers(message: Any) -> dict[str, str]:
    """Returns the headers of an HttpHeaders message by lower-case name; of repeated ones, the last."""
    return {
        each.key.lower(): each.raw_value.decode("latin-1") if each.raw_value else each.value
        for each in message.headers.headers
    }


def subset_of(message: Any) -> tuple[str, ...] | None:
    """Returns the endpoints that a request may go to, from a message's metadata; None: not restricted."""
    return endpoints_of(_metadata(message, SUBSET_NAMESPACE).get(SUBSET_KEY))


def served_endpoint(message: Any) -> str:
    """Returns the endpoint that serves the request, from the metadata or attributes of its response; empty: unknown."""
    served = _metadata(message, SERVED_NAMESPACE).get(SERVED_KEY)
    if isinstance(served, str) and served:
        return served
    for attributes in message.attributes.values():
        if (
            address := attributes.fields["upstream.address"].string_value
            if "upstream.address" in attributes.fields
            else ""
        ):
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


def picked(pick: PickedEndpoint, last: str = "request_body") -> Iterator[Any]:
    """Yields the responses that send a request to its endpoint: headers, then its body and trailers.

    Args:
        last: kind of the message that ended the request.
    """
    headers = {**pick.headers, "content-length": str(len(pick.body))} if pick.body else pick.headers
    destination = struct_pb2.Struct(fields={DESTINATION: struct_pb2.Value(string_value=pick.headers[DESTINATION])})
    yield ext_proc.ProcessingResponse(
        request_headers=ext_proc.HeadersResponse(
            response=ext_proc.CommonResponse(
                clear_route_cache=True,
                header_mutation=ext_proc.HeaderMutation(set_headers=_set(headers), remove_headers=stale_headers(pick)),
            )
        ),
        dynamic_metadata=struct_pb2.Struct(fields={SERVED_NAMESPACE: struct_pb2.Value(struct_value=destination)}),
    )
    if pick.body or last == "request_body":  # Envoy waits for the end of an empty body too
        for part in streamed(pick.body, last == "request_body"):
            yield ext_proc.ProcessingResponse(request_body=part)
    if last == "request_trailers":
        yield REQUEST_TRAILERS


def response_headers(pick: PickedEndpoint, given: Mapping[str, str]) -> Any:
    """Returns the response to the headers of a response, which marks a degraded choice and has the route receipt.

    Args:
        given: the headers; a gateway's receipts, which lack what was predicted, are completed.
    """
    if not pick.degraded and not pick.receipt:
        return ext_proc.ProcessingResponse(response_headers=NOTHING)
    headers = {DEGRADED: pick.degraded} if pick.degraded else {}
    if pick.receipt:
        headers[RECEIPT] = json.dumps([{**each, **pick.receipt} for each in _receipts(given.get(RECEIPT, ""))])
    mutation = ext_proc.HeaderMutation(set_headers=_set(headers))
    return ext_proc.ProcessingResponse(
        response_headers=ext_proc.HeadersResponse(response=ext_proc.CommonResponse(header_mutation=mutation))
    )


def _receipts(text: str) -> list[dict[str, Any]]:
    """Returns the receipts that an endpoint has sent; one without content if it has sent none."""
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError:
        found = []
    return [each for each in found if isinstance(each, dict)] or [{}] if isinstance(found, list) else [{}]


def response_body(body: bytes, end: bool) -> Iterator[Any]:
    """Yields the responses that pass on a chunk of a response."""
    for part in streamed(body, end):
        yield ext_proc.ProcessingResponse(response_body=part)


def streamed(body: bytes, end: bool) -> Iterator[Any]:
    """Yields a body, or a chunk of one, in parts of at most CHUNK bytes; the last part has `end`."""
    last = max((len(body) - 1) // CHUNK, 0)
    for number in range(last + 1):
        part = ext_proc.StreamedBodyResponse(
            body=body[number * CHUNK : (number + 1) * CHUNK], end_of_stream=end and number == last
        )
        yield ext_proc.BodyResponse(
            response=ext_proc.CommonResponse(body_mutation=ext_proc.BodyMutation(streamed_response=part))
        )


REQUEST_TRAILERS = ext_proc.ProcessingResponse(request_trailers=ext_proc.TrailersResponse())
RESPONSE_TRAILERS = ext_proc.ProcessingResponse(response_trailers=ext_proc.TrailersResponse())


def rejected(error: SluiceError, request: HttpRequest | None) -> Any:
    """Returns the response that ends a request with an error, in the form of its API."""
    status, headers = _status(error)
    if error.retry_after_ms:
        headers["retry-after"] = str(max(-(-error.retry_after_ms // 1000), 1))
    if request is not None and request.request_id:
        headers["x-request-id"] = request.request_id
    headers["content-type"] = "application/json"
    return ext_proc.ProcessingResponse(
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

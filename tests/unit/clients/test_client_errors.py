"""Errors of the client library: what a service raises is what its caller catches."""

from __future__ import annotations

import pytest
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from sluice_client import (
    ConnectionFailedError,
    DeadlineExceededError,
    InvalidRequestError,
    NotFoundError,
    PermissionDeniedError,
    SluiceError,
    UnavailableError,
)
from sluice_client import wire as messages
from sluice_client.errors import DETAIL_KEY, error_of_status

from services.common.base import errors as services_errors
from services.common.rpc import errors as grpc_errors
from sluice.v1 import common_pb2


def caught(status: Status, trailers: dict[str, str | bytes], message: str = "said by grpc") -> SluiceError:
    return error_of_status(GRPCError(status, message), trailers, "host:1")


def carried(error: services_errors.SluiceError) -> SluiceError:
    return caught(Status.UNKNOWN, {DETAIL_KEY: grpc_errors.to_detail(error).SerializeToString()})


def test_every_detail_arrives() -> None:
    error = carried(
        services_errors.SluiceError(
            services_errors.ErrorKind.OVERLOADED, "Too much.", param="n", code="busy", retry_after_ms=1500
        )
    )
    assert (error.kind, error.message, error.param, error.code, error.retry_after_s, error.retryable) == (
        messages.ErrorKind.OVERLOADED,
        "Too much.",
        "n",
        "busy",
        1.5,
        False,
    )
    assert str(error) == "Too much."


@pytest.mark.parametrize("kind", [kind for kind in services_errors.ErrorKind if kind], ids=lambda kind: kind.name)
def test_every_kind_of_the_services_has_a_class(kind: services_errors.ErrorKind) -> None:
    error = carried(services_errors.SluiceError(kind, "x"))
    assert int(error.kind) == int(kind)
    assert error.kind.name == kind.name
    assert (type(error) is SluiceError) == (kind is services_errors.ErrorKind.INTERNAL)
    assert error.retryable == services_errors.SluiceError(kind, "x").retryable
    assert error.retry_after_s is None


def test_a_worker_that_is_gone_counts_as_unavailable() -> None:
    error = carried(services_errors.SluiceError(services_errors.ErrorKind.ENGINE_SHUTDOWN, "x"))
    assert isinstance(error, ConnectionFailedError)
    assert isinstance(error, UnavailableError)


def test_a_kind_of_a_later_version_is_a_plain_error() -> None:
    detail = common_pb2.ErrorDetail(kind=common_pb2.ErrorKind.ValueType(77), message="new")
    error = caught(Status.INTERNAL, {DETAIL_KEY: detail.SerializeToString()})
    assert (type(error), int(error.kind), error.message) == (SluiceError, 77, "new")


@pytest.mark.parametrize(
    ("status", "kind", "expected"),
    [
        (Status.NOT_FOUND, "NOT_FOUND", NotFoundError),
        (Status.UNAVAILABLE, "UNAVAILABLE", UnavailableError),
        (Status.PERMISSION_DENIED, "PERMISSION_DENIED", PermissionDeniedError),
        (Status.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", DeadlineExceededError),
        (Status.RESOURCE_EXHAUSTED, "TOO_LARGE", InvalidRequestError),
        (Status.UNKNOWN, "INTERNAL", SluiceError),
    ],
    ids=lambda value: getattr(value, "name", value),
)
@pytest.mark.parametrize(
    "trailers", [{}, {DETAIL_KEY: b"\xff\xff\xff"}, {DETAIL_KEY: "text"}], ids=["no", "bad", "odd"]
)
def test_without_a_detail_the_status_counts(
    status: Status, kind: str, expected: type[SluiceError], trailers: dict[str, str | bytes]
) -> None:
    error = caught(status, trailers)
    assert (type(error), error.kind.name) == (expected, kind)
    assert error.message == f"host:1 returned {status.name}: said by grpc"
    assert error.retryable == (status is Status.UNAVAILABLE), "a proxy without a backend answers just that"

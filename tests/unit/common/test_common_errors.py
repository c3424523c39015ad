"""Errors keep their meaning over the wire and have short messages."""

from __future__ import annotations

import re
from typing import Any

import grpc
import pytest
from grpc.aio import AioRpcError, Metadata
from hypothesis import given
from hypothesis import strategies as st

from services.common.base import errors
from services.common.base.errors import (
    MAX_MESSAGE_LENGTH,
    MAX_VALUE,
    ErrorKind,
    SluiceError,
    invalid,
    quoted,
    shortened,
)
from services.common.rpc.errors import (
    DETAIL_KEY,
    MAX_MESSAGE,
    MAX_PARAM_LENGTH,
    MAX_RETRY_AFTER_MS,
    abort,
    answer,
    from_detail,
    from_rpc_error,
    passed_on,
    to_detail,
)
from sluice.v1 import common_pb2

KINDS = st.sampled_from([kind for kind in ErrorKind if kind is not ErrorKind.INTERNAL_UNKNOWN])
PRINTABLE = st.text().filter(str.isprintable)


class Aborted(Exception):
    pass


class FakeContext:
    """What `abort` needs of a servicer context; remembers the status."""

    def __init__(self) -> None:
        self.status: tuple[grpc.StatusCode, str, tuple[tuple[str, bytes], ...]] | None = None

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return (("user-agent", "a test"),)

    async def abort(self, code: grpc.StatusCode, text: str, trailing: tuple[tuple[str, bytes], ...]) -> None:
        self.status = (code, text, trailing)
        raise Aborted

    def as_seen_by_the_caller(self) -> AioRpcError:
        assert self.status is not None
        code, text, trailing = self.status
        return AioRpcError(code, Metadata(), Metadata(*trailing), text)


def same(left: SluiceError, right: SluiceError) -> bool:
    names = ("kind", "message", "param", "code", "retry_after_ms", "retryable", "http_status")
    return all(getattr(left, name) == getattr(right, name) for name in names)


@given(
    KINDS,
    PRINTABLE.filter(bool),
    PRINTABLE,
    st.from_regex(r"[a-z0-9_]{0,64}", fullmatch=True),
    st.integers(0, MAX_RETRY_AFTER_MS),
    st.booleans(),
)
def test_error_survives_the_wire(
    kind: ErrorKind, message: str, param: str, code: str, retry_after_ms: int, retryable: bool
) -> None:
    error = SluiceError(kind, message, param=param, code=code, retry_after_ms=retry_after_ms, retryable=retryable)
    assert same(from_detail(common_pb2.ErrorDetail.FromString(to_detail(error).SerializeToString())), error)


@given(st.text(), st.text(), st.text(), st.integers(0, 2**32 - 1))
def test_error_from_the_wire_is_within_bounds(message: str, param: str, code: str, retry_after_ms: int) -> None:
    sent = SluiceError(ErrorKind.INTERNAL, 300 * message, param=99 * param, code=code, retry_after_ms=retry_after_ms)
    error = from_detail(to_detail(sent))
    assert error.message.isprintable()
    assert error.param.isprintable()
    assert len(error.message) <= MAX_MESSAGE
    assert len(error.param) <= MAX_PARAM_LENGTH
    assert error.code == (code if re.fullmatch("[a-z0-9_]{1,64}", code) else "")
    assert error.retry_after_ms <= MAX_RETRY_AFTER_MS


@pytest.mark.parametrize(
    ("kind", "becomes"),
    [
        (ErrorKind.UNAUTHENTICATED, ErrorKind.UNAVAILABLE),
        (ErrorKind.PERMISSION_DENIED, ErrorKind.UNAVAILABLE),
        (ErrorKind.CANCELLED, ErrorKind.UNAVAILABLE),
        *((kind, kind) for kind in (ErrorKind.INVALID_ARGUMENT, ErrorKind.OVERLOADED, ErrorKind.ENGINE_SHUTDOWN)),
    ],
)
def test_error_about_the_calling_service_is_not_passed_on_to_its_client(kind: ErrorKind, becomes: ErrorKind) -> None:
    said = passed_on(SluiceError(kind, "Sentence."), "worker w1")
    assert said.kind is becomes
    assert said.http_status not in (401, 403, 499)
    assert said.retryable is (becomes in (ErrorKind.UNAVAILABLE, ErrorKind.ENGINE_SHUTDOWN))


@pytest.mark.parametrize("kind", [kind for kind in ErrorKind if kind is not ErrorKind.INTERNAL_UNKNOWN])
async def test_error_survives_a_failed_call(kind: ErrorKind) -> None:
    context = FakeContext()
    error = SluiceError(kind, "Sentence.", param="n", code="c", retry_after_ms=5)
    with pytest.raises(Aborted):
        await abort(context, error)  # type: ignore[arg-type]
    assert same(from_rpc_error(context.as_seen_by_the_caller(), "router"), error)


def test_kinds_are_those_of_the_contract() -> None:
    contract = {number: name.removeprefix("ERROR_KIND_") for name, number in common_pb2.ErrorKind.items() if number}
    assert {int(kind): kind.name for kind in ErrorKind if kind} == contract


def test_kind_of_a_newer_version_is_internal() -> None:
    detail = common_pb2.ErrorDetail(kind=common_pb2.ErrorKind.ValueType(99), message="new")
    assert from_detail(detail).kind is ErrorKind.INTERNAL


@pytest.mark.parametrize(
    ("code", "kind", "http"),
    [
        (grpc.StatusCode.UNAVAILABLE, ErrorKind.UNAVAILABLE, 503),
        (grpc.StatusCode.DEADLINE_EXCEEDED, ErrorKind.DEADLINE_EXCEEDED, 504),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, ErrorKind.TOO_LARGE, 413),
        (grpc.StatusCode.CANCELLED, ErrorKind.CANCELLED, 499),
        (grpc.StatusCode.UNKNOWN, ErrorKind.INTERNAL, 500),
        (grpc.StatusCode.UNIMPLEMENTED, ErrorKind.INTERNAL, 500),
    ],
)
def test_status_without_detail_still_has_a_kind(code: grpc.StatusCode, kind: ErrorKind, http: int) -> None:
    error = from_rpc_error(AioRpcError(code, Metadata(), Metadata(), "raw text of a library"), "router")
    assert (error.kind, error.http_status) == (kind, http)
    assert "router" in error.message
    assert "raw text" not in error.message


def test_detail_that_cannot_be_read_falls_back_to_the_status() -> None:
    broken = Metadata((DETAIL_KEY, b"\xff\xff\xff"))
    assert (
        from_rpc_error(AioRpcError(grpc.StatusCode.UNAVAILABLE, Metadata(), broken), "x").kind is ErrorKind.UNAVAILABLE
    )


async def test_answer_hides_what_it_does_not_know(caplog: pytest.LogCaptureFixture) -> None:
    async def handler(request: int) -> int:
        raise RuntimeError(f"password {request}")

    context = FakeContext()
    with pytest.raises(Aborted):
        await answer(context, handler, 7)  # type: ignore[arg-type]
    assert context.status is not None
    assert context.status[0] is grpc.StatusCode.INTERNAL
    assert "password" not in context.status[1]
    assert "password 7" in caplog.text


async def test_answer_passes_on_what_is_typed_and_what_is_right() -> None:
    async def half(request: int) -> int:
        if request % 2:
            raise errors.invalid("Odd.", param="request")
        return request // 2

    context = FakeContext()
    assert await answer(context, half, 8) == 4  # type: ignore[arg-type]
    with pytest.raises(Aborted):
        await answer(context, half, 7)  # type: ignore[arg-type]
    assert context.status is not None
    assert context.status[0] is grpc.StatusCode.INVALID_ARGUMENT


def test_error_constructors_set_kind_and_status() -> None:
    made = [
        (errors.invalid("x"), 400, False),
        (errors.not_found("x"), 404, False),
        (errors.unavailable("x"), 503, True),
        (errors.overloaded("x"), 503, False),
        (errors.internal("x"), 500, False),
        (SluiceError(ErrorKind.INTERNAL_UNKNOWN, "x"), 500, False),
        (SluiceError(ErrorKind.DISCONNECTED, "x"), 502, True),
        (SluiceError(ErrorKind.DISCONNECTED, "x", retryable=False), 502, False),
    ]
    assert [(error.http_status, error.retryable) for error, _, _ in made] == [(http, again) for _, http, again in made]
    assert errors.unavailable("x").retry_after_ms == errors.overloaded("x").retry_after_ms == 1000


def test_shortened_long_text_ends_in_an_ellipsis() -> None:
    short = shortened("x" * (MAX_VALUE + 1))
    assert short == "x" * (MAX_VALUE - 1) + "…"


@pytest.mark.parametrize(
    "value",
    [
        "x" * 9_000_000,
        "\n" * 9_000_000,
        ["x" * 9_000_000] * 9,
        {"a": {"b": ["x" * 900] * 900}},
        [[[[[[[[[1]]]]]]]]] * 99,
    ],
)
def test_quoted_long_value_is_short(value: Any) -> None:
    assert len(quoted(value)) <= 2 * MAX_VALUE + 2


def test_error_with_a_long_message_param_and_code_is_short() -> None:
    error = SluiceError(ErrorKind.INVALID_ARGUMENT, "m" * 9_000, param="p" * 9_000, code="c" * 9_000)
    assert len(error.message) == len(str(error)) == MAX_MESSAGE_LENGTH
    assert (len(error.param), len(error.code)) == (MAX_VALUE, MAX_VALUE)
    assert invalid("m" * 9_000).message == "m" * (MAX_MESSAGE_LENGTH - 1) + "…"

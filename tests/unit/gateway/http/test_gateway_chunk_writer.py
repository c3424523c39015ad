"""Chunks that are written in place: only where the server's own send would not wait."""

from __future__ import annotations

from typing import Any

import pytest
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from services.gateway.http.connection import chunk_writer


class Transport:
    def __init__(self) -> None:
        self.written = b""

    def write(self, data: bytes) -> None:
        self.written += data


class Flow:
    write_paused = False


@pytest.fixture
def cycle() -> Any:
    """A response of uvicorn whose start was sent, without a connection."""
    made: Any = RequestResponseCycle.__new__(RequestResponseCycle)
    made.transport, made.flow = Transport(), Flow()
    made.response_started = made.chunked_encoding = True
    made.response_complete = made.disconnected = False
    return made


def test_chunk_of_a_started_response_is_written_with_its_length(cycle: Any) -> None:
    write = chunk_writer(cycle.send)
    assert write is not None
    assert write(b"data: 0123456789\n\n")
    assert cycle.transport.written == b"12\r\ndata: 0123456789\n\n\r\n"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("response_started", False),
        ("chunked_encoding", False),
        ("chunked_encoding", None),
        ("response_complete", True),
        ("disconnected", True),
    ],
)
def test_chunk_that_the_server_must_judge_is_left_to_send(cycle: Any, field: str, value: bool | None) -> None:
    setattr(cycle, field, value)
    write = chunk_writer(cycle.send)
    assert write is not None
    assert not write(b"data")
    assert cycle.transport.written == b""


def test_chunk_to_a_client_that_does_not_read_is_left_to_send(cycle: Any) -> None:
    cycle.flow.write_paused = True
    write = chunk_writer(cycle.send)
    assert write is not None
    assert not write(b"data")


def test_send_of_another_server_has_no_chunk_writer() -> None:
    async def send(message: Any) -> None:
        raise AssertionError(message)

    assert chunk_writer(send) is None

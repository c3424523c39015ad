"""Only grpc's own cancelled streams are no complaint."""

from __future__ import annotations

from tests.support.oracles.tracebacks import complaints

GRPC = """preprocess  | Traceback (most recent call last):
preprocess  |   File "src/python/grpcio/grpc/_cython/_cygrpc/aio/server.pyx.pxi", line 812, in _schedule_rpc_coro
preprocess  | asyncio.exceptions.CancelledError
"""


def test_grpcs_cancelled_streams_are_none() -> None:
    assert complaints(f"gateway | stopping\n{GRPC}{GRPC}router | stopping\n") == []


def test_everything_else_is_one() -> None:
    ours = GRPC.replace("src/python/grpcio/", "services/").replace("preprocess  | ", "")
    for text in (ours, GRPC + ours, GRPC.replace("CancelledError", "TimeoutError"), "Traceback (most recent"):
        assert len(complaints(text)) == 1

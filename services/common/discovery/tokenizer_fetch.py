"""Fetches the tokenizer's files from a worker."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc

from services.common.discovery.tokenizer_store import IncomingTokenizer, TokenizerStore
from services.common.errors import ErrorKind, SluiceError, invalid
from services.common.rpc.channels import open_channel
from services.common.rpc.errors import from_rpc_error
from services.common.security.identity import WORKER
from sluice.v1 import worker_pb2, worker_pb2_grpc

FETCH_S = 120.0


async def fetch_tokenizer(
    address: str,
    fingerprint: str,
    store: TokenizerStore,
    credentials: grpc.ChannelCredentials | None = None,
    callee: str = WORKER,
) -> Path:
    """Streams a tokenizer's files from a worker, checks and stores them, and returns their path.

    Args:
        callee: selects the bearer token sent to the worker.

    Raises:
        SluiceError: the worker's error; INVALID_ARGUMENT when the content does not match its announcement;
            FAILED_PRECONDITION when it cannot be written to disk.
    """
    channel = open_channel(address, credentials, callee=callee)
    incoming: IncomingTokenizer | None = None
    try:
        stub: worker_pb2_grpc.WorkerAsyncStub = worker_pb2_grpc.WorkerStub(channel)
        incoming = await asyncio.to_thread(store.receive, fingerprint)
        first = True
        async for chunk in stub.GetTokenizer(worker_pb2.GetTokenizerRequest(), timeout=FETCH_S):
            if first and chunk.fingerprint != fingerprint:
                raise invalid(
                    "The worker sent a tokenizer with another fingerprint than its card has.", code="bad_tokenizer"
                )
            first = False
            await asyncio.to_thread(incoming.add, chunk.file_name, chunk.file_size, chunk.data)
        path = await asyncio.to_thread(incoming.keep)
        incoming = None
        return path
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error, "worker") from error
    except OSError as error:
        raise SluiceError(
            ErrorKind.FAILED_PRECONDITION, f"The worker's tokenizer cannot be stored: {error.strerror or error}."
        ) from error
    finally:
        if incoming is not None:
            await asyncio.to_thread(incoming.drop)
        await channel.close()

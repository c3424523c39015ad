"""Fetches the files of tokenizers from workers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from weakref import WeakValueDictionary

import grpc

from services.common.base.errors import ErrorKind, SluiceError, invalid, unavailable
from services.common.discovery.tokenizer_store import IncomingTokenizer, TokenizerStore
from services.common.discovery.worker_watch import ServedModel
from services.common.rpc.channels import open_channel
from services.common.rpc.errors import from_rpc_error
from services.common.security.identity import WORKER
from sluice.v1 import worker_pb2, worker_pb2_grpc

FETCH_S = 120.0
FETCHES_AT_ONCE = 16
HOLD_ATTEMPTS = 3


class HeldTokenizers:
    """The files of workers' tokenizers, each fetched once and retained while it is held.

    Args:
        store: stores the files.
        credentials: for the channels to workers.
    """

    def __init__(self, store: TokenizerStore, credentials: grpc.ChannelCredentials | None = None) -> None:
        self._store = store
        self._credentials = credentials
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by fingerprint
        self._at_once = asyncio.Semaphore(FETCHES_AT_ONCE)

    async def hold(self, served: ServedModel) -> Path:
        """Returns the files of a worker's tokenizer, fetched if necessary; held until `release`.

        Raises:
            SluiceError: as `fetch_tokenizer`; UNAVAILABLE if others keep removing them.
        """
        digest = served.fingerprint
        lock = self._locks.setdefault(digest, asyncio.Lock())
        for _ in range(HOLD_ATTEMPTS):
            if self._store.hold(digest):
                path = await asyncio.to_thread(self._store.find, digest)
                if path is not None:
                    return path
                self._store.release(digest)
            async with lock, self._at_once:
                if await asyncio.to_thread(self._store.find, digest) is None:
                    await fetch_tokenizer(served.address, digest, self._store, self._credentials, served.callee)
        raise unavailable("The worker's tokenizer is removed as soon as it is stored, because others fill the folder.")

    async def release(self, digest: str, remove: bool = False) -> None:
        """Ends a `hold`; `remove` also deletes the files unless they are held elsewhere."""
        await asyncio.to_thread(self._store.release, digest, remove)


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

"""Follows SubscribeKvEvents: resumes where it was, and says so when that cannot be."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from services.worker.engines.vllm_grpc import wire
from services.worker.engines.vllm_grpc.client import Client
from services.worker.kv_events.source import EngineCacheSource

log = logging.getLogger(__name__)

FIRST_RETRY_S, LONGEST_RETRY_S = 0.1, 3.0


class GrpcFeed:
    """One stream that carries the events of all ranks, each with its own numbers.

    A server may resume a stream or refuse to; and it may end one because it lost events itself.

    Args:
        sources: by data-parallel rank.
        on_open: called each time that the server has accepted the subscription.
    """

    def __init__(self, client: Client, sources: Sequence[EngineCacheSource], on_open: Callable[[], None]) -> None:
        self._client = client
        self._sources = sources
        self._on_open = on_open
        self._resumes = True

    async def run(self) -> None:
        """Follows until cancelled."""
        retry_s = FIRST_RETRY_S
        while True:
            heard = await self._follow()
            retry_s = FIRST_RETRY_S if heard else min(2 * retry_s, LONGEST_RETRY_S)
            await asyncio.sleep(retry_s)

    async def _follow(self) -> bool:
        """One stream to its end; True when it carried anything."""
        heard = False
        start = self._next() if self._resumes else 0
        for source in self._sources:
            if source.sequencer.expected == 0:
                source.sequencer.join()
        call = self._client.subscribe(start)
        try:
            await call.initial_metadata()
            self._on_open()
            async for message in call:
                heard = True
                if not message.load.load_only:
                    self._take(message)
        except grpc.aio.AioRpcError as error:
            self._lost(error)
        finally:
            call.cancel()
        return heard

    def _next(self) -> int:
        """One stream has one cursor: with several ranks it starts anew."""
        return self._sources[0].sequencer.expected if len(self._sources) == 1 else 0

    def _take(self, message: Any) -> None:
        rank = message.dp_rank if message.HasField("dp_rank") else 0
        if not 0 <= rank < len(self._sources):
            return
        sequencer = self._sources[rank].sequencer
        if message.HasField("snapshot") and message.snapshot.index == 0:
            sequencer.begin_at(message.sequence_number)
        try:
            batch = wire.read_batch(message)
        except Exception:
            log.warning("a batch of KV events cannot be read", extra={"rank": rank}, exc_info=True)
            sequencer.unreadable(message.sequence_number)
            return
        sequencer.live(message.sequence_number, batch)

    def _lost(self, error: grpc.aio.AioRpcError) -> None:
        code = error.code()
        log.info("the stream of KV events has ended", extra={"code": code.name, "details": error.details()})
        if code is grpc.StatusCode.OUT_OF_RANGE:
            self._resumes = False
        if code in (grpc.StatusCode.OUT_OF_RANGE, grpc.StatusCode.DATA_LOSS):
            for source in self._sources:
                source.sequencer.interrupted()

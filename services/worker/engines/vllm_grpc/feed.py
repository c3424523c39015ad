"""Subscribes to SubscribeKvEvents, and resumes an interrupted stream or reports the gap."""

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

FIRST_RETRY_S = 0.1
MAX_RETRY_S = 3.0
"""Seconds between two attempts to read the KV events of vLLM's server."""


class GrpcFeed:
    """Reads one stream with the events of all ranks, each with its own sequence numbers.

    The server may reject a resumption, and may end a stream after losing events.

    Args:
        sources: Event sources by data-parallel rank.
        on_open: Called each time the server accepts the subscription.
    """

    def __init__(self, client: Client, sources: Sequence[EngineCacheSource], on_open: Callable[[], None]) -> None:
        self._client = client
        self._sources = sources
        self._on_open = on_open
        self._can_resume = True

    async def run(self) -> None:
        """Reads until cancelled; reconnects with exponential backoff."""
        retry_s = FIRST_RETRY_S
        while True:
            received = await self._read_stream()
            retry_s = FIRST_RETRY_S if received else min(2 * retry_s, MAX_RETRY_S)
            await asyncio.sleep(retry_s)

    async def _read_stream(self) -> bool:
        """Reads one stream until it ends; returns whether it carried any message."""
        received = False
        start = self._next_sequence_number() if self._can_resume else 0
        for source in self._sources:
            if source.sequencer.expected == 0:
                source.sequencer.join()
        call = self._client.subscribe(start)
        try:
            await call.initial_metadata()
            self._on_open()
            async for message in call:
                received = True
                if not message.load.load_only:
                    self._take(message)
        except grpc.aio.AioRpcError as error:
            self._on_disconnect(error)
        finally:
            call.cancel()
        return received

    def _next_sequence_number(self) -> int:
        """Returns where to resume; 0 with several ranks, because a stream has a single cursor."""
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
            log.warning("received an invalid batch of KV events", extra={"rank": rank}, exc_info=True)
            sequencer.unreadable(message.sequence_number)
            return
        sequencer.live(message.sequence_number, batch)

    def _on_disconnect(self, error: grpc.aio.AioRpcError) -> None:
        code = error.code()
        log.info("the KV event stream ended", extra={"code": code.name, "details": error.details()})
        if code is grpc.StatusCode.OUT_OF_RANGE:
            self._can_resume = False
        if code in (grpc.StatusCode.OUT_OF_RANGE, grpc.StatusCode.DATA_LOSS):
            for source in self._sources:
                source.sequencer.interrupted()

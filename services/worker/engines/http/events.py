"""Subscribes to the KV events of a remote engine, and proves that they describe prompts as Sluice hashes them."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from array import array
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from services.common.errors import ErrorKind, SluiceError
from services.common.hashing import block_hashes
from services.common.net.addresses import host_port, is_loopback, join
from services.common.tasks import TaskOwner
from services.worker.engines.http.dialect import Publisher
from services.worker.engines.http.options import NO_EVENTS, HttpOptions
from services.worker.engines.inprocess.events import KvEventFeeds
from services.worker.kv_events.source import EngineCacheSource
from services.worker.kv_events.zmq_feed import endpoint_of_rank

log = logging.getLogger(__name__)

PROBE_S = 120.0
PROOF_WAITS_S = (0.5, 1.0, 2.0, 4.0, 8.0)
PROOF_BLOCKS = 2
CHECK_INTERVAL_S = 0.02
_WILDCARDS = frozenset({"*", "0.0.0.0", "::", "[::]"})

Probe: TypeAlias = "Callable[[int, array[int]], Awaitable[None]]"
"""Computes a prompt on one data-parallel rank."""


class RemoteEvents(KvEventFeeds):
    """Owns the subscriptions to one engine's publishers.

    Args:
        on_failure: called when a subscription fails after the proof.
    """

    def __init__(self, on_failure: Callable[[str, BaseException], None], *, counts_copies: bool) -> None:
        super().__init__(counts_copies=counts_copies)
        self._on_failure = on_failure
        self._tasks = TaskOwner(self._feed_failed)
        self._proven = False
        self._failure: BaseException | None = None

    async def follow(self, publishers: Sequence[Publisher], block_size: int, probe: Probe, vocab_size: int) -> str:
        """Subscribes and proves the events of every rank.

        Each rank computes a prompt of random tokens; the events that follow must contain the prompt's blocks. This
        proves the endpoint, the block size, and that the tokens in the events are those of the prompt.

        Args:
            vocab_size: tokens of the prompt are below it.

        Returns:
            Why the events cannot be used, as a sentence; empty: they are followed.

        Raises:
            SluiceError: INVALID_ARGUMENT when the engine's block size is incompatible with `block_size`.
        """
        try:
            for publisher in publishers:
                self.subscribe(
                    publisher.rank, block_size, publisher.endpoint, publisher.replay, self._tasks, topic=publisher.topic
                )
            for index, publisher in enumerate(publishers):
                if problem := await self._prove(index, publisher, block_size, probe, vocab_size):
                    await self.stop()
                    return problem
        except BaseException:
            await self.stop()
            raise
        self._proven = True
        return ""

    async def stop(self) -> None:
        """Ends all subscriptions."""
        await self._tasks.close()
        self.close()
        self.sources = ()

    async def _prove(self, index: int, publisher: Publisher, block_size: int, probe: Probe, vocab_size: int) -> str:
        """Returns why the events of one rank cannot be used; tries again, as the connection may still be opening."""
        source = self.sources[index]
        for wait_s in PROOF_WAITS_S:
            prompt = array("I", random.choices(range(vocab_size), k=PROOF_BLOCKS * block_size + 1))
            try:
                async with asyncio.timeout(PROBE_S):
                    await probe(publisher.rank, prompt)
            except TimeoutError:
                return f"The engine did not compute a prompt within {PROBE_S:g} s, so its KV events cannot be proven."
            except SluiceError as error:
                if error.kind is ErrorKind.ENGINE_SHUTDOWN:
                    raise
                return f"The engine did not compute a prompt, so its KV events cannot be proven: {error.message}"
            if await self._arrived(source, block_hashes(prompt, block_size), wait_s):
                return ""
        if source.sequencer.expected:
            return (
                f"The KV events from {publisher.endpoint} do not contain the tokens of a prompt that the engine "
                "computed; check that they are this engine's."
            )
        return (
            f"No KV events arrived from {publisher.endpoint} after a prompt; check the endpoint, and that the engine "
            "caches prefixes."
        )

    async def _arrived(self, source: EngineCacheSource, hashes: Sequence[int], wait_s: float) -> bool:
        """Waits for blocks; raises the error with which the subscription failed."""
        deadline = time.monotonic() + wait_s
        while not source.translator.holds(hashes):
            if self._failure is not None:
                raise self._failure
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(CHECK_INTERVAL_S)
        return True

    def _feed_failed(self, name: str, error: BaseException) -> None:
        self._failure = error
        if self._proven:
            self._on_failure(name, error)


def chosen_publishers(
    options: HttpOptions, reported: Sequence[Publisher], ranks: int
) -> tuple[Sequence[Publisher], str]:
    """Returns the publishers to subscribe to, and why there are none, as a sentence."""
    if options.kv_events == NO_EVENTS:
        return (), "The option kv_events is off."
    if options.kv_events:
        topic = reported[0].topic if reported else ""
        return [
            Publisher(rank, endpoint_of_rank(options.kv_events, rank), endpoint_of_rank(options.kv_replay, rank), topic)
            for rank in range(ranks)
        ], ""
    if not reported:
        return (), "The server reports no KV events; start it with --kv-events-config, or set the option kv_events."
    host, _ = host_port(options.address) or ("", 0)
    reachable = []
    for publisher in reported:
        endpoint, replay = _reachable(publisher.endpoint, host), _reachable(publisher.replay, host)
        if not endpoint:
            return (), f"The server's endpoint {publisher.endpoint} cannot be reached; set the option kv_events."
        reachable.append(Publisher(publisher.rank, endpoint, replay, publisher.topic))
    return reachable, ""


def _reachable(endpoint: str, host: str) -> str:
    """Returns an endpoint as seen from here, given the server's host; empty if it cannot be reached."""
    if endpoint.startswith("ipc://"):
        return endpoint if is_loopback(host) else ""
    published, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if not endpoint.startswith("tcp://") or not port.isdecimal() or not int(port):
        return ""
    if published in _WILDCARDS:
        return f"tcp://{join(host, int(port))}"
    return endpoint

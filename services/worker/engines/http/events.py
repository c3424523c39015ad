"""Subscribes to the KV events of a remote engine, and proves that they describe prompts as Sluice hashes them."""

from __future__ import annotations

from array import array
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeAlias

from services.common.base.errors import quoted
from services.common.base.tasks import TaskOwner
from services.common.net.addresses import host_port, is_loopback, join
from services.worker.engines.http.dialect import Publisher
from services.worker.engines.http.options import NO_EVENTS, HttpOptions, endpoint_problem
from services.worker.engines.inprocess.event_proof import EventProof
from services.worker.engines.inprocess.events import KvEventFeeds
from services.worker.kv_events.zmq_feed import endpoint_of_rank

_WILDCARDS = frozenset({"*", "0.0.0.0", "::"})
MIN_PORT = 1_024
"""Port that a server may name for its events, as lower ones are the system's; a lower one is not connected to."""

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

        Args:
            vocab_size: as of `EventProof`.

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
                proof = EventProof(self.sources[index], publisher.endpoint, block_size, vocab_size)
                if problem := await proof.run(partial(probe, publisher.rank), lambda: self._failure):
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
            return (), (
                f"The server's endpoint {quoted(publisher.endpoint)} cannot be reached at the server's own host "
                f"{host} from port {MIN_PORT} on; set the option kv_events."
            )
        if publisher.replay and not replay:
            return (), (
                f"The server's replay endpoint {quoted(publisher.replay)} cannot be reached at the server's own host "
                f"{host} from port {MIN_PORT} on; set the options kv_events and kv_replay."
            )
        reachable.append(Publisher(publisher.rank, endpoint, replay, publisher.topic))
    return reachable, ""


def _reachable(endpoint: str, host: str) -> str:
    """Returns an endpoint that a server reported as seen from here; empty if it is not at the server's own host.

    A server that could name any host and port would make the worker connect to services that only the worker reaches.
    """
    if endpoint.startswith("ipc://"):
        return endpoint if is_loopback(host) and endpoint_problem(endpoint) == "" else ""
    parsed = host_port(endpoint.removeprefix("tcp://")) if endpoint.startswith("tcp://") else None
    if parsed is None or parsed[1] < MIN_PORT:
        return ""
    published, port = parsed
    own = published.lower() == host.lower() or (is_loopback(published) and is_loopback(host))
    return f"tcp://{join(host, port)}" if own or published in _WILDCARDS else ""

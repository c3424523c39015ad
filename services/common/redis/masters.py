"""Finds the masters of a Redis of any topology, by questions to several servers at once.

Each server has its own short timeout, so those that are dead or frozen delay an answer but do not prevent it. Of
answers that differ, the newest by the servers' own epochs counts: a server that was cut off may answer with the past,
and while a fail-over ends, only one sentinel may know of it.
"""

from __future__ import annotations

import asyncio
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.exceptions import ConnectionError as ConnectionLost

from services.common.base.tasks import end_all
from services.common.redis.connect import Address, open_probe
from services.common.redis.failures import FAILURES
from services.common.redis.target import RedisTarget, Topology

MAX_ASKED = 16
"""Servers that one search of a Redis master asks; others are not asked."""
MAX_PROBE_S = 1.0
"""Seconds that a search of a Redis master waits for each server; then the server has no say."""
MINORITY_S = 0.2
"""Seconds that it waits for the rest once most have answered: one of them may be the only one that knows the newest."""

T = TypeVar("T")


class Masters(ABC):
    """The masters of one Redis, as last found."""

    @abstractmethod
    def address(self, key: str) -> Address | None:
        """Returns the master that serves a key; None if none is known."""

    @property
    @abstractmethod
    def addresses(self) -> Iterable[Address]:
        """Every known master."""

    @abstractmethod
    async def find(self) -> None:
        """Asks the servers for the current masters; raises one of FAILURES, and keeps the old ones, if none answers."""

    @abstractmethod
    def redirect(self, slot: int, address: Address) -> None:
        """Takes the master of a slot from a MOVED reply."""


def masters_of(target: RedisTarget, timeout_s: float) -> Masters:
    """Returns the masters of a target; `timeout_s` is for each question to a server."""
    probe_s = min(timeout_s, MAX_PROBE_S)
    if target.topology is Topology.SENTINEL:
        return SentinelMasters(target, probe_s)
    if target.topology is Topology.CLUSTER:
        return ClusterMasters(target, probe_s)
    return FixedMaster(target)


class FixedMaster(Masters):
    """One server, whose name may resolve to another one after a fail-over."""

    def __init__(self, target: RedisTarget) -> None:
        self._address = (target.path, 0) if target.path else target.nodes[0]

    def address(self, key: str) -> Address:
        return self._address

    @property
    def addresses(self) -> Iterable[Address]:
        return (self._address,)

    async def find(self) -> None:
        """Does nothing: the name is resolved at every connection."""

    def redirect(self, slot: int, address: Address) -> None:
        """Does nothing: the URL names one server of a cluster, and not the cluster."""


class _Named(NamedTuple):
    """What a sentinel answers. `epoch` counts fail-overs."""

    epoch: int
    master: Address
    peers: tuple[Address, ...]


class SentinelMasters(Masters):
    """The master that the sentinels name; sentinels that they know of are asked as well."""

    def __init__(self, target: RedisTarget, probe_s: float) -> None:
        self._target = target
        self._probe_s = probe_s
        self._peers: tuple[Address, ...] = ()
        self._master: Address | None = None

    def address(self, key: str) -> Address | None:
        return self._master

    @property
    def addresses(self) -> Iterable[Address]:
        return () if self._master is None else (self._master,)

    def redirect(self, slot: int, address: Address) -> None:
        """Does nothing: there are no slots."""

    async def find(self) -> None:
        answers = await _ask_most(_sampled(self._target.nodes, self._peers), self._ask)
        self._peers = tuple({peer for answer in answers for peer in answer.peers} - set(self._target.nodes))
        answers.sort(key=lambda answer: answer.epoch, reverse=True)
        candidates = list(dict.fromkeys(answer.master for answer in answers))
        roles = await asyncio.gather(*(self._is_master(candidate) for candidate in candidates))
        masters = [candidate for candidate, is_master in zip(candidates, roles, strict=True) if is_master]
        if not masters:
            raise ConnectionLost("the server that the sentinels name does not answer as a master")
        self._master = masters[0]

    async def _ask(self, sentinel: Address) -> _Named:
        service = self._target.service
        async with open_probe(self._target, sentinel, self._probe_s, sentinel=True) as client:
            state = _fields(await client.execute_command("SENTINEL", "MASTER", service))
            # While a fail-over ends, this is the new master already.
            host, port = await client.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", service)
            others = [_fields(other) for other in await client.execute_command("SENTINEL", "SENTINELS", service)]
        peers = tuple((other["ip"], int(other["port"])) for other in others if other.get("ip"))
        return _Named(int(state.get("config-epoch", 0)), (_text(host), int(port)), peers[:MAX_ASKED])

    async def _is_master(self, address: Address) -> bool:
        try:
            async with asyncio.timeout(self._probe_s), open_probe(self._target, address, self._probe_s) as client:
                return _text((await client.execute_command("ROLE"))[0]) == "master"
        except FAILURES:
            return False


class _Map(NamedTuple):
    """A node's view of its cluster: the master of every slot, and all nodes. `epoch` grows with every election."""

    serves: bool
    epoch: int
    slots: list[Address | None]
    nodes: tuple[Address, ...]


class ClusterMasters(Masters):
    """The masters of a cluster's hash slots; all nodes of the last map are asked, and those of the URL."""

    def __init__(self, target: RedisTarget, probe_s: float) -> None:
        self._target = target
        self._probe_s = probe_s
        self._nodes: tuple[Address, ...] = ()
        self._slots: list[Address | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        self._addresses: set[Address] = set()

    def address(self, key: str) -> Address | None:
        return self._slots[key_slot(key.encode())]

    @property
    def addresses(self) -> Iterable[Address]:
        return self._addresses

    def redirect(self, slot: int, address: Address) -> None:
        self._slots[slot] = address
        self._addresses.add(address)

    async def find(self) -> None:
        maps = await _ask_most(_sampled(self._target.nodes, self._nodes), self._ask)
        newest = max(maps, key=lambda found: (found.serves, found.epoch))
        self._slots, self._nodes = newest.slots, newest.nodes
        self._addresses = {address for address in newest.slots if address is not None}
        if not self._addresses:
            raise ConnectionLost("the cluster has no master with hash slots")

    async def _ask(self, node: Address) -> _Map:
        async with open_probe(self._target, node, self._probe_s) as client:
            info = _info(await client.execute_command("CLUSTER", "INFO"))
            ranges = await client.execute_command("CLUSTER", "SLOTS")
        slots: list[Address | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        nodes: dict[Address, None] = {}
        for first, last, *servers in ranges:
            # A node that does not know its own address leaves it out: it is the one that was asked.
            addresses = [(_text(host) or node[0], int(port)) for host, port, *_ in servers]
            slots[first : last + 1] = [addresses[0]] * (last + 1 - first)
            nodes |= dict.fromkeys(addresses)
        return _Map(info.get("cluster_state") == "ok", int(info.get("cluster_current_epoch", 0)), slots, tuple(nodes))


def _sampled(configured: Sequence[Address], learned: Sequence[Address]) -> list[Address]:
    """Returns the servers to ask: up to half of MAX_ASKED are those of the URL, the rest are those learned."""
    half = MAX_ASKED // 2
    first = random.sample(configured, min(half, len(configured)))
    others = [address for address in learned if address not in first]
    return first + random.sample(others, min(MAX_ASKED - len(first), len(others)))


async def _ask_most(servers: Sequence[Address], ask: Callable[[Address], Awaitable[T]]) -> list[T]:
    """Returns the answers once all servers have answered or failed, or `MINORITY_S` after more than half have answered.

    Raises:
        ConnectionError: none has answered.
    """
    pending: set[asyncio.Future[T]] = {asyncio.ensure_future(ask(server)) for server in servers}
    answers: list[T] = []
    reason: BaseException | None = None
    until: float | None = None
    try:
        while pending:
            timeout_s = None if until is None else max(0.0, until - time.monotonic())
            done, pending = await asyncio.wait(pending, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                break
            for task in done:
                error = task.exception()
                if error is None:
                    answers.append(task.result())
                elif isinstance(error, (*FAILURES, ValueError, KeyError, IndexError, TypeError)):
                    reason = error  # unreachable, or no answer of a Redis
                else:
                    raise error
            if until is None and len(answers) > len(servers) // 2:
                until = time.monotonic() + MINORITY_S
    finally:
        await end_all(list(pending))
    if not answers:
        raise ConnectionLost(f"none of {len(servers)} servers says where the master is: {reason}") from reason
    return answers


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value or "")


def _fields(flat: Sequence[Any] | dict[Any, Any]) -> dict[str, str]:
    pairs = flat.items() if isinstance(flat, dict) else zip(flat[::2], flat[1::2], strict=True)
    return {_text(name): _text(value) for name, value in pairs}


def _info(reply: Any) -> dict[str, str]:
    if isinstance(reply, dict):
        return _fields(reply)
    return dict(line.split(":", 1) for line in _text(reply).splitlines() if ":" in line)

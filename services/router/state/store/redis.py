"""Redis store: state shared by all router replicas, which survives their restarts.

Every change is one script, which makes it atomic, costs one round trip and uses the clock of Redis. docs/redis.md lists
the keys; all keys of a model share one hash tag.
"""

from __future__ import annotations

import asyncio
import logging
import struct
import time
import uuid
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from functools import lru_cache
from operator import attrgetter
from random import Random
from typing import Any

from services.common.redis.servers import RedisServers
from services.common.redis.target import Credentials, parse
from services.router.state.kv_index.events import (
    HASH_BYTES,
    BlockOp,
    BlocksChanged,
    BlocksReplaced,
    Change,
    EventBatch,
    Snapshot,
    WorkerDown,
    WorkerDraining,
    WorkerUp,
    decode_ops,
    encode_ops,
)
from services.router.state.kv_index.rank_cache import ApplyResult
from services.router.state.reservations.cost import MILLI, Limits, Load, Offer
from services.router.state.reservations.table import (
    AllBusy,
    Owner,
    QueueOrder,
    Reservation,
    ReservationParams,
    ReservedRank,
)
from services.router.state.store.base import (
    KNOWN_FOR_S,
    QUEUE_LEASE_MS,
    Applied,
    FellBehind,
    Lease,
    Position,
    Pulse,
    Store,
    StoredModel,
)
from services.router.state.store.memory import older_epoch
from services.router.state.store.redis_client import RedisClient
from services.router.state.workers.claims import Claim, Hold, Taken
from services.router.state.workers.worker import UnreadableWorker, Worker, WorkerRank

log = logging.getLogger(__name__)

FEED_LIMIT = 10_000
MAX_PASSED_ON = 32 << 10
"""Bytes of a batch of operations in the feed; of a larger one followers read the rank from the store."""
READ_AT_ONCE = 512
QUIET_MS = 500
FEED_PACE_S = 0.01
"""Pause between two reads of a busy feed: each costs every router a round trip, whatever it returns."""
SWEEP_AT_ONCE = 500
CLOCK_ERROR_MS = 1_000
"""How far the clock of Redis may be from where a router expects it, besides the time of a round trip."""
MAX_FOLLOWED = 1_000
"""Models whose changes a router follows at the same time; further ones wait for their turn."""
NEVER = 1e15  # a load that is never reached; stands for infinity, which scripts do not accept
NO_LIMITS = Limits(NEVER, NEVER, NEVER)
NO_OWNER = Owner("", 0)
MAX_IDS = 5_000
"""Ids in one call of a script that marks or frees requests."""


_LIMITS, _GROUP = attrgetter("limits"), attrgetter("group")
_RESULTS = {result.value.encode(): result for result in ApplyResult}


@lru_cache(maxsize=1_024)  # called for every script
def _hash_tag(prefix: str, model: str) -> str:
    # Unescaped braces would end the hash tag.
    return f"{{{prefix}:{model.replace('%', '%25').replace('{', '%7B').replace('}', '%7D')}}}"


def _epoch(epoch: int) -> str:
    return f"{epoch:020d}"  # u64 exceeds Lua's numbers; padded strings compare in the same order


class RedisStore(Store):
    """Implements Store in Redis.

    Args:
        url: of the server, see RouterSettings.redis_url.
        prefix: of all keys.
        timeout_s: for connecting and for every round trip.
        feed_limit: approximate maximum of changes in the feed of a model.
        credentials: passwords and TLS files that the URL does not contain.
    """

    shortlist = 32
    may_lose_acknowledged = True

    def __init__(
        self,
        url: str,
        prefix: str = "sluice",
        timeout_s: float = 1.0,
        random: Random | None = None,
        feed_limit: int = FEED_LIMIT,
        credentials: Credentials | None = None,
    ) -> None:
        self._prefix = prefix
        self._replica = uuid.uuid4().hex
        self._random = random or Random()
        self._feed_limit = feed_limit
        self._model_registered_at: dict[str, float] = {}
        self._swept_at: dict[str, tuple[int, int]] = {}  # by model: Redis' Unix ms, and ms of this process
        self._clock_error_ms = int(1000 * timeout_s) + CLOCK_ERROR_MS
        self._servers = RedisServers(parse(url, credentials), timeout_s)
        self._client = RedisClient(self._servers, timeout_s)
        self._bulk = RedisClient(self._servers, timeout_s)  # for complete caches, so that they do not delay decisions
        # One blocking read per model.
        self._reader = RedisClient(self._servers, timeout_s + QUIET_MS / 1000, MAX_FOLLOWED)

    def _tag(self, model: str) -> str:
        return _hash_tag(self._prefix, model)

    @property
    def _root(self) -> str:
        return f"{{{self._prefix}}}"

    async def ping(self) -> None:
        await self.models()

    async def close(self) -> None:
        await self._servers.close()
        await self._client.close()
        await self._bulk.close()
        await self._reader.close()

    async def models(self) -> list[str]:
        return [name.decode() for name in await self._client.run("models", self._root, KNOWN_FOR_S)]

    async def claim(self, claim: Claim, session: str, lease_ms: int) -> None:
        reply = await self._client.run(
            "claim",
            self._root,
            claim.worker_id,
            claim.caller,
            claim.lease_digest,
            _epoch(claim.epoch),
            claim.proof,
            session,
            lease_ms,
        )
        if reply:
            left_ms, caller, proof = reply
            holder = Claim(claim.worker_id, 0, caller.decode(), proof=proof.decode(errors="replace"))
            raise Taken(left_ms, holder)

    async def renew_claim(self, worker_id: str, session: str, lease_ms: int) -> Hold:
        return Hold((await self._client.run("renew_claim", self._root, worker_id, session, lease_ms)).decode())

    async def release_claim(self, worker_id: str, session: str) -> None:
        await self._client.run("release_claim", self._root, worker_id, session)

    async def register(self, worker: Worker, session: str, lease_ms: int) -> dict[int, int]:
        reply = await self._client.run(
            "register",
            self._tag(worker.model),
            worker.worker_id,
            _epoch(worker.epoch),
            session,
            worker.ranks,
            worker.to_json(),
            lease_ms,
            self._feed_limit,
            worker.holder,
        )
        if not reply[0]:
            raise older_epoch(worker)
        self._model_registered_at.pop(worker.model, None)
        await self._register_model(worker.model)
        return dict(zip(reply[1::2], reply[2::2], strict=True))

    async def _register_model(self, model: str) -> None:
        """Renews a model's entry, which must exist for as long as it has workers."""
        now = time.monotonic()
        if now - self._model_registered_at.get(model, -KNOWN_FOR_S) > KNOWN_FOR_S / 10:
            await self._client.run("register_model", self._root, model, KNOWN_FOR_S)
            self._model_registered_at[model] = now

    async def renew(self, model: str, worker_id: str, session: str, lease_ms: int, report: bytes | None) -> Lease:
        await self._register_model(model)
        given = "0" if report is None else "1"
        reply = await self._client.run("renew", self._tag(model), worker_id, session, lease_ms, given, report or b"")
        return Lease(reply.decode())

    async def leave(self, model: str, worker_id: str, session: str) -> bool:
        return bool(await self._client.run("leave", self._tag(model), worker_id, session, self._feed_limit))

    async def remove(
        self, model: str, worker_id: str, session: str, keep_reservations: bool = False, awaited_ms: int = 0
    ) -> bool:
        keep = "1" if keep_reservations else "0"
        return bool(
            await self._client.run("remove", self._tag(model), worker_id, session, keep, self._feed_limit, awaited_ms)
        )

    async def apply(
        self, model: str, worker_id: str, epoch: int, capacity: int, batches: Sequence[EventBatch]
    ) -> list[Applied]:
        calls = [
            (
                worker_id,
                _epoch(epoch),
                batch.rank,
                batch.sequence,
                capacity,
                encode_ops(batch.ops),
                self._feed_limit,
                MAX_PASSED_ON,
            )
            for batch in batches
        ]
        return list(map(_applied, await self._client.run_many("apply", self._tag(model), calls)))

    async def replace(self, model: str, worker_id: str, epoch: int, capacity: int, snapshot: Snapshot) -> Applied:
        reply = await self._bulk.run(
            "replace",
            self._tag(model),
            worker_id,
            _epoch(epoch),
            snapshot.rank,
            snapshot.sequence,
            capacity,
            encode_ops(snapshot.ops),
            self._feed_limit,
        )
        return _applied(reply)

    async def load(self, model: str) -> StoredModel:
        number, entry, workers, generation = await self._client.run("load", self._tag(model), uuid.uuid4().hex)
        return StoredModel(
            Position(number, entry),
            [worker for record in workers if (worker := _worker(*record)) is not None],
            generation,
        )

    async def blocks(self, model: str, slot: WorkerRank) -> tuple[int, Snapshot] | None:
        reply = await self._bulk.run("blocks", self._tag(model), slot.worker_id, slot.rank)
        if reply is None:
            return None
        epoch, sequence, device, host, disk = reply
        return int(epoch), Snapshot(slot.rank, sequence, (device, host, disk))

    async def follow(self, model: str, position: Position) -> AsyncIterator[list[Change]]:
        key = f"{self._tag(model)}:changes"
        number, entry = position
        while True:
            reply = await self._reader.command(
                key, "XREAD", "COUNT", READ_AT_ONCE, "BLOCK", QUIET_MS, "STREAMS", key, entry
            )
            changes: list[Change] = []
            entries = reply[0][1] if reply else ()
            for entry_id, flat in entries:
                entry, number, fields = entry_id, number + 1, _pairs(flat)
                if int(fields[b"n"]) != number:
                    raise FellBehind
                if (change := _change(fields)) is not None:
                    changes.append(change)
            yield changes
            if 0 < len(entries) < READ_AT_ONCE:
                await asyncio.sleep(FEED_PACE_S)

    async def select(self, model: str, offers: Sequence[Offer], terms: ReservationParams) -> ReservedRank:
        args: list[str | bytes | int | float] = [
            terms.request_id,
            terms.ttl_ms,
            terms.prefill_load_scale,
            terms.temperature,
            self._random.random(),
            len(offers),
            "*" if terms.allowed is None else "",
            terms.output,
            *(terms.owner or NO_OWNER),
            "1" if (limited := any(map(_LIMITS, offers))) else "",
            "1" if (grouped := any(map(_GROUP, offers))) else "",
            self._replica,
            *terms.order,
        ]
        numbers: list[float] = []
        fields: list[str] = []
        for offer in offers:
            fields.append(offer.slot.field)
            numbers += (offer.uncached, offer.added, offer.held, offer.book_prefill, offer.book_decode)
            if limited:
                numbers += [min(limit, NEVER) for limit in offer.limits or NO_LIMITS]
            if grouped:
                numbers.append(offer.group)
        args.append(struct.pack(f"<{len(numbers)}d", *numbers))
        args += fields
        args += terms.allowed or ()
        field, expires, repeated = await self._client.run("select", self._tag(model), *args)
        if not field:
            raise AllBusy
        return ReservedRank(WorkerRank.of_field(field.decode()), expires, bool(repeated))

    async def book(self, model: str, reservation: Reservation) -> None:
        slot = reservation.slot
        await self._client.run(
            "book",
            self._tag(model),
            reservation.request_id,
            slot.worker_id,
            slot.field,
            reservation.prefill,
            reservation.decode,
            reservation.expires_unix_ms,
            reservation.output,
            *(reservation.owner or NO_OWNER),
        )

    def mark_prefill_complete(self, model: str, request_ids: Sequence[str]) -> Coroutine[Any, Any, list[str]]:
        return self._finish("mark", model, request_ids)

    def free(self, model: str, request_ids: Sequence[str]) -> Coroutine[Any, Any, list[str]]:
        return self._finish("free", model, request_ids)

    async def progress(self, model: str, outputs: Mapping[str, int]) -> list[str]:
        unknown: list[str] = []
        pairs = list(outputs.items())
        for start in range(0, len(pairs), MAX_IDS // 2):
            flat = [part for pair in pairs[start : start + MAX_IDS // 2] for part in pair]
            unknown += [each.decode() for each in await self._client.run("progress", self._tag(model), *flat)]
        return unknown

    async def renew_owners(self, model: str, owners: Sequence[str], lease_ms: int) -> None:
        for start in range(0, len(owners), MAX_IDS):
            await self._client.run("renew_owners", self._tag(model), lease_ms, *owners[start : start + MAX_IDS])

    async def announce_queue(self, model: str, order: QueueOrder | None) -> int:
        numbers = order or ("", "", "")
        return int(await self._client.run("announce_queue", self._tag(model), self._replica, *numbers, QUEUE_LEASE_MS))

    async def session(self, model: str, session_id: str) -> WorkerRank | None:
        field = await self._client.run("session", self._tag(model), session_id)
        return None if field is None else WorkerRank.of_field(field.decode())

    async def remember_session(self, model: str, session_id: str, slot: WorkerRank, ttl_ms: int) -> None:
        await self._client.run("set_session", self._tag(model), session_id, slot.field, ttl_ms)

    async def pin(self, model: str, record: str, ttl_ms: int, replace: bool) -> str:
        held = await self._client.run("pin", self._tag(model), record, ttl_ms, int(replace))
        return "" if held is None else str(held.decode())

    async def _finish(self, script: str, model: str, request_ids: Sequence[str]) -> list[str]:
        unknown: list[str] = []
        for start in range(0, len(request_ids), MAX_IDS):
            some = request_ids[start : start + MAX_IDS]
            unknown += [each.decode() for each in await self._client.run(script, self._tag(model), *some)]
        return unknown

    async def pulse(self, model: str) -> Pulse:
        prefill, decode, requests, reports = await self._client.run("pulse", self._tag(model))
        prefills, decodes, counts = _pairs(prefill), _pairs(decode), _pairs(requests)
        loads = {
            WorkerRank.of_field(field.decode()): Load(
                int(prefills.get(field, 0)) / MILLI, int(decodes.get(field, 0)) / MILLI, int(count)
            )
            for field, count in counts.items()
        }
        return Pulse(loads, {worker_id.decode(): report for worker_id, report in _pairs(reports).items()})

    async def sweep(self, model: str, lease_ms: int) -> int:
        sent_at = time.monotonic_ns() // 1_000_000
        last = self._swept_at.get(model)
        expected = "" if last is None else last[0] + sent_at - last[1]
        removed, now, moved = await self._client.run(
            "sweep", self._tag(model), SWEEP_AT_ONCE, self._feed_limit, expected, self._clock_error_ms, lease_ms
        )
        self._swept_at[model] = now, sent_at
        if moved:
            log.warning("the clock of Redis has moved; all leases begin anew", extra={"model": model, "ms": moved})
        return int(removed)

    async def correct(self, model: str, slot: WorkerRank, most: int, age_ms: int, computed: bool) -> tuple[int, int]:
        ended, found = await self._client.run(
            "correct", self._tag(model), slot.worker_id, slot.field, most, age_ms, int(computed)
        )
        return ended, found

    async def sweep_owners(self, model: str) -> int:
        return int(await self._client.run("sweep_owners", self._tag(model), SWEEP_AT_ONCE))


def _applied(reply: tuple[bytes, int]) -> Applied:
    return Applied(_RESULTS[reply[0]], reply[1])


def _pairs(flat: list[bytes]) -> dict[bytes, bytes]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _worker(worker_id: bytes, epoch: bytes, card: bytes, draining: bytes | None) -> Worker | None:
    """Returns a worker from its record; None if that cannot be parsed, which must not affect other workers."""
    try:
        return Worker.from_json(card, draining=draining == b"1")
    except UnreadableWorker as error:
        _log_worker_skipped(worker_id, epoch, str(error))
        return None


def _change(fields: dict[bytes, bytes]) -> Change | None:
    """Returns a change from its feed entry; None if that cannot be parsed, such as a kind added by a newer router.

    Blocks missed this way cause a sequence gap at the next batch, after which the rank is read again.
    """
    try:
        return _parse_change(fields)
    except UnreadableWorker as error:
        _log_worker_skipped(fields[b"w"], fields[b"e"], str(error))
    except (ValueError, KeyError) as error:
        _log_change_skipped(fields.get(b"k", b""), f"{type(error).__name__}: {error}")
    return None


# Caching logs each message once: models are loaded repeatedly, and a feed may contain many equal entries.
@lru_cache(maxsize=1_024)
def _log_worker_skipped(worker_id: bytes, epoch: bytes, reason: str) -> None:
    extra = {"worker": worker_id.decode(errors="replace"), "epoch": epoch.decode(errors="replace")}
    log.warning("skipping a worker: its record cannot be parsed: %s", reason, extra=extra)


@lru_cache(maxsize=1_024)
def _log_change_skipped(kind: bytes, reason: str) -> None:
    log.warning("skipping changes that cannot be parsed: %s", reason, extra={"kind": kind.decode(errors="replace")})


def _parse_change(fields: dict[bytes, bytes]) -> Change:
    kind, worker_id, epoch = fields[b"k"], fields[b"w"].decode(), int(fields[b"e"])
    if kind == b"up":
        return WorkerUp(Worker.from_json(fields[b"card"]))
    if kind == b"draining":
        return WorkerDraining(worker_id, epoch)
    if kind == b"down":
        return WorkerDown(worker_id, epoch)
    if kind not in (b"blocks", b"replaced"):
        raise ValueError("unknown kind of change")
    slot, sequence = WorkerRank(worker_id, int(fields[b"r"])), int(fields[b"s"])
    if kind == b"replaced":
        return BlocksReplaced(slot, epoch, sequence)
    return BlocksChanged(slot, epoch, EventBatch(slot.rank, sequence, _ops(fields[b"o"])))


def _ops(blob: bytes) -> tuple[BlockOp, ...]:
    try:
        ops = decode_ops(blob)
    except struct.error:
        raise ValueError("the operations are truncated") from None
    if ops and len(ops[-1].hashes) % HASH_BYTES:
        raise ValueError("the operations are truncated")
    return ops

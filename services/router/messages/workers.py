"""Messages of workers and about them ↔ the router's own words."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from functools import lru_cache
from hashlib import sha256

from google.protobuf.message import DecodeError

from services.common.discovery.worker_checks import check_worker
from services.common.errors import check_name, invalid, quoted
from services.common.hashing import HASH_SCHEME
from services.common.packing import pack_u64
from services.common.security.identity import ANONYMOUS, Caller
from services.router.kv_index.events import HASH_BYTES, BlockOp, EventBatch, Kind, Tier
from services.router.registration.stream_messages import Leaving, Replies, Report, Said, SnapshotChunk
from services.router.reservations.cost import Load
from services.router.sync.load_reconciler import Reported
from services.router.sync.model_state import ModelState
from services.router.workers.registry import Happening, News
from services.router.workers.worker import Role, Worker, WorkerRank
from sluice.v1 import common_pb2, router_pb2

log = logging.getLogger(__name__)

MOST_RANKS = 1_024
DUMP_AT_ONCE = 65_536  # hashes a message
EPOCH_AHEAD_US = 24 * 3600 * 1_000_000
LEASE_KEY_BYTES = (16, 64)

_TIERS = {
    common_pb2.CACHE_TIER_UNSPECIFIED: Tier.DEVICE,
    common_pb2.CACHE_TIER_DEVICE: Tier.DEVICE,
    common_pb2.CACHE_TIER_HOST: Tier.HOST,
    common_pb2.CACHE_TIER_DISK: Tier.DISK,
}
_TIER_NUMBERS = {
    Tier.DEVICE: common_pb2.CACHE_TIER_DEVICE,
    Tier.HOST: common_pb2.CACHE_TIER_HOST,
    Tier.DISK: common_pb2.CACHE_TIER_DISK,
}
_KINDS = {
    Happening.UP: router_pb2.WorkerChange.KIND_UP,
    Happening.DOWN: router_pb2.WorkerChange.KIND_DOWN,
    Happening.SYNCED: router_pb2.WorkerChange.KIND_SYNCED,
}


def worker_of(registration: router_pb2.Registration, caller: Caller = ANONYMOUS) -> Worker:
    """Returns a worker from its registration.

    Args:
        caller: that sent it.

    Raises:
        SluiceError: INVALID_ARGUMENT for a registration that cannot be.
    """
    card = registration.card
    for name, value in (
        ("worker_id", registration.worker_id),
        ("address", registration.address),
        ("card.model", card.model),
    ):
        if not value:
            raise invalid(f"A registration needs {name}.", param=f"registration.{name}")
    check_worker(registration.worker_id, registration.address, card)
    check_name(registration.engine, "registration.engine")
    check_name(registration.engine_version, "registration.engine_version")
    _check_epoch(registration.epoch)
    key = registration.lease_key
    shortest, longest = LEASE_KEY_BYTES
    if key and not shortest <= len(key) <= longest:
        raise invalid(
            f"A lease key of {len(key)} bytes; {shortest} to {longest} are taken.", param="registration.lease_key"
        )
    ranks = card.data_parallel_size or 1
    if ranks > MOST_RANKS:
        raise invalid(f"{ranks} data-parallel ranks are more than {MOST_RANKS}.", param="card.data_parallel_size")
    scheme = card.hash_scheme or HASH_SCHEME
    if card.block_size and scheme != HASH_SCHEME:
        raise invalid(
            f"Hash scheme {quoted(scheme)} is not known here; use {HASH_SCHEME!r}.",
            param="registration.card.hash_scheme",
            code="unknown_hash_scheme",
        )
    info = router_pb2.WorkerInfo(
        worker_id=registration.worker_id,
        address=registration.address,
        epoch=registration.epoch,
        card=card,
        role=registration.role or common_pb2.WORKER_ROLE_AGGREGATED,
        engine=registration.engine,
        engine_version=registration.engine_version,
    )
    try:
        role = Role(info.role)
    except ValueError:
        raise invalid(f"Role {info.role} is not known.", param="registration.role") from None
    return Worker(
        worker_id=registration.worker_id,
        address=registration.address,
        epoch=registration.epoch,
        model=card.model,
        role=role,
        block_size=card.block_size,
        hash_scheme=scheme,
        total_blocks=card.total_blocks,
        ranks=ranks,
        document=info.SerializeToString(),
        capabilities=tuple(card.capabilities),
        adapters=tuple(card.adapters),
        caller=caller.name,
        lease_digest=sha256(key).hexdigest() if key else "",
    )


def _check_epoch(epoch: int) -> None:
    latest = time.time_ns() // 1_000 + EPOCH_AHEAD_US
    if not 0 < epoch <= latest:
        raise invalid(
            f"Epoch {epoch} is out of range: use the start's Unix microseconds, at most a day ahead of the router's "
            f"clock (now {latest - EPOCH_AHEAD_US}).",
            param="registration.epoch",
            code="epoch_out_of_range",
        )


def worker_info(worker: Worker, report: bytes) -> router_pb2.WorkerInfo:
    """A worker as callers see it; the loads of its ranks are added up."""
    info = router_pb2.WorkerInfo.FromString(worker.document)
    info.draining = worker.draining
    total = info.load
    for load in reported(report):
        total.running_requests += load.running_requests
        total.waiting_requests += load.waiting_requests
        total.used_blocks += load.used_blocks
        total.cached_blocks += load.cached_blocks
        total.prefill_tokens += load.prefill_tokens
        total.step_ms = max(total.step_ms, load.step_ms)
    return info


def reported(report: bytes) -> list[common_pb2.WorkerLoad]:
    """A worker's last heartbeat: loads by rank; none where it cannot be read."""
    try:
        return list(router_pb2.Heartbeat.FromString(report).loads)
    except DecodeError:
        _say_ignored(report)
        return []


@lru_cache(maxsize=256)  # remembering it says it once: a report is read several times a second until the next one comes
def _say_ignored(report: bytes) -> None:
    log.warning("a worker's report that the store keeps cannot be read and is ignored", extra={"bytes": len(report)})


def used_blocks(report: bytes) -> list[int]:
    """KV blocks in use by rank, out of a worker's last heartbeat."""
    return [load.used_blocks for load in reported(report)]


def read_report(report: bytes) -> list[Reported]:
    """What each rank says it has, out of a worker's last heartbeat."""
    return [
        Reported(load.running_requests + load.waiting_requests, bool(load.prefill_tokens or load.waiting_requests))
        for load in reported(report)
    ]


def said(message: router_pb2.AttachRequest, worker: Worker) -> Said:
    """A message of an attached worker; SluiceError(INVALID_ARGUMENT) for nonsense."""
    which = message.WhichOneof("message")
    if which == "events":
        batch = message.events
        return EventBatch(batch.data_parallel_rank, batch.sequence, tuple(map(_op, batch.events)))
    if which == "heartbeat":
        if len(message.heartbeat.loads) > worker.ranks:
            raise invalid("A heartbeat has more loads than the worker has ranks.", param="heartbeat.loads")
        return Report(message.heartbeat.SerializeToString())
    if which == "snapshot":
        chunk = message.snapshot
        return SnapshotChunk(
            chunk.data_parallel_rank, chunk.sequence, _tier(chunk.tier), _whole(chunk.block_hashes), chunk.last
        )
    if which == "leave":
        return Leaving(message.leave.reason)
    raise invalid(
        "Only the first message is a registration." if which == "registration" else "An empty message.", param="message"
    )


def _op(event: router_pb2.KvEvent) -> BlockOp:
    which = event.WhichOneof("event")
    if which == "stored":
        return BlockOp(Kind.STORED, _tier(event.stored.tier), _whole(event.stored.block_hashes))
    if which == "removed":
        return BlockOp(Kind.REMOVED, _tier(event.removed.tier), _whole(event.removed.block_hashes))
    if which == "cleared":
        return BlockOp(Kind.CLEARED, Tier.DEVICE, b"")
    raise invalid("A KV event of unknown kind.", param="events")


def _tier(number: int) -> Tier:
    tier = _TIERS.get(common_pb2.CacheTier.ValueType(number))
    if tier is None:
        raise invalid(f"Cache tier {number} is not known.", param="tier")
    return tier


def _whole(hashes: bytes) -> bytes:
    if len(hashes) % HASH_BYTES:
        raise invalid(f"block_hashes holds {len(hashes)} bytes, not a multiple of 8.", param="block_hashes")
    return hashes


def replies_of(replies: Replies) -> Iterator[router_pb2.AttachResponse]:
    """What an attached worker should hear."""
    for rank, sequence in replies.acks.items():
        yield router_pb2.AttachResponse(ack=router_pb2.EventAck(data_parallel_rank=rank, sequence=sequence))
    for rank, reason in replies.resyncs.items():
        yield router_pb2.AttachResponse(resync=router_pb2.ResyncRequest(data_parallel_rank=rank, reason=reason))


def change_of(news: News, report: bytes) -> router_pb2.WorkerChange:
    """What a watcher hears."""
    worker = None if news.worker is None else worker_info(news.worker, report)
    return router_pb2.WorkerChange(kind=_KINDS[news.happening], worker=worker)


def booked_load(slot: WorkerRank, load: Load, report: bytes) -> router_pb2.BookedLoad:
    """Booked and reported load of a rank."""
    loads = reported(report)
    return router_pb2.BookedLoad(
        worker_id=slot.worker_id,
        data_parallel_rank=slot.rank,
        requests=load.requests,
        prefill_blocks=load.prefill,
        decode_blocks=load.decode,
        reported=loads[slot.rank] if slot.rank < len(loads) else None,
    )


def dump_of(view: ModelState) -> Iterator[router_pb2.IndexDump]:
    """A view's index, rank by rank and tier by tier; ranks without blocks have one message that says so."""
    for slot in sorted(view.index.slots):
        holding = view.index.holding(slot)
        if holding is None:
            continue
        for tier in Tier:
            hashes = sorted(holding.tiers[tier])
            for start in range(0, max(len(hashes), 1 if tier is Tier.DEVICE else 0), DUMP_AT_ONCE):
                yield router_pb2.IndexDump(
                    worker_id=slot.worker_id,
                    data_parallel_rank=slot.rank,
                    tier=_TIER_NUMBERS[tier],
                    epoch=holding.epoch,
                    sequence=holding.sequence,
                    block_hashes=pack_u64(hashes[start : start + DUMP_AT_ONCE]),
                )

"""Converts messages from workers and about workers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from hashlib import sha256

from google.protobuf.message import DecodeError

from services.common.base.budgets import Budget
from services.common.base.errors import MAX_ADDRESS_LENGTH, check_name, invalid, quoted
from services.common.base.packing import pack_u64
from services.common.base.shared_steps import shared_step
from services.common.discovery.handoff_forms import handoff_form_of
from services.common.discovery.worker_checks import check_worker
from services.common.net.addresses import is_reachable
from services.common.security.identity import ANONYMOUS, Caller
from services.common.types.hashing import HASH_SCHEME
from services.router.registration.stream_messages import Leaving, LoadReport, Replies, SnapshotChunk, WorkerMessage
from services.router.state.kv_index.events import HASH_BYTES, BlockOp, CacheOperation, EventBatch, Tier
from services.router.state.reservations.cost import Load
from services.router.state.sync.load_reconciler import Reported
from services.router.state.sync.model_state import ModelState
from services.router.state.workers.registry import UpdateKind, WorkerUpdate
from services.router.state.workers.worker import Role, Worker, WorkerRank
from sluice.v1 import common_pb2, router_pb2

log = logging.getLogger(__name__)

MAX_RANKS = 1_024
"""Data-parallel ranks of a worker; a registration with more is refused with INVALID_ARGUMENT."""
MAX_EVENTS = 65_536
"""KV events of one batch; a larger batch is refused, budget `worker_frames`."""
MAX_BLOCKS = 1 << 28
"""Blocks of all ranks that a card may announce; a registration with more is refused with INVALID_ARGUMENT."""
MAX_LABELS = 32
"""Labels of a registration; one with more is refused with INVALID_ARGUMENT."""
MAX_LABEL = 63
"""Characters of the name or value of a label; a longer one is refused with INVALID_ARGUMENT."""
DUMP_AT_ONCE = 65_536  # hashes per message
EPOCH_AHEAD_US = 24 * 3600 * 1_000_000
MAX_U32 = (1 << 32) - 1
"""Sum of a load of all ranks of a worker, as its field has 32 bits; a larger one is shown as this."""
LEASE_KEY_BYTES = (16, 64)

_FRAMES = Budget("worker_frames", MAX_EVENTS, "")
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
    UpdateKind.UP: router_pb2.WorkerChange.KIND_UP,
    UpdateKind.DOWN: router_pb2.WorkerChange.KIND_DOWN,
    UpdateKind.SYNCED: router_pb2.WorkerChange.KIND_SYNCED,
}


def worker_of(registration: router_pb2.Registration, caller: Caller = ANONYMOUS) -> Worker:
    """Returns a worker from its registration.

    Args:
        caller: the authenticated sender.

    Raises:
        SluiceError: INVALID_ARGUMENT for an invalid registration.
    """
    card = registration.card
    required = {"worker_id": registration.worker_id, "address": registration.address, "card.model": card.model}
    for name, value in required.items():
        if not value:
            raise invalid(f"Missing {name}; a registration requires it.", param=f"registration.{name}")
    check_worker(registration.worker_id, registration.address, card)
    if registration.http_address:
        check_name(registration.http_address, "registration.http_address", MAX_ADDRESS_LENGTH)
        if not is_reachable(registration.http_address):
            raise invalid(
                f"http_address {quoted(registration.http_address)} is not host:port.", param="registration.http_address"
            )
    _check_labels(registration.labels)
    check_name(registration.engine, "registration.engine")
    check_name(registration.engine_version, "registration.engine_version")
    _check_epoch(registration.epoch)
    key = registration.lease_key
    shortest, longest = LEASE_KEY_BYTES
    if key and not shortest <= len(key) <= longest:
        raise invalid(f"lease_key has {len(key)} bytes; send {shortest} to {longest}.", param="registration.lease_key")
    ranks = card.data_parallel_size or 1
    if ranks > MAX_RANKS:
        raise invalid(f"data_parallel_size is {ranks}; the maximum is {MAX_RANKS}.", param="card.data_parallel_size")
    if card.total_blocks * ranks > MAX_BLOCKS:
        raise invalid(
            f"card.total_blocks is {card.total_blocks} for {ranks} ranks; send at most {MAX_BLOCKS} in all.",
            param="card.total_blocks",
        )
    scheme = card.hash_scheme or HASH_SCHEME
    if card.block_size and scheme != HASH_SCHEME:
        raise invalid(
            f"Unknown hash scheme {quoted(scheme)}; use {HASH_SCHEME!r}.",
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
        http_address=registration.http_address,
        labels=registration.labels,
    )
    if info.role == common_pb2.WORKER_ROLE_ENCODE:
        raise invalid(
            "The role ENCODE is reserved and not served by this version; register as AGGREGATED, PREFILL or DECODE.",
            param="registration.role",
        )
    try:
        role = Role(info.role)
    except ValueError:
        raise invalid(f"Unknown role {info.role}; use a value of WorkerRole.", param="registration.role") from None
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
        http_address=registration.http_address,
        labels=tuple(sorted(registration.labels.items())),
        fingerprint=card.tokenizer.fingerprint,
        prompt_fingerprint=card.tokenizer.prompt_fingerprint,
        named_by_server=registration.named_by_server,
        handoff_form=handoff_form_of(registration.engine, registration.engine_version),
    )


def _check_labels(labels: Mapping[str, str]) -> None:
    if len(labels) > MAX_LABELS:
        raise invalid(f"labels has {len(labels)} entries; send at most {MAX_LABELS}.", param="registration.labels")
    for name, value in labels.items():
        if not name:
            raise invalid("A label must have a name.", param="registration.labels")
        check_name(name, "registration.labels", MAX_LABEL)
        check_name(value, "registration.labels", MAX_LABEL)


def _check_epoch(epoch: int) -> None:
    latest = time.time_ns() // 1_000 + EPOCH_AHEAD_US
    if not 0 < epoch <= latest:
        raise invalid(
            f"Epoch {epoch} is out of range; use the worker's start time in Unix microseconds, at most one day ahead "
            f"of the router's clock (now {latest - EPOCH_AHEAD_US}).",
            param="registration.epoch",
            code="epoch_out_of_range",
        )


_SUMMED = ("running_requests", "waiting_requests", "used_blocks", "cached_blocks", "prefill_tokens")


def worker_info(worker: Worker, report: bytes) -> router_pb2.WorkerInfo:
    """Returns the public description of a worker; its load is the sum over its ranks."""
    info = router_pb2.WorkerInfo.FromString(worker.document)
    info.draining = worker.draining
    info.set_aside = worker.set_aside
    total = info.load
    for load in reported(report):
        for name in _SUMMED:  # a worker reports what it likes; the sum must fit as well
            setattr(total, name, min(getattr(total, name) + getattr(load, name), MAX_U32))
        total.step_ms = max(total.step_ms, load.step_ms)
    return info


def reported(report: bytes) -> list[common_pb2.WorkerLoad]:
    """Returns the loads by rank from a worker's last heartbeat; empty if it cannot be parsed."""
    try:
        return list(router_pb2.Heartbeat.FromString(report).loads)
    except DecodeError:
        _log_ignored(report)
        return []


@lru_cache(maxsize=256)  # logs each report once: it is parsed several times a second until the next one arrives
def _log_ignored(report: bytes) -> None:
    log.warning("ignoring a stored worker report that cannot be parsed", extra={"bytes": len(report)})


def read_report(report: bytes) -> list[Reported]:
    """Returns the load of each rank in a worker's last heartbeat."""
    return [
        Reported(
            load.running_requests + load.waiting_requests,
            bool(load.prefill_tokens or load.waiting_requests),
            load.used_blocks,
        )
        for load in reported(report)
    ]


def message_of(message: router_pb2.AttachRequest, worker: Worker) -> WorkerMessage:
    """Returns the content of an attached worker's message; raises SluiceError (INVALID_ARGUMENT) if it is invalid."""
    which = message.WhichOneof("message")
    if which == "events":
        batch = message.events
        if len(batch.events) > MAX_EVENTS:
            raise _FRAMES.refuse(
                f"The batch has {len(batch.events)} events; send at most {MAX_EVENTS}, with consecutive blocks in "
                "one event",
                param="events",
            )
        return EventBatch(batch.data_parallel_rank, batch.sequence, tuple(map(_op, batch.events)))
    if which == "heartbeat":
        if len(message.heartbeat.loads) > worker.ranks:
            raise invalid(
                "The heartbeat has more loads than the worker has ranks; send one per rank.", param="heartbeat.loads"
            )
        return LoadReport(message.heartbeat.SerializeToString())
    if which == "snapshot":
        chunk = message.snapshot
        return SnapshotChunk(
            chunk.data_parallel_rank, chunk.sequence, _tier(chunk.tier), _whole(chunk.block_hashes), chunk.last
        )
    if which == "leave":
        return Leaving(message.leave.reason)
    if which == "registration":
        raise invalid(
            "The worker is registered already; send the registration as the first message only.", param="message"
        )
    raise invalid("Empty message; set one of its fields.", param="message")


def _op(event: router_pb2.KvEvent) -> BlockOp:
    which = event.WhichOneof("event")
    if which == "stored":
        return BlockOp(CacheOperation.STORED, _tier(event.stored.tier), _whole(event.stored.block_hashes))
    if which == "removed":
        return BlockOp(CacheOperation.REMOVED, _tier(event.removed.tier), _whole(event.removed.block_hashes))
    if which == "cleared":
        return BlockOp(CacheOperation.CLEARED, Tier.DEVICE, b"")
    raise invalid("KV event of unknown kind; send stored, removed or cleared.", param="events")


def _tier(number: int) -> Tier:
    tier = _TIERS.get(common_pb2.CacheTier.ValueType(number))
    if tier is None:
        raise invalid(f"Unknown cache tier {number}; use a value of CacheTier.", param="tier")
    return tier


def _whole(hashes: bytes) -> bytes:
    if len(hashes) % HASH_BYTES:
        raise invalid(f"block_hashes has {len(hashes)} bytes; send packed u64 (8 bytes each).", param="block_hashes")
    return hashes


def replies_of(replies: Replies) -> Iterator[router_pb2.AttachResponse]:
    """Yields the messages to send to an attached worker."""
    for rank, sequence in replies.acks.items():
        yield router_pb2.AttachResponse(ack=router_pb2.EventAck(data_parallel_rank=rank, sequence=sequence))
    for rank, reason in replies.resyncs.items():
        yield router_pb2.AttachResponse(resync=router_pb2.ResyncRequest(data_parallel_rank=rank, reason=reason))


@shared_step("router.worker_changes")
def changes_of(updates: Iterable[WorkerUpdate], report: Callable[[Worker], bytes]) -> Iterator[router_pb2.WorkerChange]:
    """Yields the messages to send to a watcher, without workers whose record cannot be sent.

    Args:
        report: returns the last heartbeat of a worker.
    """
    for kind, worker in updates:
        try:
            info = None if worker is None else worker_info(worker, report(worker))
        except Exception:
            _log_unsendable(worker)
        else:
            yield router_pb2.WorkerChange(kind=_KINDS[kind], worker=info)


@shared_step("router.worker_list")
def worker_infos(workers: Iterable[Worker], report: Callable[[Worker], bytes]) -> Iterator[router_pb2.WorkerInfo]:
    """Yields the messages of workers, without those whose record cannot be sent; as `changes_of`."""
    for worker in workers:
        try:
            yield worker_info(worker, report(worker))
        except Exception:
            _log_unsendable(worker)


def _log_unsendable(worker: Worker | None) -> None:
    log.exception("leaving out a worker whose record cannot be sent", extra={"worker": worker and worker.worker_id})


def booked_load(slot: WorkerRank, load: Load, report: bytes) -> router_pb2.BookedLoad:
    """Returns the message with the reserved and the reported load of a rank."""
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
    """Yields a model's block index by rank and tier; a rank without blocks yields one empty message."""
    for slot in sorted(view.index.slots):
        cache = view.index.cache(slot)
        if cache is None:
            continue
        for tier in Tier:
            hashes = sorted(cache.tiers[tier])
            for start in range(0, max(len(hashes), 1 if tier is Tier.DEVICE else 0), DUMP_AT_ONCE):
                yield router_pb2.IndexDump(
                    worker_id=slot.worker_id,
                    data_parallel_rank=slot.rank,
                    tier=_TIER_NUMBERS[tier],
                    epoch=cache.epoch,
                    sequence=cache.sequence,
                    block_hashes=pack_u64(hashes[start : start + DUMP_AT_ONCE]),
                )

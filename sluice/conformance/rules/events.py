"""Rules about the messages to a router: registration, heartbeats and cache events. The kit is the router."""

from __future__ import annotations

from services.common.types.hashing import block_hashes
from services.worker.contract.capabilities import Capability
from sluice.conformance.exceptions import NotChecked, NotClaimed
from sluice.conformance.rule import expect, rule
from sluice.conformance.subject import Subject
from sluice.conformance.watching import RankView, Watcher

QUIET_S = 0.5
SNAPSHOTS = 10


async def _watcher(subject: Subject) -> Watcher:
    """Returns the kit's router after the worker has registered with it."""
    watcher = subject.target.watcher
    if watcher is None:
        raise NotChecked(
            "The worker does not register with the kit; set --router-listen HOST:PORT and start the worker with "
            "--routers HOST:PORT."
        )
    if not await watcher.registered(subject.patience.attach_s):
        raise NotChecked(
            f"No worker registered at {watcher.address} within {subject.patience.attach_s:g} s; "
            "check the worker's --routers."
        )
    return watcher


async def _cache_watcher(subject: Subject) -> Watcher:
    if not subject.claims(Capability.KV_EVENTS):
        raise NotClaimed("The card does not claim kv_events.")
    return await _watcher(subject)


async def _rank_with(subject: Subject, watcher: Watcher, prompt: list[int]) -> RankView | None:
    """Waits for a rank that reports every full block of the prompt; returns None on timeout."""
    wanted = set(block_hashes(prompt, subject.card.block_size))

    def holders() -> list[RankView]:
        return [view for view in watcher.ranks.values() if wanted <= view.hashes]

    await watcher.until(lambda: bool(holders()), subject.patience.settle_s)
    return next(iter(holders()), None)


@rule(
    "registration",
    "A worker registers with the id, epoch and card that GetInfo returns.",
    "router.proto, Registration",
    generates=False,
)
async def registration(subject: Subject) -> str:
    watcher = await _watcher(subject)
    sent = watcher.registration
    expect(sent is not None and sent.worker_id == subject.info.worker_id, "worker_id is not that of GetInfo.")
    assert sent is not None
    expect(sent.epoch == subject.info.epoch, f"The epoch is {sent.epoch}, that of GetInfo {subject.info.epoch}.")
    expect(sent.card == subject.card, "The card is not that of GetInfo.")
    expect(":" in sent.address, f"The address {sent.address!r} is not a host:port.")
    return f"{sent.worker_id} at {sent.address}, epoch {sent.epoch}."


@rule(
    "heartbeat",
    "A worker sends heartbeats at least at the interval that the router requests.",
    "router.proto, Attached.heartbeat_interval_ms",
    generates=False,
)
async def heartbeat(subject: Subject) -> str:
    watcher = await _watcher(subject)
    before = watcher.heartbeats
    await watcher.until(lambda: watcher.heartbeats >= before + 2, subject.patience.settle_s)
    received = watcher.heartbeats - before
    expect(
        received >= 2,
        f"{received} heartbeats arrived within {subject.patience.settle_s:g} s; one every 0.5 s was requested.",
    )
    return "Two heartbeats arrived."


@rule(
    "kv-events",
    "Every full block of a prompt is reported with the block hash shared by all services.",
    "router.proto, BlocksStored; hash scheme sluice-xxh3-v1",
)
async def kv_events(subject: Subject) -> str:
    watcher = await _cache_watcher(subject)
    prompt = subject.block_prompt()
    await subject.complete(subject.request(prompt, max_tokens=2))
    view = await _rank_with(subject, watcher, prompt)
    blocks = len(prompt) // subject.card.block_size
    expect(
        view is not None, f"The {blocks} blocks of a prompt were not reported within {subject.patience.settle_s:g} s."
    )
    return f"{blocks} blocks of a new prompt were reported."


@rule("kv-event-numbers", "Event batches are numbered without gaps.", "router.proto, KvEventBatch.sequence")
async def kv_event_numbers(subject: Subject) -> str:
    watcher = await _cache_watcher(subject)
    batches = sum(view.batches for view in watcher.ranks.values())
    for _ in range(6):
        await subject.complete(subject.request(subject.block_prompt(), max_tokens=2))
    await watcher.until(
        lambda: sum(view.batches for view in watcher.ranks.values()) > batches, subject.patience.settle_s
    )
    received = sum(view.batches for view in watcher.ranks.values()) - batches
    expect(received > 0, "No batch arrived for six new prompts.")
    faults = [fault for view in watcher.ranks.values() for fault in view.faults]
    expect(not faults, f"{len(faults)} faults; the first: {faults[0] if faults else ''}.")
    return f"{received} consecutive batches for six prompts."


@rule("resync", "A snapshot has exactly the blocks reported by the events before it.", "router.proto, Snapshot")
async def resync(subject: Subject) -> str:
    watcher = await _cache_watcher(subject)
    prompt = subject.block_prompt()
    await subject.complete(subject.request(prompt, max_tokens=2))
    await watcher.until(lambda: bool(watcher.ranks), subject.patience.settle_s)
    expect(bool(watcher.ranks), "The worker sent no cache events.")
    for rank, view in tuple(watcher.ranks.items()):
        await _comparable_snapshot(subject, watcher, rank, view)
        expect(not view.lost, f"{view.lost} blocks reported by events are not in the snapshot of rank {rank}.")
        expect(not view.gained, f"{view.gained} blocks in the snapshot of rank {rank} were not reported by events.")
    return f"{sum(len(view.blocks) for view in watcher.ranks.values())} blocks, as reported by the events."


async def _comparable_snapshot(subject: Subject, watcher: Watcher, rank: int, view: RankView) -> None:
    """Requests snapshots until one is not ahead of the events.

    A snapshot that is ahead of the events replaces the blocks, and the next one is compared with it. The first one must
    therefore be requested while no events arrive.
    """
    for _ in range(SNAPSHOTS):
        batches = -1
        while batches != view.batches:
            batches = view.batches
            await watcher.until(lambda: view.batches > batches, QUIET_S)  # noqa: B023
        before = view.snapshots
        await watcher.resync(rank)
        received = await watcher.until(lambda: view.snapshots > before, subject.patience.settle_s)  # noqa: B023
        expect(received, f"No snapshot of rank {rank} arrived within {subject.patience.settle_s:g} s.")
        if view.lost is not None:
            return
    raise NotChecked("Events arrived with every snapshot; make sure that no other client uses the worker.")

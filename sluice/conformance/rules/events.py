"""What a worker tells a router: its card, its load, and every change of its cache. The kit is the router."""

from __future__ import annotations

from services.common.hashing import block_hashes
from services.worker.contract.capabilities import Capability
from sluice.conformance.rule import NotChecked, NotClaimed, expect, rule
from sluice.conformance.subject import Subject
from sluice.conformance.watching import RankView, Watcher

QUIET_S = 0.5
SNAPSHOTS = 10


async def _watcher(subject: Subject) -> Watcher:
    """The kit's router, with the worker registered."""
    watcher = subject.target.watcher
    if watcher is None:
        raise NotChecked(
            "The kit is not the worker's router: give --router-listen HOST:PORT and start the worker with "
            "--routers HOST:PORT."
        )
    if not await watcher.registered(subject.patience.attach_s):
        raise NotChecked(
            f"Nobody registered at {watcher.address} within {subject.patience.attach_s:g} s; "
            "is the worker attached elsewhere?"
        )
    return watcher


async def _watched_cache(subject: Subject) -> Watcher:
    if not subject.claims(Capability.KV_EVENTS):
        raise NotClaimed("The card does not claim kv_events.")
    return await _watcher(subject)


async def _told(subject: Subject, watcher: Watcher, prompt: list[int]) -> RankView | None:
    """The rank that holds every full block of the prompt, as soon as one does; None when none does in time."""
    wanted = set(block_hashes(prompt, subject.card.block_size))

    def holders() -> list[RankView]:
        return [view for view in watcher.ranks.values() if wanted <= view.hashes]

    await watcher.until(lambda: bool(holders()), subject.patience.settle_s)
    return next(iter(holders()), None)


@rule(
    "registration",
    "A worker registers with the id, epoch and card that GetInfo tells.",
    "router.proto, Registration",
    generates=False,
)
async def registration(subject: Subject) -> str:
    watcher = await _watcher(subject)
    said = watcher.registration
    expect(said is not None and said.worker_id == subject.info.worker_id, "worker_id is not that of GetInfo.")
    assert said is not None
    expect(said.epoch == subject.info.epoch, f"The epoch is {said.epoch}, that of GetInfo {subject.info.epoch}.")
    expect(said.card == subject.card, "The card is not that of GetInfo.")
    expect(":" in said.address, f"The address {said.address!r} is no host:port.")
    return f"{said.worker_id} at {said.address}, epoch {said.epoch}."


@rule(
    "heartbeat",
    "A worker speaks at least as often as the router asks.",
    "router.proto, Attached.heartbeat_interval_ms",
    generates=False,
)
async def heartbeat(subject: Subject) -> str:
    watcher = await _watcher(subject)
    before = watcher.heartbeats
    await watcher.until(lambda: watcher.heartbeats >= before + 2, subject.patience.settle_s)
    came = watcher.heartbeats - before
    expect(came >= 2, f"{came} heartbeats came in {subject.patience.settle_s:g} s; one every 0.5 s was asked for.")
    return "Two heartbeats came."


@rule(
    "kv-events",
    "Every full block of a prompt is told under the hash that all services agree on.",
    "router.proto, BlocksStored; hash scheme sluice-xxh3-v1",
)
async def kv_events(subject: Subject) -> str:
    watcher = await _watched_cache(subject)
    prompt = subject.block_prompt()
    await subject.ask(subject.request(prompt, max_tokens=2))
    view = await _told(subject, watcher, prompt)
    blocks = len(prompt) // subject.card.block_size
    expect(view is not None, f"The {blocks} blocks of a prompt were not told within {subject.patience.settle_s:g} s.")
    return f"{blocks} blocks of a fresh prompt were told."


@rule("kv-event-numbers", "Event batches are numbered without holes.", "router.proto, KvEventBatch.sequence")
async def kv_event_numbers(subject: Subject) -> str:
    watcher = await _watched_cache(subject)
    batches = sum(view.batches for view in watcher.ranks.values())
    for _ in range(6):
        await subject.ask(subject.request(subject.block_prompt(), max_tokens=2))
    await watcher.until(
        lambda: sum(view.batches for view in watcher.ranks.values()) > batches, subject.patience.settle_s
    )
    came = sum(view.batches for view in watcher.ranks.values()) - batches
    expect(came > 0, "No batch came for six new prompts.")
    faults = [fault for view in watcher.ranks.values() for fault in view.faults]
    expect(not faults, f"{faults[0] if faults else ''}: {len(faults)} such.")
    return f"{came} batches for six prompts, each the next number."


@rule("resync", "A snapshot holds what the events before it told, no more and no less.", "router.proto, Snapshot")
async def resync(subject: Subject) -> str:
    watcher = await _watched_cache(subject)
    prompt = subject.block_prompt()
    await subject.ask(subject.request(prompt, max_tokens=2))
    await watcher.until(lambda: bool(watcher.ranks), subject.patience.settle_s)
    expect(bool(watcher.ranks), "The worker never told anything of its cache.")
    for rank, view in tuple(watcher.ranks.items()):
        await _comparable_snapshot(subject, watcher, rank, view)
        expect(not view.lost, f"{view.lost} blocks that events had told are not in the snapshot of rank {rank}.")
        expect(not view.gained, f"{view.gained} blocks in the snapshot of rank {rank} were told by no event.")
    return f"{sum(len(view.blocks) for view in watcher.ranks.values())} blocks, as the events had told."


async def _comparable_snapshot(subject: Subject, watcher: Watcher, rank: int, view: RankView) -> None:
    """Asks until no event was under way when the worker made its snapshot.

    A snapshot that is ahead of the events replaces what they had told, and the next one is compared with it: so the
    first one has to be asked for when all is quiet.
    """
    for _ in range(SNAPSHOTS):
        told = -1
        while told != view.batches:
            told = view.batches
            await watcher.until(lambda: view.batches > told, QUIET_S)  # noqa: B023
        before = view.snapshots
        await watcher.resync(rank)
        came = await watcher.until(lambda: view.snapshots > before, subject.patience.settle_s)  # noqa: B023
        expect(came, f"No snapshot of rank {rank} came within {subject.patience.settle_s:g} s.")
        if view.lost is not None:
            return
    raise NotChecked("Events came with every snapshot; somebody else uses the worker.")

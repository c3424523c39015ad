"""Engine events in block hashes everyone agrees on: whatever the engine's block size, tiers and groups."""

from __future__ import annotations

from array import array
from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.types.hashing import block_hashes
from services.gateway.admission.tenants import salted
from services.worker.contract.cache_events import BlocksRemoved, BlocksStored, CacheCleared, CacheTier, KvEvent
from services.worker.kv_events.events import EngineCleared, EngineEvent, EngineRemoved, EngineStored
from services.worker.kv_events.groups import GroupTranslator
from services.worker.kv_events.wire import decode
from tests.support.oracles.errors import raises_error

KNOWN = [14643705804678351452, 4945711292740353085, 12583592247330656132]
"""Of tokens 1..12 in blocks of 4."""


def stored(
    hashes: list[int], tokens: list[int], parent: int | None = None, size: int = 4, **fields: object
) -> EngineStored:
    return EngineStored(hashes, parent, array("I", tokens), size, **fields)  # type: ignore[arg-type]


class Mirror:
    """What a router would believe."""

    def __init__(self) -> None:
        self.tiers: dict[CacheTier, set[int]] = {}

    def hear(self, events: list[KvEvent]) -> None:
        for event in events:
            if isinstance(event, CacheCleared):
                self.tiers.clear()
            elif isinstance(event, BlocksStored):
                held = self.tiers.setdefault(event.tier, set())
                assert not held & set(event.hashes), "stored twice"
                held.update(event.hashes)
            else:
                held = self.tiers.setdefault(event.tier, set())
                assert held >= set(event.hashes), "removed what was not there"
                held.difference_update(event.hashes)

    def on(self, tier: CacheTier = CacheTier.DEVICE) -> set[int]:
        return self.tiers.get(tier, set())


def translate(*events: EngineEvent, translator: GroupTranslator | None = None, counts: bool = True) -> Mirror:
    mirror = Mirror()
    mirror.hear((translator or GroupTranslator(4, counts_copies=counts)).apply(events))
    return mirror


def test_adapter_and_salt_shift_the_seed_of_the_whole_sequence() -> None:
    mirror = translate(
        stored([1], [1, 2, 3, 4], lora="my-lora", salt="tenant-a"), stored([2], [5, 6, 7, 8], 1, lora="my-lora")
    )
    assert mirror.on() == set(block_hashes(list(range(1, 9)), 4, "my-lora", "tenant-a"))
    assert 6157910915076630503 in mirror.on()


def test_removals_are_resolved_by_the_engines_hash() -> None:
    mirror = translate(stored([1, 2], list(range(1, 9))), EngineRemoved([2]), EngineRemoved([99]))
    assert mirror.on() == {KNOWN[0]}


def test_copies_count_where_the_engine_counts_them() -> None:
    events: list[EngineEvent] = [stored([1], [1, 2, 3, 4]), stored([1], [1, 2, 3, 4]), EngineRemoved([1])]
    assert translate(*events).on() == {KNOWN[0]}
    assert translate(*events, EngineRemoved([1])).on() == set()
    assert translate(*events, counts=False).on() == set()


def test_an_offloaded_copy_needs_no_token_ids() -> None:
    offloaded = stored([1, 2], [], size=0, tier=CacheTier.HOST)
    mirror = translate(stored([1, 2], list(range(1, 9))), EngineRemoved([1, 2]), offloaded)
    assert (mirror.on(), mirror.on(CacheTier.HOST)) == (set(), set(KNOWN[:2]))


def test_a_block_can_lie_on_two_tiers_and_leave_one() -> None:
    offloaded = stored([1], [], size=0, tier=CacheTier.HOST)
    mirror = translate(stored([1], [1, 2, 3, 4]), offloaded, EngineRemoved([1]), EngineRemoved([1], CacheTier.DISK))
    assert (mirror.on(), mirror.on(CacheTier.HOST)) == (set(), {KNOWN[0]})


def test_blocks_after_an_unknown_one_are_counted_and_left_out() -> None:
    translator = GroupTranslator(4, counts_copies=True)
    mirror = translate(stored([2, 3], list(range(5, 13)), parent=1), translator=translator)
    assert (mirror.on(), translator.orphans) == (set(), 2)


def test_blocks_with_extra_inputs_are_never_reported() -> None:
    mirror = translate(
        stored([1, 2, 3], list(range(1, 13)), opaque_from=1),
        stored([4], [13, 14, 15, 16], parent=3),
        EngineRemoved([2]),
    )
    assert mirror.on() == {KNOWN[0]}


def test_only_the_group_that_forgets_nothing_counts() -> None:
    sliding = stored([1], [1, 2, 3, 4], group=0, kind="sliding_window")
    full = stored([1], [1, 2, 3, 4], group=1, kind="full_attention")
    second = stored([1], [1, 2, 3, 4], group=2, kind="full_attention")
    mirror = translate(sliding, full, second, EngineRemoved([1], group=0), EngineRemoved([1], group=2))
    assert mirror.on() == {KNOWN[0]}
    assert translate(sliding).on() == set()


@settings(max_examples=50)
@given(
    groups=st.permutations([0, 1, 2]),
    windows=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    batch=st.integers(1, 30),
)
def test_group_without_a_kind_that_keeps_the_most_blocks_counts(
    groups: list[int], windows: tuple[int, int], lengths: list[int], batch: int
) -> None:
    """The engine has one group of full attention and two that keep a window of each sequence, in any order."""
    window_of = dict(zip(groups, (None, *windows), strict=True))
    events: list[EngineEvent] = []
    for sequence, length in enumerate(lengths):
        hashes = [100 * sequence + block for block in range(length)]
        for place, block_hash in enumerate(hashes):
            tokens = [sequence, *range(4 * place, 4 * place + 3)]
            for group, window in sorted(window_of.items()):
                parent = hashes[place - 1] if place else None
                events.append(stored([block_hash], tokens, parent, group=group))
                if window is not None and place >= window:
                    events.append(EngineRemoved([hashes[place - window]], group=group))
    translator, mirror = GroupTranslator(4, counts_copies=True), Mirror()
    for start in range(0, len(events), batch):
        mirror.hear(translator.apply(events[start : start + batch]))
    mirror.hear(translator.forget())
    assert not mirror.on()
    mirror.hear(translator.apply(events))
    full = translate(*(one for one in events if not isinstance(one, EngineCleared) and one.group == groups[0]))
    assert mirror.on() == full.on()
    assert len(full.on()) == sum(lengths)


@pytest.mark.parametrize("size", [3, 6])
def test_sizes_that_do_not_go_together_are_refused_by_name(size: int) -> None:
    with raises_error(match=f"block size is {size} and the configured one is 4", param="block_size"):
        translate(stored([1], [1] * size, size=size))


def test_after_a_loss_nothing_is_claimed_until_it_is_proven_again() -> None:
    translator = GroupTranslator(4, counts_copies=True)
    mirror = translate(stored([1, 2], list(range(1, 9))), translator=translator)
    mirror.hear(translator.lose())
    assert mirror.on() == set()
    mirror.hear(translator.apply([stored([3], list(range(9, 13)), parent=2)]))
    assert mirror.on() == set(KNOWN), "a stored block proves that those before it are there"


def test_another_engine_starts_from_nothing() -> None:
    translator = GroupTranslator(4, counts_copies=True)
    mirror = translate(stored([1], [1, 2, 3, 4]), translator=translator)
    mirror.hear(translator.reset())
    mirror.hear(translator.apply([stored([2], [5, 6, 7, 8], parent=1)]))
    assert (mirror.on(), translator.orphans) == (set(), 1)


def test_what_is_gone_is_forgotten_in_the_end() -> None:
    translator = GroupTranslator(4, counts_copies=True, keep_gone=2)
    for number in range(5):
        translator.apply([stored([number], [number] * 4), EngineRemoved([number])])
    translator.apply([stored([1, 4], [], size=0, tier=CacheTier.HOST)])
    assert (translator.held(CacheTier.HOST), translator.orphans) == (1, 1)


PROMPTS = [[0, 0, 0, 0], [0, 0, 1, 1], [0, 2, 2, 2], [3, 3]]
"""Sequences of engine blocks, as names; a name and what precedes it make a block."""


class Engine:
    """Holds copies of blocks by path, as vLLM does, and reports them."""

    def __init__(self, block_size: int) -> None:
        self.size = block_size
        self.copies: Counter[tuple[int, ...]] = Counter()
        self.host: set[tuple[int, ...]] = set()

    def tokens(self, path: tuple[int, ...]) -> list[int]:
        return [name * 100 + place for name in path for place in range(self.size)]

    def store(self, prompt: list[int], count: int) -> EngineStored | None:
        done = 0
        while done < count and self.copies[tuple(prompt[: done + 1])]:
            done += 1
        paths = [tuple(prompt[: end + 1]) for end in range(done, count)]
        if not paths:
            return None
        self.copies.update(paths)
        tokens = self.tokens(paths[-1])[done * self.size :]
        parent = hash(tuple(prompt[:done])) if done else None
        return stored([hash(path) for path in paths], tokens, parent, self.size)

    def evict(self, choice: int) -> EngineRemoved | None:
        leaves = sorted(path for path, copies in self.copies.items() if copies)
        if not leaves:
            return None
        path = leaves[choice % len(leaves)]
        self.copies[path] -= 1
        return EngineRemoved([hash(path)])

    def offload(self, choice: int) -> EngineStored | None:
        present = sorted(path for path, copies in self.copies.items() if copies)
        if not present:
            return None
        path = present[choice % len(present)]
        if path in self.host:
            return None
        self.host.add(path)
        return stored([hash(path)], [], None, 0, tier=CacheTier.HOST)

    def expected(self, ours: int, paths: set[tuple[int, ...]]) -> set[int]:
        """Our blocks whose tokens all lie in present engine blocks."""
        found: set[int] = set()
        for prompt in PROMPTS:
            hashes = block_hashes(self.tokens(tuple(prompt)), ours)
            for index, block_hash in enumerate(hashes):
                first, last = index * ours // self.size, ((index + 1) * ours - 1) // self.size
                if all(tuple(prompt[: place + 1]) in paths for place in range(first, last + 1)):
                    found.add(block_hash)
        return found


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.sampled_from([(4, 4), (8, 4), (2, 4)]),
    steps=st.lists(
        st.tuples(st.sampled_from(["store", "store", "evict", "offload", "clear"]), st.integers(0, 20)), max_size=40
    ),
)
def test_the_mirror_is_what_the_engine_holds(sizes: tuple[int, int], steps: list[tuple[str, int]]) -> None:
    theirs, ours = sizes
    engine, translator, mirror = Engine(theirs), GroupTranslator(ours, counts_copies=True), Mirror()
    for action, choice in steps:
        event: EngineEvent | None
        if action == "store":
            prompt = PROMPTS[choice % len(PROMPTS)]
            event = engine.store(prompt, 1 + choice % len(prompt))
        elif action == "clear":
            engine.copies.clear()
            engine.host.clear()
            event = EngineCleared()
        else:
            event = engine.evict(choice) if action == "evict" else engine.offload(choice)
        if event is not None:
            mirror.hear(translator.apply([event]))
        present = {path for path, copies in engine.copies.items() if copies}
        assert mirror.on() == engine.expected(ours, present)
        assert mirror.on(CacheTier.HOST) == engine.expected(ours, engine.host)
    again = Mirror()
    again.hear(translator.snapshot())
    assert {tier: held for tier, held in again.tiers.items() if held} == {
        tier: held for tier, held in mirror.tiers.items() if held
    }


def test_removed_events_merge_by_tier() -> None:
    translator = GroupTranslator(4, counts_copies=True)
    translator.apply([stored([1, 2], list(range(1, 9)))])
    assert translator.apply([EngineRemoved([2]), EngineRemoved([1])]) == [
        BlocksRemoved(array("Q", [KNOWN[1], KNOWN[0]]))
    ]


BLOCK = 4
IDS = list(range(1, 17))
SALT = salted("acme", "mine")


def salted_events(first: int, parent: int | None, **fields: Any) -> dict[str, Any]:
    """An engine's event about two blocks, from number `first` on."""
    return {
        "type": "BlockStored",
        "block_hashes": [100 + first, 101 + first],
        "parent_block_hash": parent,
        "token_ids": IDS[first * BLOCK : (first + 2) * BLOCK],
        "block_size": BLOCK,
        **fields,
    }


@pytest.mark.parametrize("lora", ["", "tone"])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_events_of_salted_prompts_have_the_hashes_of_the_gateway(engine: str, lora: str) -> None:
    adapter: dict[str, Any] = {"lora_name": lora} if lora else {}
    names = [lora] if lora else []
    if engine == "vllm":  # the salt is among the keys of the first block of a sequence only
        begun = salted_events(0, None, extra_keys=[[*names, SALT], names or None], **adapter)
        continued = salted_events(2, 101, extra_keys=[names or None, names or None], **adapter)
    else:
        begun = salted_events(0, None, cache_salt=SALT, **adapter)
        continued = salted_events(2, 101, cache_salt=SALT, **adapter)
    translator = GroupTranslator(BLOCK, counts_copies=engine == "vllm")
    batch = decode(msgspec.msgpack.encode([1.0, [begun, continued], 0]))
    (event,) = translator.apply(batch.events)
    assert isinstance(event, BlocksStored)
    assert event.hashes == block_hashes(array("I", IDS), BLOCK, lora, SALT)
    assert not set(event.hashes) & set(block_hashes(array("I", IDS), BLOCK, lora, salted("acme", "")))

"""The names of adapters at vLLM, which finds cached blocks by them."""

from __future__ import annotations

from pathlib import Path

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from services.worker.engines.vllm.adapters import Adapters
from services.worker.kv_events.events import EngineStored
from services.worker.kv_events.wire import decode

FOLDER = str(Path(__file__).parent)


@given(st.lists(st.tuples(st.booleans(), st.sampled_from(["poet", "cook", "poet-2"])), max_size=20))
def test_every_load_of_an_adapter_has_another_name_at_vllm_and_the_same_in_events(
    actions: list[tuple[bool, str]],
) -> None:
    adapters, used, loaded = Adapters(), set[str](), set[str]()
    for load, name in actions:
        if not load:
            adapters.remove(name)
            loaded.discard(name)
        elif name not in loaded:
            adapter = adapters.prepare({"name": name, "path": FOLDER})
            adapters.add(adapter)
            loaded.add(name)
            assert adapter.engine_name not in used
            used.add(adapter.engine_name)
            assert _reported(adapter.engine_name) == name
    assert adapters.names == tuple(sorted(loaded))


def test_load_that_failed_leaves_no_name_that_is_used_again() -> None:
    adapters = Adapters()
    names = {adapters.prepare({"name": "poet", "path": FOLDER}).engine_name for _ in range(3)}
    assert len(names) == 3


def _reported(engine_name: str) -> str:
    """Returns the name of the adapter whose blocks vLLM reports under its own."""
    event = {
        "type": "BlockStored",
        "block_hashes": [1],
        "token_ids": [1, 2],
        "block_size": 2,
        "lora_name": engine_name,
        "extra_keys": [[engine_name, "tenant"]],
    }
    (stored,) = decode(msgspec.msgpack.encode([1.5, [event], 0])).events
    assert isinstance(stored, EngineStored)
    assert stored.salt == "tenant"
    return stored.lora

"""Cache events of a tenant's prompts name the blocks that gateways and routers look for."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec
import pytest

from services.common.hashing import block_hashes
from services.gateway.admission.tenants import salted
from services.worker.contract.cache_events import BlocksStored
from services.worker.kv_events.translation import Translator
from services.worker.kv_events.wire import decode

BLOCK = 4
IDS = list(range(1, 17))
SALT = salted("acme", "mine")


def stored(first: int, parent: int | None, **fields: Any) -> dict[str, Any]:
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
        begun = stored(0, None, extra_keys=[[*names, SALT], names or None], **adapter)
        continued = stored(2, 101, extra_keys=[names or None, names or None], **adapter)
    else:
        begun = stored(0, None, cache_salt=SALT, **adapter)
        continued = stored(2, 101, cache_salt=SALT, **adapter)
    translator = Translator(BLOCK, counts_copies=engine == "vllm")
    batch = decode(msgspec.msgpack.encode([1.0, [begun, continued], 0]))
    (event,) = translator.apply(batch.events)
    assert isinstance(event, BlocksStored)
    assert event.hashes == block_hashes(array("I", IDS), BLOCK, lora, SALT)
    assert not set(event.hashes) & set(block_hashes(array("I", IDS), BLOCK, lora, salted("acme", "")))

"""What fits into memory, and what is refused with a sentence."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import ErrorKind, SluiceError
from services.worker.engines.transformers.sizing import Plan, Shape, fit, free_memory

CONFIG = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "vocab_size": 500,
}
WANTED = Plan(block_size=16, total_blocks=2048, max_batched_tokens=512, max_sequences=256)
ALL = frozenset({"total_blocks", "max_batched_tokens", "max_sequences"})


def test_a_token_of_cache_is_keys_and_values_of_every_layer() -> None:
    assert Shape.of(CONFIG, 4, masks=True).cache_bytes == 2 * 2 * 2 * 32 * 4
    assert Shape.of({**CONFIG, "head_dim": None, "num_key_value_heads": None}, 2, masks=False) == Shape(
        cache_bytes=2 * 2 * 4 * 16 * 2, read_bytes=2 * 8 * 16 * 2, mask_bytes=0, vocab_size=500
    )


def test_plenty_of_memory_changes_nothing() -> None:
    assert fit(WANTED, frozenset(), Shape.of(CONFIG, 4, masks=True), 1 << 40) == WANTED


@given(st.integers(0, 1 << 33), st.sets(st.sampled_from(sorted(ALL))))
def test_what_somebody_asked_for_stays_and_the_result_fits(room: int, fixed: set[str]) -> None:
    shape = Shape.of(CONFIG, 4, masks=True)
    try:
        plan = fit(WANTED, frozenset(fixed), shape, room)
    except SluiceError as error:
        refused = error
    else:
        assert plan.bytes(shape) <= room
        assert all(getattr(plan, name) == getattr(WANTED, name) for name in fixed)
        return
    smallest = Plan(
        16,
        2048 if "total_blocks" in fixed else 64,
        512 if "max_batched_tokens" in fixed else 256,
        256 if "max_sequences" in fixed else 8,
    )
    assert smallest.bytes(shape) > room
    assert refused.kind is ErrorKind.FAILED_PRECONDITION


def test_too_little_memory_is_one_sentence_with_figures() -> None:
    with pytest.raises(SluiceError, match="Not enough memory: 2048 blocks of 16 tokens") as caught:
        fit(WANTED, ALL, Shape.of(CONFIG, 4, masks=True), 1 << 20)
    assert "1 MiB; lower --total-blocks" in caught.value.message


def test_this_machine_has_memory() -> None:
    assert free_memory() > 1 << 20

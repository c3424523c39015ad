"""Computes how many cache blocks and batch tokens fit into the free memory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from services.common.base.errors import ErrorKind, SluiceError

OUTPUT_ROW_BYTES = 4  # float32 logits
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Shape:
    """Memory needs of a model.

    Attributes:
        cache_bytes: Bytes of one token's keys and values over all layers.
        read_bytes: Bytes of one cached token while a layer's attention reads it, repeated for every head.
        mask_bytes: Bytes of one attention mask cell; 0 if the attention needs no mask.
        vocab_size: Width of a row of logits.
    """

    cache_bytes: int
    read_bytes: int
    mask_bytes: int
    vocab_size: int

    @classmethod
    def of(cls, config: Mapping[str, Any], itemsize: int, masks: bool) -> Shape:
        """Returns the shape for a text model's config.json; `itemsize` is the size of one weight in bytes."""
        heads = int(config["num_attention_heads"])
        kv_heads = int(config.get("num_key_value_heads") or heads)
        head_dim = int(config.get("head_dim") or int(config["hidden_size"]) // heads)
        layers = int(config["num_hidden_layers"])
        return cls(
            cache_bytes=2 * layers * kv_heads * head_dim * itemsize,
            read_bytes=2 * (heads + kv_heads) * head_dim * itemsize,
            mask_bytes=itemsize if masks else 0,
            vocab_size=int(config["vocab_size"]),
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes of the cache and of a batch."""

    block_size: int
    total_blocks: int
    max_batched_tokens: int
    max_sequences: int

    def bytes(self, shape: Shape) -> int:
        """Returns the memory that the plan needs in addition to the weights."""
        tokens = self.block_size * self.total_blocks
        mask = shape.mask_bytes * self.max_batched_tokens * (tokens + self.max_batched_tokens)
        logits = 3 * OUTPUT_ROW_BYTES * shape.vocab_size * self.max_sequences
        return tokens * (shape.cache_bytes + shape.read_bytes + 16) + mask + logits


def fit(wanted: Plan, fixed: frozenset[str], shape: Shape, room: int) -> Plan:
    """Returns a plan that fits into `room` bytes by shrinking sizes that are not fixed.

    Args:
        wanted: The desired plan.
        fixed: Names of the sizes that the user set.
        shape: Memory needs of the model.
        room: Available memory in bytes.

    Raises:
        SluiceError: FAILED_PRECONDITION when even the smallest plan with the fixed sizes does not fit.
    """
    plan = wanted
    while plan.bytes(shape) > room:
        smaller = _smaller(plan, fixed)
        if smaller is None:
            raise SluiceError(
                ErrorKind.FAILED_PRECONDITION,
                f"Not enough memory: {plan.total_blocks} blocks of {plan.block_size} tokens and batches of "
                f"{plan.max_batched_tokens} tokens need {_mib(plan.bytes(shape))} MiB, and the engine may use "
                f"{_mib(max(room, 0))} MiB; lower --total-blocks or --max-batched-tokens, or raise memory_share.",
                code="not_enough_memory",
            )
        plan = smaller
    return plan


def _smaller(plan: Plan, fixed: frozenset[str]) -> Plan | None:
    """Halves the first size that is not fixed; returns None when no size can shrink."""
    candidates = {
        "max_batched_tokens": (plan.max_batched_tokens, 256),
        "total_blocks": (plan.total_blocks, 64),
        "max_sequences": (plan.max_sequences, 8),
    }
    for name, (value, minimum) in candidates.items():
        if name not in fixed and value > minimum:
            halved = max(minimum, value // 2)
            return replace(plan, **{name: halved})
    return None


def free_memory() -> int:
    """Returns the available main memory in bytes: the machine's, or the remainder of the container's limit if lower."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    limit, used = _read("/sys/fs/cgroup/memory.max").strip(), _read("/sys/fs/cgroup/memory.current").strip()
    if limit.isdigit() and used.isdigit():
        free = min(free, int(limit) - int(used))
    return free


def _read(path: str) -> str:
    try:
        return Path(path).read_text("utf-8")
    except OSError:
        return ""


def _mib(size: int) -> int:
    return -(-size // MIB)

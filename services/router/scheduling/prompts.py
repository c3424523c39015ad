"""Prompts as the index sees them: checked against the model's block scheme, hashed where needed."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from services.common.errors import ErrorKind, SluiceError, invalid, quoted
from services.common.hashing import HASH_SCHEME, block_hashes
from services.common.packing import pack_u64, unpack_u64
from services.router.scheduling.queries import Prompt, RoutedPrompt
from services.router.workers.worker import Worker

NOMINAL_BLOCK = 16  # tokens that count as a block of load where a model has no blocks


@dataclass(frozen=True, slots=True)
class Blocks:
    """A prompt in blocks.

    `size`: tokens a block. `count`: blocks it fills, a partial one included. `blind`: full blocks exist, but the
    caller did not say which.
    """

    hashes: array[int]
    size: int
    count: int
    tokens: int
    blind: bool = False


def in_blocks(prompt: Prompt, workers: Sequence[Worker]) -> Blocks:
    """What the index needs to know of a prompt.

    Args:
        workers: of the model; their block sizes are equal where they have any.

    Raises:
        SluiceError: INVALID_ARGUMENT for a broken prompt or an unknown scheme, FAILED_PRECONDITION when its blocks
            are not those of the model.
    """
    if len(prompt.token_ids) % 4:
        raise invalid(f"token_ids holds {len(prompt.token_ids)} bytes, not a multiple of 4.", param="prompt.token_ids")
    card = next((worker for worker in workers if worker.block_size), None)
    if prompt.block_hashes:
        hashes, size = _given(prompt, card), prompt.block_size
    elif card is not None and prompt.token_ids:
        hashes, size = block_hashes(prompt.token_ids, card.block_size, prompt.lora, prompt.cache_salt), card.block_size
    else:
        hashes, size = array("Q"), card.block_size if card else NOMINAL_BLOCK
    tokens = max(prompt.prompt_tokens, len(prompt.token_ids) // 4, len(hashes) * size)
    blind = card is not None and not hashes and tokens >= size
    return Blocks(hashes, size, -(-tokens // size), tokens, blind)


def routed(prompt: Prompt, blocks: Blocks) -> RoutedPrompt:
    """Returns a prompt and its blocks for its caller; see `in_blocks`."""
    if not blocks.hashes:
        return RoutedPrompt(prompt.token_ids)
    return RoutedPrompt(prompt.token_ids, pack_u64(blocks.hashes), HASH_SCHEME, blocks.size)


def _given(prompt: Prompt, card: Worker | None) -> array[int]:
    scheme = prompt.hash_scheme or HASH_SCHEME
    if scheme != HASH_SCHEME:
        raise invalid(
            f"Hash scheme {quoted(scheme)} is not known here; use {HASH_SCHEME!r} or send token_ids.",
            param="prompt.hash_scheme",
            code="unknown_hash_scheme",
        )
    if not prompt.block_size:
        raise invalid("block_hashes need their block_size.", param="prompt.block_size")
    if card is not None and (prompt.block_size, scheme) != (card.block_size, card.hash_scheme):
        raise SluiceError(
            ErrorKind.FAILED_PRECONDITION,
            f"The hashes are of blocks of {prompt.block_size} tokens and model {card.model} has blocks of "
            f"{card.block_size} ({card.hash_scheme}).",
            param="prompt.block_size",
            code="block_size_mismatch",
        )
    return unpack_u64(prompt.block_hashes, "prompt.block_hashes")

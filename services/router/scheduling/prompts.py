"""Converts prompts to block hashes and checks them against the block scheme of the model."""

from __future__ import annotations

from array import array
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from services.common.base.errors import ErrorKind, SluiceError, invalid, quoted
from services.common.base.packing import pack_u64, unpack_u64
from services.common.types.hashing import HASH_SCHEME, block_hashes
from services.router.scheduling.policies.offers import Demand
from services.router.scheduling.queries import Prompt
from services.router.state.workers.worker import Worker

NOMINAL_BLOCK = 16  # tokens per block of load for models without KV blocks


@dataclass(frozen=True, slots=True)
class Blocks:
    """A prompt as blocks.

    Attributes:
        size: tokens per block.
        count: blocks of the prompt, including a partial one.
        encoding: work of encoding each media item: the number of leading blocks that contain all of its tokens, and the
            work in blocks of prefill.
        blind: the prompt has full blocks, but the caller sent neither token ids nor hashes.
    """

    hashes: array[int]
    size: int
    count: int
    tokens: int
    blind: bool = False
    encoding: tuple[tuple[int, float], ...] = ()

    def demand(self, output_tokens: int) -> Demand:
        """Returns the blocks that a request with this prompt and output needs."""
        return Demand(self.count, -(-output_tokens // self.size), self.encoding)


def in_blocks(prompt: Prompt, workers: Sequence[Worker]) -> Blocks:
    """Returns the blocks of a prompt, hashing its token ids if needed.

    Args:
        workers: the model's workers; all workers with blocks have the same block size.

    Raises:
        SluiceError: INVALID_ARGUMENT for a malformed prompt or an unknown hash scheme, FAILED_PRECONDITION if the block
            size or the hash scheme differs from the model's.
    """
    if len(prompt.token_ids) % 4:
        raise invalid(
            f"token_ids has {len(prompt.token_ids)} bytes; send packed u32 (4 bytes each).", param="prompt.token_ids"
        )
    card: Worker | None = None
    for worker in workers:
        if worker.block_size:
            card = worker
            break
    if prompt.block_hashes:
        hashes, size = _given(prompt, card), prompt.block_size
    elif card is not None and prompt.token_ids:
        size, media = card.block_size, prompt.media
        hashes = block_hashes(prompt.token_ids, size, prompt.lora, prompt.cache_salt, media=media)
    else:
        hashes, size = array("Q"), card.block_size if card else NOMINAL_BLOCK
    tokens = max(prompt.prompt_tokens, len(prompt.token_ids) // 4, len(hashes) * size)
    blind = card is not None and not hashes and tokens >= size
    encoding: tuple[tuple[int, float], ...] = ()
    if prompt.media:
        encoding = tuple((-(-span.end // size), (span.encoder_tokens or span.length) / size) for span in prompt.media)
    return Blocks(hashes, size, -(-tokens // size), tokens, blind, encoding)


def routed(prompt: Prompt, blocks: Blocks) -> Prompt:
    """Returns the token ids and block hashes of a prompt in the form that a query returns."""
    if not blocks.hashes:
        return Prompt(token_ids=prompt.token_ids)
    return Prompt(
        token_ids=prompt.token_ids,
        block_hashes=pack_u64(blocks.hashes),
        hash_scheme=HASH_SCHEME,
        block_size=blocks.size,
    )


def _given(prompt: Prompt, card: Worker | None) -> array[int]:
    scheme = prompt.hash_scheme or HASH_SCHEME
    if scheme != HASH_SCHEME:
        raise invalid(
            f"Unknown hash scheme {quoted(scheme)}; use {HASH_SCHEME!r} or send token_ids.",
            param="prompt.hash_scheme",
            code="unknown_hash_scheme",
        )
    if not prompt.block_size:
        raise invalid("Missing block_size; send it with block_hashes.", param="prompt.block_size")
    if card is not None and (prompt.block_size, scheme) != (card.block_size, card.hash_scheme):
        raise SluiceError(
            ErrorKind.FAILED_PRECONDITION,
            f"block_hashes are of blocks of {prompt.block_size} tokens, but model {card.model} has blocks of "
            f"{card.block_size} tokens ({card.hash_scheme}); hash with that block size and scheme, or send token_ids.",
            param="prompt.block_size",
            code="block_size_mismatch",
        )
    return unpack_u64(prompt.block_hashes, "prompt.block_hashes")


Tokenize: TypeAlias = Callable[[str, Prompt, Sequence[Worker], bool], Awaitable[Prompt]]
"""Tokenizes the OpenAI body of a prompt for the workers of a model; returns the prompt as block hashes, if the workers
have blocks, and as token ids if the last argument is true or there are no hashes."""


async def no_preprocess(model: str, prompt: Prompt, workers: Sequence[Worker], ids: bool) -> Prompt:
    """Raises SluiceError (FAILED_PRECONDITION): OpenAI bodies are rejected without a preprocess service."""
    raise SluiceError(
        ErrorKind.FAILED_PRECONDITION,
        "This router has no preprocess service to tokenize openai_body; set --preprocess, or send token_ids or "
        "block_hashes.",
        param="prompt.openai_body",
        code="no_preprocess",
    )

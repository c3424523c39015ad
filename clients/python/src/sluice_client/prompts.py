"""Prepares prompts for the router: by token ids, block hashes, OpenAI body, or length alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from sluice_client.hashing import HASH_SCHEME, block_hashes
from sluice_client.packing import TokenIds, pack_u64, packed_ids
from sluice_client.wire import PromptRef, RouteQueryResponse

PromptLike: TypeAlias = PromptRef | TokenIds
"""A prompt prepared by one of the functions here, or its token ids."""


def by_tokens(token_ids: TokenIds) -> PromptRef:
    """Returns a prompt of token ids, which the router hashes; 4 bytes per token on the wire."""
    return PromptRef(token_ids=packed_ids(token_ids))


def by_hashes(hashes: Iterable[int], block_size: int, prompt_tokens: int = 0) -> PromptRef:
    """Returns a prompt of existing block hashes, such as those of Preprocess.Tokenize.

    Args:
        hashes: chained, one per full block; adapter and salt are part of them.
        block_size: tokens per block; must be the model's.
        prompt_tokens: length of the prompt; 0 for a prompt that ends with its last full block.
    """
    return PromptRef(
        block_hashes=pack_u64(hashes), hash_scheme=HASH_SCHEME, block_size=block_size, prompt_tokens=prompt_tokens
    )


def hashed_here(token_ids: TokenIds, block_size: int, lora: str = "", cache_salt: str = "") -> PromptRef:
    """Returns a prompt of block hashes computed in this process; 8 bytes per block on the wire, no token ids."""
    packed = packed_ids(token_ids)
    return by_hashes(block_hashes(packed, block_size, lora, cache_salt), block_size, len(packed) // 4)


def by_length(prompt_tokens: int) -> PromptRef:
    """Returns a prompt with only its number of tokens, enough for policies that ignore prefixes."""
    return PromptRef(prompt_tokens=prompt_tokens)


def by_openai_body(body: bytes) -> PromptRef:
    """Returns a prompt of the JSON body of a chat completion or completion; the router needs a preprocess service."""
    return PromptRef(openai_body=body)


def by_answer(answer: RouteQueryResponse) -> PromptRef:
    """Returns the prompt of an earlier response with `return_token_ids`, which is not tokenized again.

    Uses its block hashes if it has any, else its token ids.
    """
    if not answer.block_hashes:
        return by_tokens(answer.token_ids)
    return PromptRef(
        block_hashes=answer.block_hashes,
        hash_scheme=answer.hash_scheme,
        block_size=answer.block_size,
        prompt_tokens=len(answer.token_ids) // 4,
    )


def prompt_ref(prompt: PromptLike) -> PromptRef:
    """Returns the message for a prompt."""
    return prompt if isinstance(prompt, PromptRef) else by_tokens(prompt)

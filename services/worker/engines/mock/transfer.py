"""The handoff of a mock prefill worker: identifies the prompt, the first token and the size of the cache transfer.

Layout, little-endian: version u8, block size u32, prompt tokens u32, first token u32, cache bytes u64, then the chained
hashes of the prompt's full blocks, u64 each.
"""

from __future__ import annotations

from dataclasses import dataclass
from struct import Struct

from services.common.base.errors import SluiceError, invalid
from services.common.base.packing import pack_u64
from services.common.types.hashing import block_hashes
from services.worker.contract.generation import GenerateRequest
from services.worker.engines.mock.sequence import Sequence
from services.worker.engines.mock.text import Answer

VERSION = 1
_HEADER = Struct("<BIIIQ")


@dataclass(frozen=True, slots=True)
class Transfer:
    """`hashes` are packed u64; `cache_bytes` determines the duration of the transfer."""

    block_size: int
    prompt_tokens: int
    first_token: int
    cache_bytes: int
    hashes: bytes

    def pack(self) -> bytes:
        """Returns the handoff as bytes."""
        header = _HEADER.pack(VERSION, self.block_size, self.prompt_tokens, self.first_token, self.cache_bytes)
        return header + self.hashes

    @classmethod
    def unpack(cls, data: bytes) -> Transfer:
        """Parses the bytes of `pack`; raises SluiceError(INVALID_ARGUMENT) for anything else."""
        if len(data) < _HEADER.size or data[0] != VERSION or (len(data) - _HEADER.size) % 8:
            raise _rejected("was not created by a mock prefill worker of this version", "malformed_handoff")
        _, block_size, prompt_tokens, first_token, cache_bytes = _HEADER.unpack_from(data)
        return cls(block_size, prompt_tokens, first_token, cache_bytes, data[_HEADER.size :])

    def check(self, request: GenerateRequest, block_size: int) -> None:
        """Raises SluiceError(INVALID_ARGUMENT) when the handoff is for another prompt."""
        if self.block_size != block_size:
            raise _rejected(
                f"has blocks of {self.block_size} tokens, and this worker of {block_size}", "foreign_handoff"
            )
        spans = [item.span for item in request.media]
        hashes = block_hashes(request.token_ids, block_size, request.lora, request.cache_salt, media=spans)
        if self.prompt_tokens != len(request.token_ids) or self.hashes != pack_u64(hashes):
            raise _rejected("is for another prompt", "foreign_handoff")


def transfer_of(sequence: Sequence, block_size: int, token_bytes: int) -> Transfer:
    """Returns the handoff of a prefilled sequence; `token_bytes` is the cache size of one token."""
    prompt = sequence.prompt_tokens
    full_blocks = prompt // block_size
    hashes = sequence.hashes_upto(full_blocks, block_size)[:full_blocks]
    return Transfer(block_size, prompt, sequence.tokens[prompt], prompt * token_bytes, pack_u64(hashes))


def accept(data: bytes, request: GenerateRequest, answer: Answer, block_size: int) -> Transfer:
    """Returns the handoff if it matches the request; raises SluiceError(INVALID_ARGUMENT) otherwise."""
    transfer = Transfer.unpack(data)
    transfer.check(request, block_size)
    if len(answer.token_ids) < 2 or answer.token_ids[0] != transfer.first_token:
        raise _rejected("has another first token than this request", "foreign_handoff")
    return transfer


def _rejected(why: str, code: str) -> SluiceError:
    return invalid(f"The handoff {why}; run the prefill again.", param="disaggregation", code=code)

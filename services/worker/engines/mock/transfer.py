"""What a mock prefill worker hands over: which prompt, how it goes on, and how much cache would travel.

Little-endian: version u8, block size u32, prompt tokens u32, first token u32, bytes of cache u64, then the chained
hashes of the prompt's full blocks, u64 each.
"""

from __future__ import annotations

from dataclasses import dataclass
from struct import Struct

from services.common.errors import SluiceError, invalid
from services.common.hashing import block_hashes
from services.common.packing import pack_u64
from services.worker.contract.generation import GenerateRequest
from services.worker.engines.mock.sequence import Sequence
from services.worker.engines.mock.text import Answer

VERSION = 1
_HEAD = Struct("<BIIIQ")


@dataclass(frozen=True, slots=True)
class Transfer:
    """`hashes` is packed u64; `cache_bytes` decides how long the transfer takes."""

    block_size: int
    prompt_tokens: int
    first_token: int
    cache_bytes: int
    hashes: bytes

    def pack(self) -> bytes:
        """The wire form."""
        head = _HEAD.pack(VERSION, self.block_size, self.prompt_tokens, self.first_token, self.cache_bytes)
        return head + self.hashes

    @classmethod
    def unpack(cls, data: bytes) -> Transfer:
        """SluiceError(INVALID_ARGUMENT) for anything but the wire form of this version."""
        if len(data) < _HEAD.size or data[0] != VERSION or (len(data) - _HEAD.size) % 8:
            raise refused("is not one of a mock prefill worker of this version", "malformed_handoff")
        _, block_size, prompt_tokens, first_token, cache_bytes = _HEAD.unpack_from(data)
        return cls(block_size, prompt_tokens, first_token, cache_bytes, data[_HEAD.size :])

    def check(self, request: GenerateRequest, block_size: int) -> None:
        """Raises SluiceError(INVALID_ARGUMENT) when this is not the prompt whose cache was handed over."""
        if self.block_size != block_size:
            raise refused(f"has blocks of {self.block_size} tokens and this worker {block_size}", "foreign_handoff")
        hashes = block_hashes(request.token_ids, block_size, request.lora, request.cache_salt)
        if self.prompt_tokens != len(request.token_ids) or self.hashes != pack_u64(hashes):
            raise refused("belongs to another prompt", "foreign_handoff")


def transfer_of(sequence: Sequence, block_size: int, token_bytes: int) -> Transfer:
    """What a prefilled sequence hands over; `token_bytes` is the cache of one token."""
    prompt = sequence.prompt_tokens
    full = prompt // block_size
    hashes = sequence.hash_upto(full, block_size)[:full]
    return Transfer(block_size, prompt, sequence.tokens[prompt], prompt * token_bytes, pack_u64(hashes))


def accepted(data: bytes, request: GenerateRequest, answer: Answer, block_size: int) -> Transfer:
    """The handoff of exactly this request; SluiceError(INVALID_ARGUMENT) for any other."""
    transfer = Transfer.unpack(data)
    transfer.check(request, block_size)
    if len(answer.token_ids) < 2 or answer.token_ids[0] != transfer.first_token:
        raise refused("goes on with another token than this request does", "foreign_handoff")
    return transfer


def refused(why: str, code: str) -> SluiceError:
    """A handoff that cannot be used."""
    return invalid(f"The handoff {why}; run the prefill again.", param="disaggregation", code=code)

"""Makes the ids of prompts that come as text or as chats, off the event loop and within bounds."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from services.common.errors import overloaded
from services.common.packing import unpack_u32
from services.preprocess.pool import ComputePool
from services.preprocess.tokenizer import TokenizerProtocol, packed_chat, packed_text
from services.preprocess.validate import too_large
from services.worker.generation import GenerateRequest
from services.worker.processing.body import ChatBody, read_body

TEXT, CHAT = "prompt", "messages"


@dataclass(frozen=True, slots=True)
class PromptBounds:
    """What prompts may use up.

    Attributes:
        max_prompt_bytes: of one prompt, as it comes.
        max_held_bytes: of all that wait for their ids; what a thread is still at after its caller has left is not
            counted, which is at most one prompt a thread.
        threads: prompts that are computed at once.
        max_waiting: prompts that wait for a thread.
        limit_s: seconds from a prompt's arrival to its ids.
    """

    max_prompt_bytes: int = 4 << 20
    max_held_bytes: int = 64 << 20
    threads: int = 2
    max_waiting: int = 1024
    limit_s: float = 10.0


@dataclass(frozen=True, slots=True)
class MadePrompt:
    """Ids, and the chat they were made of; None for text."""

    token_ids: array[int]
    body: ChatBody | None = None


class PromptMaker:
    """One model's prompts.

    Args:
        tokenizer: called from several threads.
    """

    def __init__(self, tokenizer: TokenizerProtocol, bounds: PromptBounds) -> None:
        self._tokenizer = tokenizer
        self._bounds = bounds
        self._held = 0
        self._pool = ComputePool(bounds.threads, bounds.max_waiting, 0, bounds.limit_s)

    @property
    def held_bytes(self) -> int:
        """Bytes of prompts that wait for their ids."""
        return self._held

    async def make(self, request: GenerateRequest) -> MadePrompt:
        """The ids of a request's text or chat.

        Raises:
            SluiceError: INVALID_ARGUMENT naming the field, TOO_LARGE, OVERLOADED while too many wait,
                DEADLINE_EXCEEDED after `limit_s`.
        """
        text, document = request.text, request.messages_json or b""
        if text is not None:
            size, job = len(text.encode()), partial(_of_text, self._tokenizer, text)
        else:
            size, job = len(document), partial(_of_chat, self._tokenizer, document)
        if size > self._bounds.max_prompt_bytes:
            raise too_large(size, self._bounds.max_prompt_bytes, TEXT if text is not None else CHAT)
        with self._holding(size):
            return await self._pool.run(job, size, may_block=True)

    @contextmanager
    def _holding(self, size: int) -> Iterator[None]:
        if self._held + size > self._bounds.max_held_bytes:
            raise overloaded("Too many prompts wait to be tokenized on this worker; try again later.")
        self._held += size
        try:
            yield
        finally:
            self._held -= size

    def close(self) -> None:
        """Drops what waits."""
        self._pool.close()


def _of_text(tokenizer: TokenizerProtocol, text: str) -> MadePrompt:
    return MadePrompt(unpack_u32(packed_text(tokenizer, text, None)))


def _of_chat(tokenizer: TokenizerProtocol, document: bytes) -> MadePrompt:
    body = read_body(document)
    return MadePrompt(unpack_u32(packed_chat(tokenizer, body.chat)), body)

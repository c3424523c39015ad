"""Makes the ids of prompts that come as text or as chats, off the event loop and within bounds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from services.common.errors import overloaded
from services.common.packing import unpack_u32
from services.preprocess.protocol import TokenizerProtocol, packed_chat, packed_text
from services.preprocess.thread_pool import ComputePool
from services.preprocess.validation import too_large
from services.worker.contract.engine import EngineConfig
from services.worker.contract.generation import GenerateRequest
from services.worker.generation.validation import validate_made_prompt
from services.worker.local_processing.body import read_body
from services.worker.local_processing.completing import MadePrompt, completed
from services.worker.processing_options import PromptBounds

TEXT, CHAT = "prompt", "messages"


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

    async def prepare(self, request: GenerateRequest, config: EngineConfig) -> GenerateRequest:
        """The same request with ids instead of its text or chat.

        Raises:
            SluiceError: as `make`; INVALID_ARGUMENT when the prompt does not fit.
        """
        made = await self.make(request)
        validate_made_prompt(made.token_ids, config, TEXT if made.body is None else CHAT)
        return completed(request, made, self._tokenizer.facts, config.context_length)

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

"""Tokenizes text and chat prompts outside the event loop, within resource limits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from services.common.base.errors import overloaded
from services.common.base.packing import unpack_u32
from services.preprocess.contract.tokenizer import TokenizerProtocol
from services.preprocess.contract.validation import too_large
from services.preprocess.templates.open_thought import ends_in_thought
from services.preprocess.thread_pool import ComputePool
from services.worker.contract.engine import EngineConfig
from services.worker.contract.generation import GenerateRequest
from services.worker.generation.validation import validate_prepared_prompt
from services.worker.local_processing.body import read_body
from services.worker.local_processing.completing import TokenizedPrompt, completed
from services.worker.settings import PromptBounds

TEXT, CHAT = "prompt", "messages"


class PromptMaker:
    """Tokenizes the prompts of one model.

    Args:
        tokenizer: must be thread-safe.
        bounds: resource limits.
    """

    def __init__(self, tokenizer: TokenizerProtocol, bounds: PromptBounds) -> None:
        self._tokenizer = tokenizer
        self._bounds = bounds
        self._held_bytes = 0
        self._pool = ComputePool(bounds.threads, bounds.max_waiting, 0, bounds.limit_s)

    @property
    def held_bytes(self) -> int:
        """Total size of the prompts being tokenized."""
        return self._held_bytes

    async def make(self, request: GenerateRequest) -> TokenizedPrompt:
        """Tokenizes a request's text or chat.

        Raises:
            SluiceError: INVALID_ARGUMENT with the invalid field, TOO_LARGE, OVERLOADED while too many prompts wait,
                DEADLINE_EXCEEDED after `limit_s`.
        """
        text, document = request.text, request.messages_json or b""
        if text is not None:
            size, job = len(text.encode()), partial(_tokenize_text, self._tokenizer, text)
        else:
            size, job = len(document), partial(_tokenize_chat, self._tokenizer, document)
        if size > self._bounds.max_prompt_bytes:
            raise too_large(size, self._bounds.max_prompt_bytes, TEXT if text is not None else CHAT)
        with self._reserve_bytes(size):
            return await self._pool.run(job, size, may_block=True)

    async def prepare(self, request: GenerateRequest, config: EngineConfig) -> GenerateRequest:
        """Returns the request with token ids in place of its text or chat.

        Raises:
            SluiceError: as `make`; INVALID_ARGUMENT when the prompt does not fit into the context.
        """
        prompt = await self.make(request)
        validate_prepared_prompt(prompt.token_ids, config, TEXT if prompt.body is None else CHAT)
        return completed(request, prompt, self._tokenizer.facts, config.context_length)

    @contextmanager
    def _reserve_bytes(self, size: int) -> Iterator[None]:
        if self._held_bytes + size > self._bounds.max_held_bytes:
            raise overloaded("Too many prompts are waiting for tokenization on this worker; try again later.")
        self._held_bytes += size
        try:
            yield
        finally:
            self._held_bytes -= size

    def close(self) -> None:
        """Drops waiting prompts."""
        self._pool.close()


def _tokenize_text(tokenizer: TokenizerProtocol, text: str) -> TokenizedPrompt:
    return TokenizedPrompt(unpack_u32(tokenizer.pack_text(text)))


def _tokenize_chat(tokenizer: TokenizerProtocol, document: bytes) -> TokenizedPrompt:
    body = read_body(document)
    packed = tokenizer.pack_chat(body.chat)
    thinking = body.chat.continue_final_message and ends_in_thought(tokenizer, packed, body.chat.messages)
    return TokenizedPrompt(unpack_u32(packed), body, thinking)

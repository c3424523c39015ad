"""Tokenizes OpenAI request bodies with the preprocess service."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, cast

import grpc

from services.common.apis.prompts import ChatPrompt, TextPrompt, TokenPrompt
from services.common.rpc.media import chat_input, read_spans
from services.common.rpc.multiplexed_call import preprocess_stub
from services.common.rpc.replicas import ReplicaSet
from services.router.scheduling.body_intake import HELD_FACTOR, BodyIntake, openai_bodies
from services.router.scheduling.queries import Prompt
from services.router.scheduling.request_bodies import AnyBody, RefusedBody
from services.router.state.workers.worker import Worker
from sluice.v1 import preprocess_pb2, preprocess_pb2_grpc

_TOKENIZE, _BLOCK_SIZE = attrgetter("Tokenize"), attrgetter("block_size")
MAX_CALL_S = 15.0
"""Seconds of a call to preprocess; then DEADLINE_EXCEEDED."""


class PreprocessBodies:
    """Tokenizes bodies with the preprocess service. Call `start` before and `close` after use.

    Args:
        max_pause_s: longest pause between two messages of a session under load.
        intake: bounds and parses bodies; None: with limits of its own.
    """

    def __init__(
        self,
        targets: Sequence[str],
        credentials: grpc.ChannelCredentials | None,
        timeout_s: float = MAX_CALL_S,
        max_pause_s: float = 0.0,
        intake: BodyIntake | None = None,
    ) -> None:
        self._intake = intake or openai_bodies()
        self._replicas: ReplicaSet[preprocess_pb2_grpc.PreprocessAsyncStub] = ReplicaSet(
            "preprocess",
            targets,
            partial(preprocess_stub, max_pause_s=max_pause_s),
            credentials,
            shared=lambda stub: cast(Any, stub.Tokenize),
        )
        self._timeout_s = timeout_s

    async def start(self) -> None:
        """Starts to resolve and connect replicas."""
        await self._replicas.start()

    async def close(self) -> None:
        """Closes all channels."""
        await self._replicas.close()

    def tokenized(self, model: str, prompt: Prompt, workers: Sequence[Worker], ids: bool) -> Awaitable[Prompt]:
        """Returns the prompt as token ids and, if the model has blocks, block hashes.

        Args:
            ids: whether the token ids are needed although there are hashes.

        Raises:
            SluiceError: INVALID_ARGUMENT for a body without a prompt or beyond its budgets, UNAVAILABLE or
                DEADLINE_EXCEEDED if no replica responds, or the error that preprocess returned.
        """
        if prompt.body is not None:
            return self._tokenized(model, prompt, prompt.body, workers, ids)
        return self._tokenized_text(model, prompt, workers, ids)

    async def _tokenized_text(self, model: str, prompt: Prompt, workers: Sequence[Worker], ids: bool) -> Prompt:
        with self._intake.holding(HELD_FACTOR * len(prompt.openai_body)):
            body = await self._intake.read(prompt.openai_body)
            return await self._tokenized(model, prompt, body, workers, ids)

    async def _tokenized(
        self, model: str, prompt: Prompt, body: AnyBody, workers: Sequence[Worker], ids: bool
    ) -> Prompt:
        if isinstance(body, RefusedBody):
            raise body.error
        block_size = max(map(_BLOCK_SIZE, workers), default=0)  # of those with blocks, it is the same
        request = _request(body.prompt)
        request.model = model
        request.block_size = block_size
        request.hashes_only = not ids
        request.lora = prompt.lora
        request.cache_salt = prompt.cache_salt or body.cache_salt
        waits = bool(request.chat.media)
        response = await self._replicas.call(_TOKENIZE, request, self._timeout_s, waits=waits)
        hashed = bool(response.block_hashes)
        return Prompt(
            token_ids=response.token_ids,
            block_hashes=response.block_hashes,
            hash_scheme=response.hash_scheme if hashed else "",
            block_size=block_size if hashed else 0,
            prompt_tokens=response.prompt_tokens or len(response.token_ids) // 4,
            lora=prompt.lora,
            cache_salt=request.cache_salt,
            media=read_spans(response.media) if response.media else (),
        )


def _request(prompt: ChatPrompt | TextPrompt | TokenPrompt) -> preprocess_pb2.TokenizeRequest:
    match prompt:
        case ChatPrompt():
            return preprocess_pb2.TokenizeRequest(chat=chat_input(prompt))
        case TextPrompt():
            text = preprocess_pb2.TextInput(text=prompt.text, add_special_tokens=prompt.add_special_tokens)
            return preprocess_pb2.TokenizeRequest(text=text)
        case TokenPrompt():
            return preprocess_pb2.TokenizeRequest(tokens=preprocess_pb2.TokenInput(token_ids=prompt.token_ids))

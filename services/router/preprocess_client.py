"""Tokenizes OpenAI request bodies with the preprocess service."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import grpc

from services.common.rpc.media import input_messages, read_spans
from services.common.rpc.multiplexed_call import preprocess_stub
from services.common.rpc.replicas import ReplicaSet
from services.router.scheduling.openai_body import Body, ChatBody, TextBody, read_body
from services.router.scheduling.queries import Prompt
from services.router.workers.worker import Worker
from sluice.v1 import preprocess_pb2, preprocess_pb2_grpc

READ_INLINE = 32 << 10  # bytes of JSON parsed on the event loop; parsing more would delay other queries


class PreprocessBodies:
    """Implements Bodies with the preprocess service. Call `start` before and `close` after use.

    Args:
        max_pause_s: longest pause between two messages of a session under load.
    """

    def __init__(
        self,
        targets: Sequence[str],
        credentials: grpc.ChannelCredentials | None,
        timeout_s: float,
        max_pause_s: float = 0.0,
    ) -> None:
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

    async def tokenized(self, model: str, prompt: Prompt, workers: Sequence[Worker], ids: bool = True) -> Prompt:
        """Returns the prompt as token ids and, if the model has blocks, block hashes.

        Args:
            ids: whether the token ids are needed although there are hashes.

        Raises:
            SluiceError: INVALID_ARGUMENT for a body without a prompt, UNAVAILABLE or DEADLINE_EXCEEDED if no replica
                responds, or the error that preprocess returned.
        """
        body = prompt.body
        if body is None:
            text = prompt.openai_body
            body = read_body(text) if len(text) <= READ_INLINE else await asyncio.to_thread(read_body, text)
        block_size = next((worker.block_size for worker in workers if worker.block_size), 0)
        request = _request(body)
        request.model = model
        request.block_size = block_size
        request.hashes_only = not ids
        request.lora = prompt.lora
        request.cache_salt = prompt.cache_salt or body.cache_salt
        waits = bool(request.chat.media)
        response = await self._replicas.call(lambda stub: stub.Tokenize, request, self._timeout_s, waits=waits)
        hashed = bool(response.block_hashes)
        return replace(
            prompt,
            openai_body=b"",
            body=None,
            cache_salt=request.cache_salt,
            token_ids=response.token_ids,
            block_hashes=response.block_hashes,
            hash_scheme=response.hash_scheme if hashed else "",
            block_size=block_size if hashed else 0,
            prompt_tokens=response.prompt_tokens or len(response.token_ids) // 4,
            media=read_spans(response.media),
        )


def _request(body: Body) -> preprocess_pb2.TokenizeRequest:
    if isinstance(body, ChatBody):
        return preprocess_pb2.TokenizeRequest(
            chat=preprocess_pb2.ChatInput(
                messages_json=body.messages_json,
                tools_json=body.tools_json,
                template_kwargs_json=body.template_kwargs_json,
                chat_template=body.chat_template,
                add_generation_prompt=body.add_generation_prompt,
                continue_final_message=body.continue_final_message,
                documents_json=body.documents_json,
                tool_choice_json=body.tool_choice_json,
                media=input_messages(body.media),
            )
        )
    if isinstance(body, TextBody):
        return preprocess_pb2.TokenizeRequest(
            text=preprocess_pb2.TextInput(text=body.text, add_special_tokens=body.add_special_tokens)
        )
    return preprocess_pb2.TokenizeRequest(tokens=preprocess_pb2.TokenInput(token_ids=body.token_ids))

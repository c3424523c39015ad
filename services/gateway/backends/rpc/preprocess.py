"""Client of the preprocess service, which tokenizes prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast
from weakref import WeakValueDictionary

import grpc

from services.common.base.errors import internal
from services.common.net.intake.json_intake import foreign_json
from services.common.rpc.concurrency_limiter import ConcurrencyLimiter
from services.common.rpc.generation import read_sampling
from services.common.rpc.media import chat_input, read_files, read_spans
from services.common.rpc.multiplexed_call import preprocess_stub
from services.common.rpc.replicas import ReplicaSet
from services.common.types.media.parts import MediaInput
from services.common.types.media.spans import MediaFile, MediaKind, content_hash
from services.gateway.core import context
from services.gateway.core.request import (
    ChatPrompt,
    EmbedsPrompt,
    Prompt,
    PromptMedia,
    TextPrompt,
    TokenizedPrompt,
    TokenPrompt,
)
from sluice.v1 import preprocess_pb2, preprocess_pb2_grpc

LIST_TIMEOUT_S = 2.0
TOKENIZE_SHARE = 0.5
PLACEHOLDER_TOKEN = bytes(4)
MEDIA_AT_ONCE = 128
"""Most concurrent calls with media items; those of text do not wait for them."""
TEMPLATES_AT_ONCE = 32
"""Most concurrent calls of one tenant with templates of its own; other calls do not wait for them here."""
LARGE_FILES = 256 << 10
"""Least bytes of the media files of a request that are hashed in a thread."""

A = TypeVar("A")


@dataclass(frozen=True, slots=True)
class TokenizerIdentity:
    """What preprocess reports of a tokenizer; the fingerprints are those of `sluice.v1.TokenizerSpec`.

    Attributes:
        media: kinds of media items that chats may have.
        template: what the model's chat template shows; None: not known.
    """

    processor: str
    fingerprint: str
    prompt_fingerprint: str
    media_fingerprint: str = ""
    media: frozenset[str] = frozenset()
    template: Mapping[str, Any] | None = None


class PreprocessClient:
    """Sends calls to the least loaded preprocess replica.

    Args:
        on_event: called with each incident of a call; see ReplicaSet.
        max_pause_s: longest pause between two messages of a session under load.
    """

    def __init__(
        self,
        targets: Sequence[str],
        credentials: grpc.ChannelCredentials | None,
        tokenize_timeout_s: float,
        on_event: Callable[[str], None] = lambda event: None,
        max_pause_s: float = 0.0,
    ) -> None:
        self.replicas: ReplicaSet[preprocess_pb2_grpc.PreprocessAsyncStub] = ReplicaSet(
            "preprocess",
            targets,
            partial(preprocess_stub, max_pause_s=max_pause_s),
            credentials,
            shared=lambda stub: cast(Any, stub.Tokenize),
            on_event=on_event,
        )
        self._limiter = ConcurrencyLimiter("preprocess")
        self._media_limiter = ConcurrencyLimiter("preprocess", MEDIA_AT_ONCE)
        self._template_limiters: WeakValueDictionary[str, ConcurrencyLimiter] = WeakValueDictionary()  # by tenant
        self._timeout_s = tokenize_timeout_s

    async def _call(
        self,
        method: Callable[[preprocess_pb2_grpc.PreprocessAsyncStub], Callable[..., Awaitable[A]]],
        request: Any,
        hedge: str,
        media: bool = False,
        template: bool = False,
    ) -> A:
        """Makes a call within the concurrency limit and its share of the request's deadline.

        Args:
            media: the call waits for hosts and for images of other requests; such calls have a limit of their own.
            template: the call waits for templates of other requests; such calls have a limit for each tenant.
        """
        deadline = context.current().deadline
        limiter = self._template_limiter() if template else self._media_limiter if media else self._limiter
        await limiter.enter(deadline.left_s)
        try:
            share_s = deadline.share(TOKENIZE_SHARE, self._timeout_s)
            return await self.replicas.call(method, request, share_s, hedge=hedge, waits=media or template)
        finally:
            limiter.leave()

    def _template_limiter(self) -> ConcurrencyLimiter:
        tenant = context.current().permit.owner
        limiter = self._template_limiters.get(tenant)
        if limiter is None:
            limiter = self._template_limiters[tenant] = ConcurrencyLimiter("preprocess", TEMPLATES_AT_ONCE)
        return limiter

    async def tokenize(
        self, model: str, prompt: Prompt, block_size: int = 0, lora: str = "", cache_salt: str = ""
    ) -> TokenizedPrompt:
        """Returns the token ids of a prompt, and its block hashes if there is a block size.

        Raises:
            SluiceError: as preprocess does.
        """
        request = preprocess_pb2.TokenizeRequest(model=model, block_size=block_size, lora=lora, cache_salt=cache_salt)
        if isinstance(prompt, ChatPrompt):
            request.chat.CopyFrom(_chat_input(prompt))
        elif isinstance(prompt, TextPrompt):
            request.text.text = prompt.text
            if prompt.add_special_tokens is not None:
                request.text.add_special_tokens = prompt.add_special_tokens
            request.text.second_text = prompt.second_text
        elif isinstance(prompt, TokenPrompt):
            request.tokens.token_ids = prompt.token_ids
        else:  # input embeddings: only the model's stop tokens and defaults are needed
            request.tokens.token_ids = PLACEHOLDER_TOKEN
            request.block_size = 0
        media = prompt.media if isinstance(prompt, ChatPrompt) else ()
        template = isinstance(prompt, ChatPrompt) and bool(prompt.chat_template)
        if media:  # as a unary call, so that the files do not delay the calls that share the session
            response = await self._call(_unary_tokenize, request, "", media=True, template=template)
        else:
            hedge = "" if template else "tokenize"  # a template that takes long takes long elsewhere, too
            response = await self._call(lambda stub: stub.Tokenize, request, hedge, template=template)
        embeds = prompt if isinstance(prompt, EmbedsPrompt) else None
        return TokenizedPrompt(
            token_ids=response.token_ids if embeds is None else b"",
            block_hashes=response.block_hashes,
            hash_scheme=response.hash_scheme,
            stop_token_ids=response.stop_token_ids,
            eos_token_ids=response.eos_token_ids,
            context_length=response.context_length,
            prompt_tail=response.prompt_tail if embeds is None else b"",
            embeds=embeds,
            defaults=read_sampling(response.default_sampling),
            default_max_tokens=response.default_max_tokens if response.HasField("default_max_tokens") else None,
            without_effect=tuple(response.without_effect),
            notes=tuple(response.notes),
            second_text_at=response.second_text_at,
            media=await _media_of(media, response) if media else (),
            thinking=response.thinking,
        )

    async def detokenize(self, model: str, token_ids: bytes, skip_special_tokens: bool = True) -> str:
        """Returns the text of packed token ids."""
        request = preprocess_pb2.DetokenizeRequest(
            model=model, token_ids=token_ids, skip_special_tokens=skip_special_tokens
        )
        response = await self._call(lambda stub: stub.Detokenize, request, "detokenize")
        return response.text

    async def tokenizers(self) -> dict[str, TokenizerIdentity]:
        """Returns the loaded tokenizers of one replica, by model."""
        request = preprocess_pb2.ListTokenizersRequest()
        response = await self.replicas.call(lambda stub: stub.ListModels, request, LIST_TIMEOUT_S)
        return {
            info.model: TokenizerIdentity(
                info.tokenizer.processor,
                info.tokenizer.fingerprint,
                info.tokenizer.prompt_fingerprint,
                info.tokenizer.media_fingerprint,
                frozenset(kind.capability for kind in MediaKind if int(kind) in info.media),
                _template(info.template_json),
            )
            for info in response.models
            if info.loaded
        }

    async def token_texts(self, model: str, token_ids: bytes) -> list[str]:
        """Returns the text of each of the packed token ids separately."""
        request = preprocess_pb2.DetokenizeRequest(model=model, token_ids=token_ids, each=True)
        response = await self._call(lambda stub: stub.Detokenize, request, "detokenize")
        return list(response.each)

    async def render(self, model: str, prompt: ChatPrompt) -> str:
        """Returns the prompt of a chat as text."""
        request = preprocess_pb2.RenderRequest(model=model, chat=_chat_input(prompt))
        template = bool(prompt.chat_template)
        hedge = "" if template else "tokenize"
        response = await self._call(lambda stub: stub.Render, request, hedge, template=template)
        return response.text


def _chat_input(prompt: ChatPrompt) -> preprocess_pb2.ChatInput:
    return chat_input(prompt, context.current().permit.owner if prompt.chat_template else "")


def _unary_tokenize(stub: preprocess_pb2_grpc.PreprocessAsyncStub) -> Callable[..., Awaitable[Any]]:
    return cast(Any, stub.Tokenize).unary  # type: ignore[no-any-return]


async def _media_of(items: Sequence[MediaInput], response: preprocess_pb2.TokenizeResponse) -> tuple[PromptMedia, ...]:
    """Returns `_media(...)`; large files are hashed in a thread."""
    if sum(len(item.data) for item in items) < LARGE_FILES:
        return _media(items, response)
    return await asyncio.to_thread(_media, items, response)


def _media(items: Sequence[MediaInput], response: preprocess_pb2.TokenizeResponse) -> tuple[PromptMedia, ...]:
    """Returns the media items of a tokenized prompt: the client's files, and those that preprocess has fetched.

    Raises:
        SluiceError: INTERNAL if the response has other items than the request.
    """
    spans = read_spans(response.media, len(response.token_ids) // 4)
    files = {file.hash: file for file in read_files(response.fetched)}
    for item in items:
        if item.data:
            file = MediaFile(content_hash(item.data), item.data, item.media_type)
            files.setdefault(file.hash, file)
    if len(spans) != len(items) or any(span.hash not in files for span in spans):
        raise internal("The preprocess service returned other media items than the request has.")
    return tuple(PromptMedia(span, files[span.hash]) for span in spans)


def _template(document: bytes) -> Mapping[str, Any] | None:
    """Returns what a chat template shows, as a replica reports it."""
    shown = foreign_json(document, "template_json") if document else None
    return shown if isinstance(shown, dict) else None

"""The Preprocess gRPC service: translates messages between gRPC and the tokenizers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import lru_cache
from time import perf_counter
from typing import Any, TypeVar

import grpc
import orjson

from services.common.base.errors import SluiceError, check_name, invalid
from services.common.base.packing import pack_u32, pack_u64, unpack_u32
from services.common.net.intake.json_intake import foreign_json
from services.common.observability import telemetry
from services.common.packages.model_files import ModelSpec
from services.common.rpc.call_server import Metadata, MultiplexedCallServer
from services.common.rpc.errors import answer
from services.common.rpc.generation import write_sampling
from services.common.rpc.media import file_messages, read_inputs, span_messages
from services.common.types.hashing import HASH_SCHEME, PrefixHashes
from services.common.types.media.spans import MediaSpan
from services.preprocess.contract.generation_defaults import GenerationDefaults
from services.preprocess.contract.tokenizer import ChatRequest, PendingPrompt, TokenizerProtocol, kinds_of
from services.preprocess.contract.validation import parse_chat, too_large
from services.preprocess.media.expansion import expand, look_up
from services.preprocess.media.loading import LoadedMedia, MediaLoader, check_kinds, not_supported
from services.preprocess.metrics import Instruments, watch_media, watch_tokenizers
from services.preprocess.templates.fair_calls import origin as template_origin
from services.preprocess.templates.open_thought import ends_in_thought
from services.preprocess.thread_pool import ComputePool
from services.preprocess.tokenizers.engine_extensions import MediaTokenizer
from services.preprocess.tokenizers.registry import ModelRegistry
from sluice.v1 import common_pb2, preprocess_pb2, preprocess_pb2_grpc

PROMPT_TAIL_TOKENS = 16
MAX_EACH = 32_768
"""Token ids of a call for the text of each of them; more are refused with INVALID_ARGUMENT."""
NO_MEDIA = LoadedMedia()
COST_PER_TOKEN = 32  # decoding tokens one by one, relative to decoding them together

_hashes = PrefixHashes()  # of all models: the seed and the tokens tell them apart

Q = TypeVar("Q")
A = TypeVar("A")
Context = grpc.aio.ServicerContext[Any, Any]


class PreprocessService(preprocess_pb2_grpc.PreprocessServicer):
    """Serves requests with the tokenizers of a registry.

    Args:
        registry: the models.
        pool: runs the work.
        max_prompt_bytes: maximum input of one request.
        waiters: for tokenizers whose calls wait for another process; defaults to `pool`.
        foreign: for chats with a template in the request, so that hostile ones only delay each other; defaults to
            `waiters`.
        max_pause_s: longest pause between two messages of a session under load.
        media: loads media items; None: chats with them are rejected.
    """

    def __init__(
        self,
        registry: ModelRegistry,
        pool: ComputePool,
        max_prompt_bytes: int,
        waiters: ComputePool | None = None,
        foreign: ComputePool | None = None,
        max_pause_s: float = 0.0,
        media: MediaLoader | None = None,
    ) -> None:
        self._registry = registry
        self._pool = pool
        self._waiters = waiters or pool
        self._foreign = foreign or self._waiters
        self._max_prompt_bytes = max_prompt_bytes
        self._max_pause_s = max_pause_s
        self._media = media
        if media is not None:
            watch_media(media)
        self._instruments = Instruments(pool)
        watch_tokenizers(registry)

    async def Tokenize(
        self, request: preprocess_pb2.TokenizeRequest, context: Context
    ) -> preprocess_pb2.TokenizeResponse:
        return await self._serve("tokenize", self._tokenize, request, context)

    async def Session(  # type: ignore[override]  # uses context.read and context.write
        self, calls: AsyncIterator[preprocess_pb2.TokenizeCalls], context: Context
    ) -> None:
        async def handle(
            call: preprocess_pb2.TokenizeCall, metadata: Metadata
        ) -> Mapping[str, preprocess_pb2.TokenizeResponse]:
            return {"response": await self._staged("tokenize", self._tokenize, call.request, metadata)}

        server = MultiplexedCallServer(
            handle, preprocess_pb2.TokenizeAnswer, preprocess_pb2.TokenizeAnswers, max_pause_s=self._max_pause_s
        )
        await server.serve(context)

    async def Render(self, request: preprocess_pb2.RenderRequest, context: Context) -> preprocess_pb2.RenderResponse:
        return await self._serve("render", self._render, request, context)

    async def Detokenize(
        self, request: preprocess_pb2.DetokenizeRequest, context: Context
    ) -> preprocess_pb2.DetokenizeResponse:
        return await self._serve("detokenize", self._detokenize, request, context)

    async def ListModels(
        self, request: preprocess_pb2.ListTokenizersRequest, context: Context
    ) -> preprocess_pb2.ListTokenizersResponse:
        return await self._serve("list_models", self._list_models, request, context)

    async def GetFingerprint(
        self, request: preprocess_pb2.GetFingerprintRequest, context: Context
    ) -> preprocess_pb2.GetFingerprintResponse:
        return await self._serve("get_fingerprint", self._get_fingerprint, request, context)

    async def _serve(self, verb: str, handler: Callable[[Q], Awaitable[A]], request: Q, context: Context) -> A:
        metadata = context.invocation_metadata() or ()
        return await answer(context, lambda request: self._staged(verb, handler, request, metadata), request)

    async def _staged(self, verb: str, handler: Callable[[Q], Awaitable[A]], request: Q, metadata: Metadata) -> A:
        parent = telemetry.carrier_of_metadata(metadata)
        with telemetry.stage(f"preprocess.{verb}", parent=parent, model=getattr(request, "model", None)):
            started = perf_counter()
            try:
                response = await handler(request)
            except Exception as error:
                self._instruments.failed(verb, error)
                raise
            self._instruments.completed(verb, perf_counter() - started)
            return response

    async def _tokenize(self, request: preprocess_pb2.TokenizeRequest) -> preprocess_pb2.TokenizeResponse:
        _set_origin(request.chat)
        tokenizer = await self._registry.get(request.model)
        self._registry.hold(tokenizer)
        try:
            reply, tokens = await self._tokenize_with(tokenizer, request)
        finally:
            self._registry.release(tokenizer)
        encoder_tokens = sum(span.encoder_tokens for span in reply.media) if reply.media else 0
        self._instruments.prompt(request.model, tokens, encoder_tokens)
        return reply

    async def _tokenize_with(
        self, tokenizer: TokenizerProtocol, request: preprocess_pb2.TokenizeRequest
    ) -> tuple[preprocess_pb2.TokenizeResponse, int]:
        """Returns the response and its number of tokens."""
        kind = request.WhichOneof("input")
        if kind is None:
            raise invalid("The request has no input; set chat, text or tokens.", param="input")
        size = _text_size(getattr(request, kind), request.chat)
        self._check_size(size, "prompt" if kind != "chat" else "messages")
        media = await self._load_media(tokenizer, request.chat, size) if request.chat.media else NO_MEDIA
        pending = await self._begin_chat(tokenizer, request.chat, size) if kind == "chat" else None
        if pending is None:
            foreign = bool(request.chat.chat_template)
            return await self._compute(tokenizer, lambda: _tokenize(tokenizer, request, kind, media), size, foreign)
        text = await pending.text()
        pack = pending.pack or (lambda text: tokenizer.pack_text(text, add_special_tokens=False))
        return await self._pool.run(
            lambda: _response(tokenizer, request, pack(text), media, notes=pending.notes), len(text)
        )

    async def _load_media(self, tokenizer: TokenizerProtocol, chat: preprocess_pb2.ChatInput, size: int) -> LoadedMedia:
        """Returns the media items of a chat; fetches nothing if the chat or the model is at fault."""
        inputs = read_inputs(chat.media)
        check_kinds(inputs, tokenizer)
        if self._media is None:
            raise not_supported(inputs[0], tokenizer)
        await self._compute(tokenizer, lambda: _chat(chat), size, foreign=False)
        media = await self._media.load(inputs)
        rules = tokenizer.media_rules
        if any(rule.blocks for rule in rules.values()):
            await self._waiters.run(lambda: look_up(rules, media.items), size, True)
        return media

    async def _render(self, request: preprocess_pb2.RenderRequest) -> preprocess_pb2.RenderResponse:
        size = _text_size(request.chat, request.chat)
        self._check_size(size, "messages")
        _set_origin(request.chat)
        with self._registry.using(await self._registry.get(request.model)) as tokenizer:
            check_kinds(read_inputs(request.chat.media), tokenizer)
            pending = await self._begin_chat(tokenizer, request.chat, size)
            if pending is not None:
                text = await pending.text()
                text = pending.shown(text) if pending.shown is not None else text
            else:
                foreign = bool(request.chat.chat_template)
                text = await self._compute(tokenizer, lambda: tokenizer.render(_chat(request.chat)), size, foreign)
        return preprocess_pb2.RenderResponse(text=text.encode("utf-8", "replace").decode())

    async def _detokenize(self, request: preprocess_pb2.DetokenizeRequest) -> preprocess_pb2.DetokenizeResponse:
        if request.each and len(request.token_ids) > 4 * MAX_EACH:
            raise invalid(f"The text of each token is limited to {MAX_EACH} tokens; send fewer ids.", param="token_ids")

        size = len(request.token_ids) * (COST_PER_TOKEN if request.each else 1)
        with self._registry.using(await self._registry.get(request.model)) as tokenizer:
            return await self._compute(tokenizer, lambda: _detokenize(tokenizer, request), size)

    async def _list_models(
        self, request: preprocess_pb2.ListTokenizersRequest
    ) -> preprocess_pb2.ListTokenizersResponse:
        return preprocess_pb2.ListTokenizersResponse(models=[_info(*entry) for entry in self._registry])

    async def _get_fingerprint(
        self, request: preprocess_pb2.GetFingerprintRequest
    ) -> preprocess_pb2.GetFingerprintResponse:
        tokenizer = await self._registry.get(request.model)
        return preprocess_pb2.GetFingerprintResponse(
            tokenizer=_spec(self._registry.spec(request.model), tokenizer),
            template_fingerprint=tokenizer.facts.template_fingerprint,
        )

    async def _begin_chat(
        self, tokenizer: TokenizerProtocol, chat: preprocess_pb2.ChatInput, size: int
    ) -> PendingPrompt | None:
        """Starts rendering a chat whose template runs in another process; None if the chat is computed at once."""
        if not (chat.chat_template or tokenizer.renders_apart):
            return None
        return await self._pool.run(lambda: tokenizer.begin_chat(_chat(chat)), size)

    async def _compute(self, tokenizer: TokenizerProtocol, job: Callable[[], A], size: int, foreign: bool = False) -> A:
        pool = self._foreign if foreign else self._waiters if tokenizer.blocks else self._pool
        return await pool.run(job, size, foreign or tokenizer.blocks)

    def _check_size(self, size: int, param: str) -> None:
        if size > self._max_prompt_bytes:
            raise too_large(size, self._max_prompt_bytes, param)


def _set_origin(chat: preprocess_pb2.ChatInput) -> None:
    if chat.chat_template:
        check_name(chat.origin, "chat.origin")
        template_origin.set(chat.origin)


def _text_size(
    given: preprocess_pb2.ChatInput | preprocess_pb2.TextInput | preprocess_pb2.TokenInput,
    chat: preprocess_pb2.ChatInput,
) -> int:
    """Returns the size of an input without its media files, which have their own limit."""
    if not chat.media:
        return given.ByteSize()
    # ByteSize would serialize the files.
    lists = (chat.messages_json, chat.tools_json, chat.documents_json, chat.template_kwargs_json, chat.tool_choice_json)
    return sum(map(len, lists)) + len(chat.chat_template)


def _tokenize(
    tokenizer: TokenizerProtocol, request: preprocess_pb2.TokenizeRequest, kind: str, media: LoadedMedia
) -> tuple[preprocess_pb2.TokenizeResponse, int]:
    """Returns the response and its number of tokens."""
    second_text_at = 0
    notes: Sequence[str] = ()
    spans: tuple[MediaSpan, ...] = ()
    if kind == "tokens":
        packed = request.tokens.token_ids
        _check_ids(packed, tokenizer)
    elif kind == "chat" and media.items and isinstance(tokenizer, MediaTokenizer):
        packed, spans = tokenizer.pack_media(_chat(request.chat), media.items, media.files)
    elif kind == "chat":
        chat = _chat(request.chat)
        packed, notes = tokenizer.pack_chat(chat), chat.notes
    else:
        packed, second_text_at = _text_ids(tokenizer, request.text)
    reply, tokens = _response(tokenizer, request, packed, media, spans, notes)
    reply.second_text_at = second_text_at
    return reply, tokens


def _response(
    tokenizer: TokenizerProtocol,
    request: preprocess_pb2.TokenizeRequest,
    packed: bytes,
    media: LoadedMedia,
    spans: tuple[MediaSpan, ...] = (),
    notes: Sequence[str] = (),
) -> tuple[preprocess_pb2.TokenizeResponse, int]:
    """Returns the response and its number of tokens; `spans` are those of ids that the tokenizer has expanded."""
    rules = tokenizer.media_rules
    if rules and request.HasField("chat"):
        packed, spans = expand(packed, rules, media.items)
    size = request.block_size
    tokens = len(packed) // 4
    if request.hashes_only and size:
        hashes = _hashes.of(packed, size, request.lora, request.cache_salt, spans)
        return preprocess_pb2.TokenizeResponse(
            block_hashes=pack_u64(hashes), hash_scheme=HASH_SCHEME, prompt_tokens=tokens, media=span_messages(spans)
        ), tokens
    facts = tokenizer.facts
    reply = preprocess_pb2.TokenizeResponse(
        token_ids=packed,
        block_hashes=pack_u64(_hashes.of(packed, size, request.lora, request.cache_salt, spans)) if size else b"",
        hash_scheme=HASH_SCHEME,
        stop_token_ids=pack_u32(facts.stop_ids),
        eos_token_ids=pack_u32(facts.eos_ids),
        context_length=facts.context_length,
        prompt_tail=packed[-4 * PROMPT_TAIL_TOKENS :],
        fingerprint=facts.fingerprint,
        default_sampling=_default_sampling(facts.defaults),
        default_max_tokens=facts.defaults.max_tokens,
        without_effect=_without_effect(facts.without_effect, request.chat),
        prompt_tokens=tokens,
        media=span_messages(spans) if spans else (),
        fetched=file_messages(media.fetched) if media.fetched else (),
        notes=notes,
        thinking=request.chat.continue_final_message
        and ends_in_thought(tokenizer, packed, foreign_json(request.chat.messages_json, "messages")),
    )
    return reply, tokens


@lru_cache(maxsize=256)
def _default_sampling(defaults: GenerationDefaults) -> common_pb2.SamplingOptions:
    return write_sampling(defaults.sampling)


def _detokenize(
    tokenizer: TokenizerProtocol, request: preprocess_pb2.DetokenizeRequest
) -> preprocess_pb2.DetokenizeResponse:
    ids = _check_ids(request.token_ids, tokenizer)
    text = tokenizer.decode(ids, request.skip_special_tokens)
    each = [tokenizer.decode([token]) for token in ids] if request.each else ()
    return preprocess_pb2.DetokenizeResponse(text=text, each=each)


def _without_effect(names: frozenset[str], chat: preprocess_pb2.ChatInput) -> list[str]:
    """Returns those of the names that a chat, already validated, has as arguments of the model's own template."""
    if not names or not chat.template_kwargs_json or chat.chat_template:
        return []
    return sorted(names.intersection(json.loads(chat.template_kwargs_json)))


def _chat(chat: preprocess_pb2.ChatInput) -> ChatRequest:
    return parse_chat(
        chat.messages_json,
        chat.tools_json,
        chat.template_kwargs_json,
        chat.documents_json,
        chat.tool_choice_json,
        chat_template=chat.chat_template,
        add_generation_prompt=chat.add_generation_prompt if chat.HasField("add_generation_prompt") else None,
        continue_final_message=chat.continue_final_message,
        media=read_inputs(chat.media) if chat.media else (),
    )


def _text_ids(tokenizer: TokenizerProtocol, text: preprocess_pb2.TextInput) -> tuple[bytes, int]:
    """Returns packed ids, and the index of the first one of the second text of a pair."""
    special = text.add_special_tokens if text.HasField("add_special_tokens") else None
    try:
        if text.second_text:
            return tokenizer.pack_pair(text.text, text.second_text, special)
        return tokenizer.pack_text(text.text, special), 0
    except SluiceError as error:
        error.param = error.param or "prompt"
        raise


def _check_ids(packed: bytes, tokenizer: TokenizerProtocol) -> list[int]:
    ids = unpack_u32(packed).tolist()
    vocab_size = tokenizer.facts.vocab_size
    if ids and max(ids) >= vocab_size:
        raise invalid(
            f"Token id {max(ids)} is outside the model's vocabulary; send ids below {vocab_size}.",
            param="token_ids",
            code="token_id_out_of_range",
        )
    return ids


def _spec(spec: ModelSpec, tokenizer: TokenizerProtocol | None) -> common_pb2.TokenizerSpec:
    facts = tokenizer.facts if tokenizer is not None else None
    return common_pb2.TokenizerSpec(
        processor=facts.processor if facts is not None else spec.processor,
        source=spec.source,
        fingerprint=facts.fingerprint if facts is not None else "",
        prompt_fingerprint=facts.prompt_fingerprint if facts is not None else "",
        media_fingerprint=facts.media_fingerprint if facts is not None else "",
    )


def _info(spec: ModelSpec, tokenizer: TokenizerProtocol | None) -> preprocess_pb2.TokenizerInfo:
    info = preprocess_pb2.TokenizerInfo(model=spec.name, tokenizer=_spec(spec, tokenizer), loaded=tokenizer is not None)
    if tokenizer is not None:
        info.media.extend(common_pb2.MediaKind.ValueType(kind) for kind in sorted(kinds_of(tokenizer)))
        info.vocab_size = tokenizer.facts.vocab_size
        info.context_length = tokenizer.facts.context_length
        info.has_chat_template = tokenizer.facts.has_chat_template
        info.backend = tokenizer.facts.backend
        info.cache_refusal = tokenizer.facts.cache_refusal
        info.template_json = orjson.dumps(tokenizer.facts.template) if tokenizer.facts.template else b""
    return info

"""Conversion between protobuf messages and the worker's plain data types."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from services.common.base.errors import SluiceError, invalid
from services.common.base.packing import pack_u32, unpack_u32
from services.common.base.shared_steps import shared_step
from services.common.observability import telemetry
from services.common.rpc.channels import MIN_PING_INTERVAL_MS
from services.common.rpc.errors import to_detail
from services.common.rpc.generation import read_embeds, read_guided, read_sampling, write_logprobs
from services.common.rpc.media import read_spans
from services.common.types.hashing import HASH_SCHEME
from services.postprocess.detokenize.stream import StreamOptions
from services.postprocess.parsers.events import merge
from services.postprocess.wire import parts, to_event, to_finish, to_options, to_tokens
from services.worker.contract.engine import EngineConfig, Load
from services.worker.contract.generation import (
    Delta,
    Disaggregation,
    FinishReason,
    GenerateRequest,
    MediaItem,
    MediaSpan,
    Role,
    StopParams,
    Usage,
)
from services.worker.contract.text_delta import TextUpdate
from services.worker.generation.tracing import LINK
from services.worker.serving.outbox import Page
from sluice.v1 import common_pb2, postprocess_pb2, worker_pb2

log = logging.getLogger(__name__)

FindMedia = Callable[[Sequence[MediaSpan]], tuple[MediaItem, ...]]
"""Returns the items of a prompt with their files."""


def read_request(message: worker_pb2.GenerateRequest, find_media: FindMedia) -> GenerateRequest:
    """Reads a generation request.

    Raises:
        SluiceError: INVALID_ARGUMENT when a packed field or the media are malformed, and as raised by `find_media`.
    """
    prompt, output = message.WhichOneof("prompt"), message.output
    spans = message.tokens.media
    return GenerateRequest(
        request_id=message.request_id,
        model=message.model,
        token_ids=unpack_u32(message.tokens.token_ids, "prompt.token_ids"),
        text=message.text if prompt == "text" else None,
        messages_json=message.messages_json if prompt == "messages_json" else None,
        embeds=read_embeds(message.embeds) if prompt == "embeds" else None,
        sampling=read_sampling(message.sampling),
        stop=_read_stop(message.stop) if message.HasField("stop") else StopParams(),
        logprobs=output.logprobs if output.HasField("logprobs") else None,
        prompt_logprobs=output.prompt_logprobs if output.HasField("prompt_logprobs") else None,
        guided=read_guided(message.guided) if message.HasField("guided") else None,
        lora=message.lora,
        cache_salt=message.cache_salt,
        priority=message.priority,
        data_parallel_rank=message.data_parallel_rank if message.HasField("data_parallel_rank") else None,
        disaggregation=_read_disaggregation(message.disaggregation) if message.HasField("disaggregation") else None,
        resumed_tokens=message.resumed_tokens,
        media=find_media(read_spans(spans, len(message.tokens.token_ids) // 4)) if spans else (),
        text_out=_read_text_options(message.postprocess) if message.HasField("postprocess") else None,
    )


def read_trace(message: common_pb2.TraceContext) -> dict[str, str]:
    """Returns the carrier of the caller's span, with the traceparent of an earlier part under `LINK`."""
    return {**telemetry.carrier(message), **({LINK: message.link} if message.link else {})}


def _read_text_options(message: postprocess_pb2.StreamOptions) -> StreamOptions:
    try:
        return to_options(message)
    except SluiceError as error:
        error.param = f"postprocess.{error.param}"
        raise


def _read_stop(message: common_pb2.StopOptions) -> StopParams:
    return StopParams(
        max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
        min_tokens=message.min_tokens,
        stop_token_ids=frozenset(unpack_u32(message.stop_token_ids, "stop.stop_token_ids")),
        eos_token_ids=tuple(unpack_u32(message.eos_token_ids, "stop.eos_token_ids")),
        ignore_eos=message.ignore_eos,
    )


def _read_disaggregation(message: worker_pb2.DisaggregationParams) -> Disaggregation:
    try:
        role = Role(message.role or Role.AGGREGATED)
    except ValueError as error:
        raise invalid(
            f"Role {message.role} is unknown to this version of the worker.", param="disaggregation"
        ) from error
    return Disaggregation(role, message.handoff, message.bootstrap_host, message.bootstrap_port, message.bootstrap_room)


@shared_step("worker.serialize")
def write_page(page: Page, break_off: Callable[[int], SluiceError]) -> worker_pb2.TokenBatch:
    """Converts a page to a session message.

    Args:
        break_off: called for each slot whose extras cannot be converted, which ends it; returns the error to send in
            their place.
    """
    extras = page.extras
    if page.texts:  # they precede the terminal deltas
        texts = [(slot, Delta(text=text)) for slot, text in page.texts.items()]
        first = [(slot, delta) for slot, delta in extras if delta.finish_reason is None]
        last = [(slot, delta) for slot, delta in extras if delta.finish_reason is not None]
        extras = [*first, *texts, *last]
    try:
        written = [write_extra(delta, slot) for slot, delta in extras] if extras else []
    except Exception:
        written = _write_each(extras, break_off)
    batch = worker_pb2.TokenBatch(dropped_media=bytes(page.dropped_media), extras=written)
    if page.slots:
        batch.slots, batch.counts = pack_u32(page.slots), pack_u32(page.counts)
        batch.token_ids = pack_u32(page.token_ids)
    return batch


def _write_each(
    extras: Sequence[tuple[int, Delta]], break_off: Callable[[int], SluiceError]
) -> list[worker_pb2.TokenExtra]:
    """Converts extras one by one; a slot ends with an error at the first one that cannot be converted."""
    written: list[worker_pb2.TokenExtra] = []
    broken: set[int] = set()
    for slot, delta in extras:
        if slot in broken:
            continue
        try:
            written.append(write_extra(delta, slot))
        except Exception:
            log.exception("output of a request cannot be sent", extra={"slot": slot})
            broken.add(slot)
            written.append(
                write_extra(Delta(finish_reason=FinishReason.ERROR, usage=Usage(), error=break_off(slot)), slot)
            )
    return written


def write_delta(delta: Delta) -> worker_pb2.GenerateDelta:
    """Converts a delta to a message of the server-streaming `Generate` RPC."""
    return worker_pb2.GenerateDelta(token_ids=pack_u32(delta.token_ids), extra=write_extra(delta))


def write_extra(delta: Delta, slot: int = 0) -> worker_pb2.TokenExtra:
    """Converts everything in a delta except its token ids."""
    extra = worker_pb2.TokenExtra(
        slot=slot,
        finish_reason=common_pb2.FinishReason.ValueType(delta.finish_reason or 0),
        stop_token_id=delta.stop_token_id,
        cached_tokens=delta.cached_tokens,
        cached_tokens_later=delta.cached_later,
        handoff=delta.handoff,
        prompt_token_ids=pack_u32(delta.prompt_token_ids) if delta.prompt_token_ids else b"",
        logprobs=list(map(write_logprobs, delta.logprobs)),
        prompt_logprobs=list(map(write_logprobs, delta.prompt_logprobs)),
    )
    if delta.text is not None:
        extra.events.extend(_write_text(delta.text))
    if delta.error is not None:
        extra.error.CopyFrom(to_detail(delta.error))
    if delta.usage is not None:
        extra.usage.prompt_tokens = delta.usage.prompt_tokens
        extra.usage.completion_tokens = delta.usage.completion_tokens
        if delta.usage.cached_tokens is not None:
            extra.usage.cached_tokens = delta.usage.cached_tokens
        extra.usage.SetInParent()
    return extra


def _write_text(text: TextUpdate) -> list[postprocess_pb2.StreamEvent]:
    """Converts a text delta to events in the order of a TextBatch: tokens, parsed text, finish; slots are 0."""
    return [
        *([postprocess_pb2.StreamEvent(tokens=to_tokens(text.tokens))] if text.tokens else []),
        *[to_event(0, *part) for part in parts(merge(text.events))],
        *([to_finish(0, text.finish)] if text.finish is not None else []),
    ]


def write_card(config: EngineConfig, created_unix_s: int) -> common_pb2.ModelCard:
    """Returns the model card of this worker."""
    return common_pb2.ModelCard(
        model=config.model,
        tokenizer=common_pb2.TokenizerSpec(
            processor=config.processor,
            source=config.source,
            fingerprint=config.fingerprint,
            prompt_fingerprint=config.prompt_fingerprint,
            media_fingerprint=config.media_fingerprint,
        ),
        context_length=config.context_length,
        vocab_size=config.vocab_size,
        block_size=config.block_size,
        hash_scheme=HASH_SCHEME,
        total_blocks=config.total_blocks,
        max_sequences=config.max_sequences,
        max_batched_tokens=config.max_batched_tokens,
        data_parallel_size=config.data_parallel_size,
        capabilities=sorted(config.capabilities),
        eos_token_ids=pack_u32(config.eos_token_ids),
        adapters=config.adapters,
        created_unix_s=created_unix_s,
        chat_template=config.chat_template,
        tool_parser=config.tool_parser,
        reasoning_parser=config.reasoning_parser,
        labels=config.labels,
        min_ping_interval_ms=MIN_PING_INTERVAL_MS,
    )


def write_role(role: Role) -> common_pb2.WorkerRole.ValueType:
    """Returns the protobuf value of a role."""
    return common_pb2.WorkerRole.ValueType(int(role))


def write_loads(loads: Sequence[Load]) -> list[common_pb2.WorkerLoad]:
    """Converts the loads of all data-parallel ranks, in rank order."""
    return [
        common_pb2.WorkerLoad(
            running_requests=load.running_requests,
            waiting_requests=load.waiting_requests,
            used_blocks=load.used_blocks,
            cached_blocks=load.cached_blocks,
            prefill_tokens=load.prefill_tokens,
            step_ms=load.step_ms,
        )
        for load in loads
    ]

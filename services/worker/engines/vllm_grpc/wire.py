"""Converts between the messages of vLLM's gRPC server and the engine contract."""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from services.common.base.errors import ErrorKind, SluiceError, invalid
from services.common.net.intake.json_intake import foreign_json
from services.worker.contract.cache_events import CacheTier
from services.worker.contract.engine import Load
from services.worker.contract.generation import FinishReason, GenerateRequest, PositionLogprobs, TokenLogprob
from services.worker.engines.inprocess.request_state import LOWEST_LOGPROB
from services.worker.engines.inprocess.sampling import Facts
from services.worker.engines.shared.media_prompts import data_url, with_single_placeholders
from services.worker.engines.vllm.handoff import Handoff
from services.worker.engines.vllm.sampling import sampling_arguments
from services.worker.kv_events.events import (
    EngineBatch,
    EngineCleared,
    EngineEvent,
    EngineRemoved,
    EngineStored,
    plain_hash,
    tier_of,
)
from services.worker.kv_events.wire import read_extra_keys

MAX_LOGPROBS = 20
"""Log-probabilities of a token that vLLM's server is asked for; a request for more gets these."""
_SEED_LIMIT = 1 << 31
_CONSTRAINTS = {
    "json": "json_schema",
    "regex": "regex",
    "grammar": "grammar",
    "structural_tag": "structural_tag",
    "json_object": "json_object",
}
_TIERS = {1: CacheTier.DEVICE, 2: CacheTier.HOST, 3: CacheTier.DISK, 4: CacheTier.DISK}
_LOCALITY_REMOTE = 2
_IMAGE = 1


def write_request(
    request: GenerateRequest, facts: Facts, handoff: Handoff | None, placeholder: int | None = None
) -> Any:
    """Returns vLLM's GenerateRequest.

    Args:
        placeholder: Placeholder token of images; None for a server that takes none.

    Raises:
        SluiceError: INVALID_ARGUMENT when a value is out of the message's range, or images do not fit the prompt.
    """
    from smg_grpc_proto import vllm_engine_pb2 as pb

    arguments = sampling_arguments(request, facts, handoff)
    transfer = arguments.pop("extra_args", {}).get("kv_transfer_params")
    ids: Sequence[int] = request.token_ids if handoff is None else [*request.token_ids, handoff.token_id]
    if request.media:
        if handoff is not None:
            raise invalid("vLLM takes no images as a decode worker; use an aggregated worker.", param="media")
        ids = with_single_placeholders(request, placeholder, "vLLM's gRPC server")
    message = pb.GenerateRequest(
        request_id=request.request_id,
        tokenized=pb.TokenizedInput(input_ids=ids),
        sampling_params=_write_sampling(arguments, pb),
        stream=True,
    )
    if transfer:
        message.kv_transfer_params_json = json.dumps(transfer)
    if request.data_parallel_rank is not None:
        message.data_parallel_rank = request.data_parallel_rank
    for item in request.media:
        message.media_refs.items.add(modality=_IMAGE, url=data_url(item.file.data))
    return message


def _write_sampling(arguments: dict[str, Any], pb: Any) -> Any:
    guided: Mapping[str, Any] = arguments.pop("structured_outputs", {})
    if not -_SEED_LIMIT <= (arguments.get("seed") or 0) < _SEED_LIMIT:
        raise invalid("The seed is out of range; vLLM's gRPC server accepts signed 32-bit seeds.", param="seed")
    if (top := arguments.get("logprobs")) is not None:
        # The chosen token occupies one entry, whatever its rank.
        arguments["logprobs"] = min(top + 1, MAX_LOGPROBS) if top else 0
    if arguments.get("top_k", 0) < 0:
        arguments["top_k"] = 0
    message = pb.SamplingParams(**arguments)
    for kind, value in guided.items():
        if kind == "choice":
            message.choice.choices.extend(value)
        else:
            setattr(message, _CONSTRAINTS[kind], value)
    return message


def read_logprobs(message: Any, token_ids: Sequence[int], top: int) -> list[PositionLogprobs]:
    """Returns output log-probabilities, one entry per token."""
    positions = []
    for index, token_id in enumerate(token_ids):
        logprob = message.token_logprobs[index] if index < len(message.token_logprobs) else LOWEST_LOGPROB
        others = message.top_logprobs[index] if index < len(message.top_logprobs) else None
        positions.append(_position(token_id, logprob, others, top))
    return positions


def read_prompt_logprobs(message: Any, top: int) -> list[PositionLogprobs]:
    """Returns prompt log-probabilities; that of the first token is undefined and returned as 0."""
    positions = []
    for index, token_id in enumerate(message.token_ids):
        value = message.token_logprobs[index]
        others = message.top_logprobs[index] if index < len(message.top_logprobs) else None
        positions.append(_position(token_id, value.value if value.HasField("value") else 0.0, others, top))
    return positions


def _position(token_id: int, logprob: float, others: Any, top: int) -> PositionLogprobs:
    pairs = sorted(zip(others.values, others.token_ids, strict=True), reverse=True) if others is not None else []
    # The message has no ranks; those of the requested alternatives follow from their order.
    ranks = {other_id: rank for rank, (_, other_id) in enumerate(pairs[:top], 1)}
    chosen = TokenLogprob(token_id, max(logprob, LOWEST_LOGPROB), ranks.get(token_id, 0))
    return PositionLogprobs(
        chosen,
        tuple(
            TokenLogprob(other_id, max(value, LOWEST_LOGPROB), rank)
            for rank, (value, other_id) in enumerate(pairs[:top], 1)
        ),
    )


def read_finish(message: Any) -> tuple[FinishReason, int | None, SluiceError | None]:
    """Returns the finish reason of a GenerateComplete, the stop token id, and the error."""
    if message.finish_reason == "length":
        return FinishReason.LENGTH, None, None
    if message.finish_reason == "abort":
        return FinishReason.CANCELLED, None, None
    if message.finish_reason in ("stop", "repetition"):
        by_token = message.WhichOneof("matched_stop") == "matched_token_id"
        return FinishReason.STOP, message.matched_token_id if by_token else None, None
    return FinishReason.ERROR, None, SluiceError(ErrorKind.INTERNAL, "The engine failed on this request.")


def read_transfer(message: Any) -> dict[str, Any]:
    """Returns the KV connector's parameters of a GenerateComplete; empty if there are none."""
    if not message.HasField("kv_transfer_params_json"):
        return {}
    transfer = foreign_json(message.kv_transfer_params_json.encode(), "kv_transfer_params_json")
    return transfer if isinstance(transfer, dict) else {}


def read_vector(message: Any) -> bytes:
    """Returns the vector of an EmbedResponse as little-endian float32."""
    return struct.pack(f"<{len(message.embedding)}f", *message.embedding)


def read_loads(message: Any, total_blocks: int) -> list[Load]:
    """Returns the loads sorted by data-parallel rank."""
    return [
        Load(
            running_requests=load.num_running_reqs,
            waiting_requests=load.num_waiting_reqs,
            used_blocks=round(load.token_usage * total_blocks),
            prefill_tokens=load.num_waiting_uncached_tokens,
        )
        for load in sorted(message.loads, key=lambda load: int(load.dp_rank))
    ]


def read_batch(message: Any) -> EngineBatch:
    """Converts one KvEventBatch."""
    events = [event for raw in message.events for event in _read_event(raw)]
    return EngineBatch(events, message.timestamp, message.dp_rank if message.HasField("dp_rank") else None)


def _read_event(raw: Any) -> list[EngineEvent]:
    kind = raw.WhichOneof("data")
    if kind == "cleared":
        return [EngineCleared()]
    if kind is None or getattr(raw, kind).locality == _LOCALITY_REMOTE:
        return []
    data = getattr(raw, kind)
    tier = _tier(data)
    group = data.group_idx if data.HasField("group_idx") else None
    if kind == "removed":
        return [EngineRemoved([plain_hash(value) for value in data.block_hashes], tier, group)]
    return [_read_stored(data, tier, group)]


def _read_stored(data: Any, tier: CacheTier, group: int | None) -> EngineStored:
    token_ids = array("I")
    for block in data.blocks:
        token_ids.extend(block.token_ids)
    keys = [[_extra_key(key) for key in block.extra_keys] for block in data.blocks]
    salt, opaque_from = read_extra_keys(keys, data.lora_name)
    first = data.blocks[0] if data.blocks else None
    lora = data.lora_name
    if first is not None and first.HasField("lora_id") and not lora:
        lora = f"lora-{first.lora_id}"
    return EngineStored(
        hashes=[plain_hash(block.block_hash) for block in data.blocks],
        parent=plain_hash(data.parent_block_hash) if data.HasField("parent_block_hash") else None,
        token_ids=token_ids,
        block_size=first.block_size if first is not None else 0,
        tier=tier,
        lora=lora,
        salt=data.cache_salt or salt,
        opaque_from=opaque_from,
        group=group,
        kind=data.kv_cache_spec_kind,
    )


def _extra_key(key: Any) -> object:
    kind = key.WhichOneof("key")
    return key.text if kind == "text" else key


def _tier(data: Any) -> CacheTier:
    return _TIERS[data.tier] if data.tier in _TIERS else tier_of(data.medium)

"""Messages of vLLM's gRPC server ↔ plain data; besides `client` the only module here that knows them."""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from services.common.errors import ErrorKind, SluiceError, invalid
from services.worker.contract.cache_events import CacheTier
from services.worker.contract.engine import Load
from services.worker.contract.generation import FinishReason, GenerateRequest, PositionLogprobs, TokenLogprob
from services.worker.engines.vllm.handoff import Handoff
from services.worker.engines.vllm.outputs import LOWEST_LOGPROB
from services.worker.engines.vllm.sampling import Facts, sampling_arguments
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

MOST_LOGPROBS = 20
_SIGNED_32 = 1 << 31
_CONSTRAINTS = {
    "json": "json_schema",
    "regex": "regex",
    "grammar": "grammar",
    "structural_tag": "structural_tag",
    "json_object": "json_object",
}
_TIERS = {1: CacheTier.DEVICE, 2: CacheTier.HOST, 3: CacheTier.DISK, 4: CacheTier.DISK}
_LOCALITY_REMOTE = 2


def write_request(request: GenerateRequest, facts: Facts, handoff: Handoff | None) -> Any:
    """A GenerateRequest of theirs.

    Raises:
        SluiceError: INVALID_ARGUMENT when a value does not fit their message.
    """
    from smg_grpc_proto import vllm_engine_pb2 as pb

    arguments = sampling_arguments(request, facts, handoff)
    transfer = arguments.pop("extra_args", {}).get("kv_transfer_params")
    ids = request.token_ids if handoff is None else [*request.token_ids, handoff.token_id]
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
    return message


def _write_sampling(arguments: dict[str, Any], pb: Any) -> Any:
    guided: Mapping[str, Any] = arguments.pop("structured_outputs", {})
    if not -_SIGNED_32 <= (arguments.get("seed") or 0) < _SIGNED_32:
        raise invalid("vLLM's gRPC server takes seeds of 32 bits only.", param="seed")
    if (top := arguments.get("logprobs")) is not None:
        # The chosen token takes one of the places, wherever it ranks.
        arguments["logprobs"] = min(top + 1, MOST_LOGPROBS) if top else 0
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
    """Output log-probabilities, one entry per token."""
    positions = []
    for index, token_id in enumerate(token_ids):
        own = message.token_logprobs[index] if index < len(message.token_logprobs) else LOWEST_LOGPROB
        others = message.top_logprobs[index] if index < len(message.top_logprobs) else None
        positions.append(_position(token_id, own, others, top))
    return positions


def read_prompt_logprobs(message: Any, top: int) -> list[PositionLogprobs]:
    """Prompt log-probabilities; the first token's is 0, because nothing comes before it."""
    positions = []
    for index, token_id in enumerate(message.token_ids):
        value = message.token_logprobs[index]
        others = message.top_logprobs[index] if index < len(message.top_logprobs) else None
        positions.append(_position(token_id, value.value if value.HasField("value") else 0.0, others, top))
    return positions


def _position(token_id: int, own: float, others: Any, top: int) -> PositionLogprobs:
    pairs = sorted(zip(others.values, others.token_ids, strict=True), reverse=True) if others is not None else []
    # Their answer has no ranks: what is within the places that were asked for ranks by its place.
    ranks = {found: rank for rank, (_, found) in enumerate(pairs[:top], 1)}
    chosen = TokenLogprob(token_id, max(own, LOWEST_LOGPROB), ranks.get(token_id, 0))
    return PositionLogprobs(
        chosen,
        tuple(
            TokenLogprob(found, max(value, LOWEST_LOGPROB), rank + 1) for rank, (value, found) in enumerate(pairs[:top])
        ),
    )


def read_finish(message: Any) -> tuple[FinishReason, int | None, SluiceError | None]:
    """Why a GenerateComplete says a generation ended, and the id that ended it."""
    if message.finish_reason == "length":
        return FinishReason.LENGTH, None, None
    if message.finish_reason == "abort":
        return FinishReason.CANCELLED, None, None
    if message.finish_reason in ("stop", "repetition"):
        named = message.WhichOneof("matched_stop") == "matched_token_id"
        return FinishReason.STOP, message.matched_token_id if named else None, None
    return FinishReason.ERROR, None, SluiceError(ErrorKind.INTERNAL, "The engine failed on this request.")


def read_transfer(message: Any) -> dict[str, Any]:
    """The KV connector's parameters in a GenerateComplete; empty: none."""
    if not message.HasField("kv_transfer_params_json"):
        return {}
    found = json.loads(message.kv_transfer_params_json)
    return found if isinstance(found, dict) else {}


def read_vector(message: Any) -> bytes:
    """An EmbedResponse as little-endian float32."""
    return struct.pack(f"<{len(message.embedding)}f", *message.embedding)


def read_loads(message: Any, total_blocks: int) -> list[Load]:
    """Loads by data-parallel rank."""
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
    """One KvEventBatch."""
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

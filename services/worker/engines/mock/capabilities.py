"""Capabilities of the mock engine; it accepts other sampling options without effect, having no probabilities."""

from __future__ import annotations

from collections.abc import Collection

from services.worker.contract.capabilities import MEDIA, SAMPLING, Capability
from services.worker.contract.generation import Role

_HONOURED_SAMPLING = frozenset({Capability.SEED, Capability.MIN_TOKENS, Capability.IGNORE_EOS})

CAPABILITIES = (
    _HONOURED_SAMPLING
    | MEDIA
    | {
        Capability.TOKEN_IDS,
        Capability.LOGPROBS,
        Capability.PROMPT_LOGPROBS,
        Capability.GUIDED_JSON,
        Capability.GUIDED_CHOICE,
        Capability.RESUME,
        Capability.RESUME_GUIDED,
        Capability.PRIORITY,
        Capability.CACHE_SALT,
        Capability.DATA_PARALLEL_RANK,
        Capability.LORA,
        Capability.LORA_LOADING,
        Capability.EMBEDDINGS,
        Capability.CLASSIFICATION,
        Capability.KV_EVENTS,
        Capability.PREFILL,
        Capability.DECODE,
        Capability.LOCAL_PREFILL,
        Capability.SLEEP,
        Capability.CLEAR_CACHE,
        Capability.INJECT_FAULT,
    }
)

ACCEPTED = SAMPLING - _HONOURED_SAMPLING - {Capability.ENGINE_OPTIONS}

_UNSUPPORTED_BY_ROLE = {
    Role.AGGREGATED: frozenset({Capability.PREFILL, Capability.DECODE, Capability.LOCAL_PREFILL}),
    Role.PREFILL: frozenset({Capability.DECODE, Capability.LOCAL_PREFILL}),
    # A decode worker does not index transferred blocks, so it has no KV events.
    Role.DECODE: frozenset({Capability.PREFILL, Capability.KV_EVENTS}),
}


def capabilities_of(
    role: Role, ranks: int = 1, classifies: bool = False, media: Collection[str] = ()
) -> frozenset[Capability]:
    """Returns the engine's capabilities in a role.

    Args:
        ranks: number of data-parallel ranks.
        classifies: whether texts are classified instead of embedded.
        media: kinds of media items that are taken.
    """
    single_rank = {Capability.DATA_PARALLEL_RANK} if ranks == 1 else set()
    other_pooling = Capability.EMBEDDINGS if classifies else Capability.CLASSIFICATION
    other_media = {kind for kind in MEDIA if kind not in media}
    return CAPABILITIES - _UNSUPPORTED_BY_ROLE[role] - single_rank - {other_pooling} - other_media

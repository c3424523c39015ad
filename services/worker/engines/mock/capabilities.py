"""What the mock engine honours, and what it takes without effect: it has no probabilities to shape."""

from __future__ import annotations

from services.worker.contract.capabilities import SAMPLING, Capability
from services.worker.contract.generation import Role

_HONOURED_SAMPLING = frozenset({Capability.SEED, Capability.MIN_TOKENS, Capability.IGNORE_EOS})

CAPABILITIES = _HONOURED_SAMPLING | {
    Capability.TOKEN_IDS,
    Capability.LOGPROBS,
    Capability.PROMPT_LOGPROBS,
    Capability.GUIDED_JSON,
    Capability.GUIDED_REGEX,
    Capability.GUIDED_CHOICE,
    Capability.RESUME,
    Capability.RESUME_GUIDED,
    Capability.PRIORITY,
    Capability.CACHE_SALT,
    Capability.DATA_PARALLEL_RANK,
    Capability.LORA,
    Capability.LORA_LOADING,
    Capability.EMBEDDINGS,
    Capability.KV_EVENTS,
    Capability.PREFILL,
    Capability.DECODE,
    Capability.LOCAL_PREFILL,
    Capability.SLEEP,
    Capability.CLEAR_CACHE,
    Capability.PROFILE,
    Capability.INJECT_FAULT,
}

ACCEPTED = SAMPLING - _HONOURED_SAMPLING - {Capability.ENGINE_OPTIONS}

_BY_ROLE = {
    Role.AGGREGATED: frozenset({Capability.PREFILL, Capability.DECODE, Capability.LOCAL_PREFILL}),
    Role.PREFILL: frozenset({Capability.DECODE, Capability.LOCAL_PREFILL}),
    # What comes from a prefill worker is not found again: the decode worker keeps no index of it.
    Role.DECODE: frozenset({Capability.PREFILL, Capability.KV_EVENTS}),
}


def capabilities_of(role: Role, ranks: int = 1) -> frozenset[Capability]:
    """What the engine honours when it plays a role with so many data-parallel ranks."""
    of_one = {Capability.DATA_PARALLEL_RANK} if ranks == 1 else set()
    return CAPABILITIES - _BY_ROLE[role] - of_one

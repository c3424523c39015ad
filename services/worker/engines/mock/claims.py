"""What the mock engine honours, and what it takes without effect: it has no probabilities to shape."""

from __future__ import annotations

from services.worker.capabilities import SAMPLING, Capability

_HONOURED_SAMPLING = frozenset({Capability.SEED, Capability.MIN_TOKENS, Capability.IGNORE_EOS})

CAPABILITIES = _HONOURED_SAMPLING | {
    Capability.TOKEN_IDS,
    Capability.PRIORITY,
    Capability.CACHE_SALT,
    Capability.LORA,
    Capability.KV_EVENTS,
    Capability.CLEAR_CACHE,
}

ACCEPTED = SAMPLING - _HONOURED_SAMPLING - {Capability.ENGINE_OPTIONS}

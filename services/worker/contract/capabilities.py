"""Capabilities of engines, under the names that the model card uses."""

from __future__ import annotations

from enum import StrEnum

from services.common.types.media.spans import MediaKind
from services.common.types.sampling import NAMES


class Capability(StrEnum):
    """One feature of an engine. A request that needs a capability the card does not list is rejected."""

    TOKEN_IDS = "token_ids"
    """Accepts and returns token ids; required of every engine."""
    TEXT = "text"
    """Accepts text and tokenizes it."""
    MESSAGES = "messages"
    """Accepts an OpenAI chat body, renders and tokenizes it."""
    TEXT_OUT = "text_out"
    """Returns text, reasoning and tool calls."""
    PROMPT_EMBEDS = "prompt_embeds"
    """Accepts input embeddings in place of token ids."""

    IMAGE = "image"
    """Takes images, as placeholder tokens and files. `audio` and `video` likewise."""
    AUDIO = "audio"
    VIDEO = "video"

    LOGPROBS = "logprobs"
    PROMPT_LOGPROBS = "prompt_logprobs"

    GUIDED_JSON = "guided_json"
    """JSON Schema, and unconstrained JSON objects."""
    GUIDED_REGEX = "guided_regex"
    GUIDED_GRAMMAR = "guided_grammar"
    GUIDED_CHOICE = "guided_choice"
    STRUCTURAL_TAG = "structural_tag"

    TEMPERATURE = "temperature"
    TOP_P = "top_p"
    TOP_K = "top_k"
    MIN_P = "min_p"
    FREQUENCY_PENALTY = "frequency_penalty"
    PRESENCE_PENALTY = "presence_penalty"
    REPETITION_PENALTY = "repetition_penalty"
    SEED = "seed"
    LOGIT_BIAS = "logit_bias"
    ALLOWED_TOKEN_IDS = "allowed_token_ids"
    BAD_WORDS = "bad_words"
    THINKING_TOKEN_BUDGET = "thinking_token_budget"
    ENGINE_OPTIONS = "engine_options"
    """Engine-specific sampling options, passed through unchanged."""
    MIN_TOKENS = "min_tokens"
    IGNORE_EOS = "ignore_eos"
    RESUME = "resume"
    """Counts resumed tokens as output, so that seeds and penalties continue where they stopped."""
    RESUME_GUIDED = "resume_guided"
    """Advances a grammar past the resumed tokens."""

    PRIORITY = "priority"
    CACHE_SALT = "cache_salt"
    """Never shares cached prefixes between salts; trivially true of an engine without a prefix cache."""
    DATA_PARALLEL_RANK = "data_parallel_rank"
    LORA = "lora"
    """Selects an adapter per request."""
    LORA_LOADING = "lora_loading"
    """Loads and unloads adapters while serving."""
    EMBEDDINGS = "embeddings"
    CLASSIFICATION = "classification"
    """Computes the probabilities of classes for texts, or for pairs of texts."""
    KV_EVENTS = "kv_events"
    PREFILL = "prefill"
    """Serves as a prefill worker."""
    DECODE = "decode"
    """Serves as a decode worker."""
    LOCAL_PREFILL = "local_prefill"
    """Computes a prompt itself, as a decode worker, when no prefill worker is available."""
    SLEEP = "sleep"
    CLEAR_CACHE = "clear_cache"
    PROFILE = "profile"
    INJECT_FAULT = "inject_fault"


MEDIA = frozenset(Capability(kind.capability) for kind in MediaKind)
"""Kinds of media items, one capability per kind."""

SAMPLING = frozenset({*map(Capability, NAMES), Capability.MIN_TOKENS, Capability.IGNORE_EOS})
"""Sampling and stop options, one capability per option."""

USUAL_SAMPLING = frozenset(
    {
        Capability.TEMPERATURE,
        Capability.TOP_P,
        Capability.TOP_K,
        Capability.MIN_P,
        Capability.FREQUENCY_PENALTY,
        Capability.PRESENCE_PENALTY,
        Capability.REPETITION_PENALTY,
        Capability.SEED,
        Capability.LOGIT_BIAS,
        Capability.MIN_TOKENS,
        Capability.IGNORE_EOS,
    }
)
"""Those that every engine with a sampler of its own has."""

GUIDED = frozenset(
    {
        Capability.GUIDED_JSON,
        Capability.GUIDED_REGEX,
        Capability.GUIDED_GRAMMAR,
        Capability.GUIDED_CHOICE,
        Capability.STRUCTURAL_TAG,
    }
)
"""Output constraints, one capability per kind of grammar."""

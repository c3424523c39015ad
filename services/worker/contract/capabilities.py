"""What an engine can honour, by the names that stand on the model card."""

from __future__ import annotations

from enum import StrEnum


class Capability(StrEnum):
    """A request that needs a capability the card does not list is refused; nothing is dropped silently."""

    TOKEN_IDS = "token_ids"
    """Takes and gives token ids; every engine."""
    TEXT = "text"
    """Takes text and makes the ids itself."""
    MESSAGES = "messages"
    """Takes an OpenAI chat body and makes the ids itself."""
    TEXT_OUT = "text_out"
    """Makes text, reasoning and tool calls of its tokens."""
    PROMPT_EMBEDS = "prompt_embeds"
    """Takes input embeddings in place of ids."""

    LOGPROBS = "logprobs"
    PROMPT_LOGPROBS = "prompt_logprobs"

    GUIDED_JSON = "guided_json"
    """JSON Schema, and any JSON object."""
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
    """Options of the engine's own, passed on as they are."""
    MIN_TOKENS = "min_tokens"
    IGNORE_EOS = "ignore_eos"
    RESUME = "resume"
    """Counts resumed tokens as output: what a seed or a penalty does goes on where it was."""
    RESUME_GUIDED = "resume_guided"
    """Takes a constraint up in its middle, after the resumed tokens."""

    PRIORITY = "priority"
    CACHE_SALT = "cache_salt"
    """Requests of different salts share no cached prefix; also true of an engine without a prefix cache."""
    DATA_PARALLEL_RANK = "data_parallel_rank"
    LORA = "lora"
    """Adapters can be chosen per request."""
    LORA_LOADING = "lora_loading"
    """Adapters can be loaded and unloaded while serving."""
    EMBEDDINGS = "embeddings"
    KV_EVENTS = "kv_events"
    PREFILL = "prefill"
    """Can play the prefill part."""
    DECODE = "decode"
    """Can play the decode part."""
    LOCAL_PREFILL = "local_prefill"
    """Plays the decode part and can run a prompt itself when no prefill worker is there."""
    SLEEP = "sleep"
    CLEAR_CACHE = "clear_cache"
    PROFILE = "profile"
    INJECT_FAULT = "inject_fault"


SAMPLING = frozenset(
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
        Capability.ALLOWED_TOKEN_IDS,
        Capability.BAD_WORDS,
        Capability.THINKING_TOKEN_BUDGET,
        Capability.ENGINE_OPTIONS,
        Capability.MIN_TOKENS,
        Capability.IGNORE_EOS,
    }
)
"""How tokens are chosen and when they end, one capability an option."""

GUIDED = frozenset(
    {
        Capability.GUIDED_JSON,
        Capability.GUIDED_REGEX,
        Capability.GUIDED_GRAMMAR,
        Capability.GUIDED_CHOICE,
        Capability.STRUCTURAL_TAG,
    }
)
"""Constraints on the output, one capability a kind of grammar."""

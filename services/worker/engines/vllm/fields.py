"""Lists what sets each field of vLLM's SamplingParams and StructuredOutputsParams, without exception."""

from __future__ import annotations

from services.worker.engines.inprocess.sampling import ENGINE_OPTIONS, INTERNAL, REFUSED, TEXT, WORKER

FIELDS: dict[str, str] = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "repetition_penalty": "repetition_penalty",
    "seed": "seed",
    "logit_bias": "logit_bias",
    "allowed_token_ids": "allowed_token_ids",
    "bad_words": "bad_words",
    "thinking_token_budget": "thinking_token_budget",
    "max_tokens": "max_tokens",
    "min_tokens": "min_tokens",
    "stop_token_ids": "stop_token_ids",
    "ignore_eos": "ignore_eos",
    "logprobs": "logprobs",
    "prompt_logprobs": "prompt_logprobs",
    "structured_outputs": "guided",
    "extra_args": ENGINE_OPTIONS,
    "logprob_token_ids": ENGINE_OPTIONS,
    "prompt_logprob_start": ENGINE_OPTIONS,
    "repetition_detection": ENGINE_OPTIONS,
    "skip_reading_prefix_cache": ENGINE_OPTIONS,
    "stream_interval": ENGINE_OPTIONS,
    "watermarking": ENGINE_OPTIONS,
    "stop": TEXT,
    "include_stop_str_in_output": TEXT,
    "skip_special_tokens": TEXT,
    "spaces_between_special_tokens": TEXT,
    "n": WORKER,  # each choice is a separate generation
    "detokenize": WORKER,
    "output_kind": WORKER,
    "flat_logprobs": WORKER,
    "prompt_logprob_token_ids": REFUSED,
    "routed_experts_prompt_start": REFUSED,
    "trace_decode_token_ids": REFUSED,
    "skip_clone": INTERNAL,
    "output_text_buffer_length": INTERNAL,
}
"""Excludes fields with a leading underscore, which are private to vLLM."""

GUIDED_FIELDS: dict[str, str] = {
    "json": "guided.json_schema",
    "json_object": "guided.json_object",
    "regex": "guided.regex",
    "grammar": "guided.ebnf",
    "choice": "guided.choice",
    "structural_tag": "guided.structural_tag",
    "disable_any_whitespace": ENGINE_OPTIONS,
    "disable_additional_properties": ENGINE_OPTIONS,
    "whitespace_pattern": ENGINE_OPTIONS,
}

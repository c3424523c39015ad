"""Lists what sets each field of SGLang's SamplingParams, without exception."""

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
    "sampling_seed": "seed",
    "logit_bias": "logit_bias",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_token_ids": "stop_token_ids",
    "ignore_eos": "ignore_eos",
    "json_schema": "guided.json_schema",
    "regex": "guided.regex",
    "ebnf": "guided.ebnf",
    "structural_tag": "guided.structural_tag",
    "custom_params": ENGINE_OPTIONS,
    "stop": ENGINE_OPTIONS,
    "stop_regex": ENGINE_OPTIONS,
    "stream_interval": ENGINE_OPTIONS,
    "watermark": ENGINE_OPTIONS,
    "no_stop_trim": TEXT,
    "skip_special_tokens": TEXT,
    "spaces_between_special_tokens": TEXT,
    "n": WORKER,  # each choice is a separate generation
    "beam_width": REFUSED,
    "ebnf_full_assistant": INTERNAL,
    "is_normalized": INTERNAL,
    "stop_regex_max_len": INTERNAL,
    "stop_regex_strs": INTERNAL,
    "stop_str_max_len": INTERNAL,
    "stop_strs": INTERNAL,
}

"""What a request costs for each of its choices: a size for every field that may be long.

Each choice sends the options of its request to its worker and its postprocess replica, which parse and hold them, so a
body of a megabyte with sixteen choices is sixteen megabytes there. `SIZES` is complete: a field of the request that is
not a number is in it, or in `SHORT`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from services.common.base.budgets import Budget
from services.common.types.sampling import UNSET
from services.gateway.core.request import (
    ChatPrompt,
    EmbedsPrompt,
    GenerationRequest,
    Prompt,
    TextPrompt,
    TokenizedPrompt,
    TokenPrompt,
)

MAX_LOGPROB_VALUES = 2 << 20
"""Log-probabilities that a request may have in memory, about 120 bytes each; refused, budget `logprob_values`."""
LOGPROB_VALUES = Budget("logprob_values", MAX_LOGPROB_VALUES, "")
PER_ID = 36
"""Bytes of a number in a list: the object and its place."""
PER_ENTRY = 100
"""Bytes of an entry of an object, or of a text in a list, beside its characters."""


def _ids(ids: tuple[int, ...]) -> int:
    return PER_ID * len(ids)


def _texts(texts: tuple[str, ...]) -> int:
    return sum(map(len, texts)) + PER_ENTRY * len(texts)


def _lists(lists: tuple[tuple[int, ...], ...]) -> int:
    return PER_ID * sum(map(len, lists)) + PER_ENTRY * len(lists)


def _grammar(grammar: str | tuple[str, ...]) -> int:
    return len(grammar) if isinstance(grammar, str) else _texts(grammar)


def json_size(value: Any) -> int:
    """Returns about the bytes of a JSON value as objects."""
    size, left = 0, [value]
    while left:
        item = left.pop()
        size += PER_ID
        if isinstance(item, str):
            size += PER_ENTRY + len(item)
        elif isinstance(item, Mapping):
            size += PER_ENTRY * len(item) + sum(map(len, item))
            left.extend(item.values())
        elif isinstance(item, list):
            left.extend(item)
    return size


def prompt_size(prompt: Prompt) -> int:
    """Returns the bytes of a prompt as it is sent for a choice; token ids of a text take about as many as the text."""
    match prompt:
        case TokenPrompt():
            return len(prompt.token_ids)
        case EmbedsPrompt():
            return len(prompt.values)
        case TextPrompt():
            return len(prompt.text) + len(prompt.second_text)
        case ChatPrompt():
            parts = (prompt.messages_json, prompt.documents_json, prompt.chat_template)
            return sum(map(len, parts))


SIZES: dict[str, tuple[str, Callable[[Any], int]]] = {
    "prompt": ("prompt", prompt_size),
    "sampling.logit_bias": ("logit_bias", lambda biases: PER_ENTRY * len(biases)),
    "sampling.allowed_token_ids": ("allowed_token_ids", _ids),
    "sampling.bad_words": ("bad_words", _lists),
    "sampling.engine_options": ("engine_options", json_size),
    "stop.strings": ("stop", _texts),
    "stop.token_ids": ("stop_token_ids", _ids),
    "parsing.tools_json": ("tools", len),
    "parsing.tool_choice_json": ("tool_choice", len),
    "parsing.template_kwargs_json": ("chat_template_kwargs", len),
    "guided.grammar": ("response_format", _grammar),
}
"""Fields of GenerationRequest with their names for `FieldNameMap`, and their bytes for a choice."""
SHORT: dict[str, str] = {
    "request_id": "made by the gateway",
    "model": "the name of a served model, or the request ends",
    "lora": "at most 1,024 characters",
    "cache_salt": "at most 1,024 characters",
    "session_id": "at most 512 characters",
    "parsing.tool_parser": "a word of the gateway",
    "parsing.reasoning_parser": "a word of the gateway",
    "guided.kind": "a word of the gateway",
    "needs": "at most one for each capability",
    "hints": "of headers, whose length is bounded, and token ids in place of the prompt",
    "degraded": "at most one for each field",
    "template_fields": "not sent; texts of the body, which holds their memory",
}
"""The other fields of GenerationRequest that are not numbers, each with the reason why it needs no size."""
_OWN = [(path, *SIZES[path]) for path in SIZES if "." not in path]
_PARTS = {
    part: [(path.partition(".")[2], *SIZES[path]) for path in SIZES if path.startswith(f"{part}.")]
    for part in dict.fromkeys(path.partition(".")[0] for path in SIZES if "." in path)
}


def sizes_of(request: GenerationRequest) -> dict[str, int]:
    """Returns the bytes that a choice of a request takes, by the field's name in `SIZES`; without unset ones."""
    sizes = {field: size(value) for name, field, size in _OWN if (value := getattr(request, name))}
    for part, rows in _PARTS.items():
        owner = getattr(request, part)
        if owner is not None and owner is not UNSET:
            sizes.update({field: size(value) for name, field, size in rows if (value := getattr(owner, name))})
    return sizes


def held_by(request: GenerationRequest, prompt: TokenizedPrompt) -> int:
    """Returns the bytes that a running request holds in the gateway: its fields and the ids of its prompt."""
    hashes = len(prompt.block_hashes) + len(prompt.prompt_tail)
    return sum(sizes_of(request).values()) + len(prompt.token_ids) + hashes


def check_prompt_logprobs(request: GenerationRequest, length: int) -> None:
    """Raises SluiceError(INVALID_ARGUMENT) if all choices together would have too many of a prompt's log-probabilities.

    Args:
        length: tokens of the prompt.
    """
    if request.prompt_logprobs is not None:
        values = request.choices * length * (request.prompt_logprobs + 1)
        subject = "The log-probabilities of the prompt, for each token and its alternatives in each choice,"
        LOGPROB_VALUES.check(values, subject, param="prompt_logprobs")

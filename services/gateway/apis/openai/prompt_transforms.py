"""Request features that need the tokenizer: bad words, prompt truncation and fill-in-the-middle suffixes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from services.common.base.budgets import Budget
from services.common.base.errors import invalid
from services.common.base.packing import pack_u32, unpack_u32
from services.gateway.admission.permit import Permit
from services.gateway.apis.openai.schemas import CompletionRequest, GenerationFields
from services.gateway.backends.rpc.preprocess import PreprocessClient
from services.gateway.backends.workers.registry import WorkerEntry
from services.gateway.core.request import EmbedsPrompt, GenerationRequest, Prompt, TextPrompt, TokenPrompt

MAX_WORD_CHARACTERS = 16 << 10
"""Characters of all bad words of a request, 36 bytes for each token; refused, budget `word_characters`."""
_WORDS = Budget("word_characters", MAX_WORD_CHARACTERS, "")
FIM_MARKERS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("<PRE>", "<SUF>", "<MID>"),
)
"""The models' markers before the prefix, before the suffix, and before the text to fill in."""


def needs_tokenizer(fields: GenerationFields) -> bool:
    """Returns whether `resolve` would change the request."""
    return bool(fields.bad_words) or fields.truncate_prompt_tokens is not None or bool(_suffix(fields))


async def resolve_all(
    requests: Sequence[GenerationRequest],
    fields: GenerationFields,
    entry: WorkerEntry,
    preprocess: PreprocessClient,
    permit: Permit,
) -> list[GenerationRequest]:
    """Returns the generations of one request with these features resolved to token ids.

    Raises:
        SluiceError: as preprocess does, INVALID_ARGUMENT for words beyond their budget, OVERLOADED if the key has fewer
            tokens left than the words have.
    """
    if fields.bad_words:
        check_words(fields.bad_words)
        words = await _bad_words(fields.bad_words, entry.model, preprocess)
        tokens = sum(map(len, words))
        await permit.charge(tokens)
        permit.spent(tokens)
        requests = [replace(request, sampling=replace(request.sampling, bad_words=words)) for request in requests]
    return [await resolve(request, fields, entry, preprocess) for request in requests]


def check_words(words: Sequence[str]) -> None:
    """Raises SluiceError(INVALID_ARGUMENT) for bad words that are too long together."""
    _WORDS.check(sum(map(len, words)), "The characters of bad_words", param="bad_words")


async def resolve(
    request: GenerationRequest, fields: GenerationFields, entry: WorkerEntry, preprocess: PreprocessClient
) -> GenerationRequest:
    """Returns a generation with its prompt resolved to token ids; raises SluiceError as preprocess does."""
    if suffix := _suffix(fields):
        request = replace(request, prompt=await _fill_in_the_middle(request, suffix, preprocess))
    if fields.truncate_prompt_tokens is not None and not isinstance(request.prompt, EmbedsPrompt):
        prompt = await _truncated(request, fields, entry, preprocess)
        request = replace(request, prompt=prompt)
    return request


def _suffix(fields: GenerationFields) -> str:
    return (fields.suffix or "") if isinstance(fields, CompletionRequest) else ""


async def _fill_in_the_middle(request: GenerationRequest, suffix: str, preprocess: PreprocessClient) -> Prompt:
    """Returns prompt and suffix with the model's markers; raises SluiceError(INVALID_ARGUMENT) if it has none."""
    if not isinstance(request.prompt, TextPrompt):
        raise invalid("suffix requires a text prompt.", param="suffix", code="invalid_value")
    for markers in FIM_MARKERS:
        ids = [await _ids(marker, request.model, preprocess) for marker in markers]
        if all(len(marker_ids) == 1 for marker_ids in ids):
            break
    else:
        raise invalid(
            "suffix is not supported: this model has no fill-in-the-middle markers.",
            param="suffix",
            code="unsupported_parameter",
        )
    start = TextPrompt(markers[0], request.prompt.add_special_tokens)
    # The start marker is tokenized as a prompt, so that models with a BOS token get it.
    prefix = await preprocess.tokenize(request.model, start)
    before = await _ids(request.prompt.text, request.model, preprocess)
    after = await _ids(suffix, request.model, preprocess)
    return TokenPrompt(prefix.token_ids + pack_u32([*before, *ids[1], *after, *ids[2]]))


async def _bad_words(words: list[str], model: str, preprocess: PreprocessClient) -> tuple[tuple[int, ...], ...]:
    """Returns the token ids of each word at the start of a text and, if different, after a space."""
    forms = dict.fromkeys(form for word in words for form in (word.lstrip() or word, " " + word.lstrip()))
    ids = await asyncio.gather(*(_ids(form, model, preprocess) for form in forms))
    return tuple(dict.fromkeys(found for found in ids if found))


async def _ids(text: str, model: str, preprocess: PreprocessClient) -> tuple[int, ...]:
    prompt = await preprocess.tokenize(model, TextPrompt(text, add_special_tokens=False))
    return tuple(unpack_u32(prompt.token_ids))


async def _truncated(
    request: GenerationRequest, fields: GenerationFields, entry: WorkerEntry, preprocess: PreprocessClient
) -> Prompt:
    """Returns the prompt truncated to its last tokens, or to its first ones."""
    prompt = await preprocess.tokenize(entry.model, request.prompt)
    length = fields.truncate_prompt_tokens or 0
    if length == -1:
        limit = prompt.context_limit(entry.context_length) or prompt.length + 1
        length = max(limit - (request.stop.max_tokens or 1), 1)
    if prompt.length <= length:
        return request.prompt
    ids = prompt.token_ids
    return TokenPrompt(ids[: 4 * length] if fields.truncation_side == "right" else ids[-4 * length :])

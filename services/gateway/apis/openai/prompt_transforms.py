"""What of a request takes preprocess to understand: words that must not come out, prompts that are to be cut, and texts
with a gap in the middle."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from services.common.errors import invalid
from services.common.packing import pack_u32, unpack_u32
from services.gateway.apis.openai.schemas import CompletionRequest, GenerationFields
from services.gateway.clients.preprocess import PreprocessClient
from services.gateway.core.request import EmbedsPrompt, GenerationRequest, Prompt, TextPrompt, TokenPrompt
from services.gateway.workers.registry import WorkerEntry

FIM_MARKERS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("<PRE>", "<SUF>", "<MID>"),
)
"""What models write before a text, before what comes after the gap, and before what belongs into the gap."""


def needs_resolving(fields: GenerationFields) -> bool:
    """Whether there is anything to do."""
    return bool(fields.bad_words) or fields.truncate_prompt_tokens is not None or bool(_suffix(fields))


async def resolve(
    request: GenerationRequest, fields: GenerationFields, entry: WorkerEntry, preprocess: PreprocessClient
) -> GenerationRequest:
    """The request with nothing left that only text says; SluiceError as preprocess says."""
    if fields.bad_words:
        words = await _bad_words(fields.bad_words, entry.model, preprocess)
        request = replace(request, sampling=replace(request.sampling, bad_words=words))
    if suffix := _suffix(fields):
        request = replace(request, prompt=await _with_gap(request, suffix, preprocess))
    if fields.truncate_prompt_tokens is not None and not isinstance(request.prompt, EmbedsPrompt):
        prompt = await _truncated(request, fields, entry, preprocess)
        request = replace(request, prompt=prompt)
    return request


def _suffix(fields: GenerationFields) -> str:
    return (fields.suffix or "") if isinstance(fields, CompletionRequest) else ""


async def _with_gap(request: GenerationRequest, suffix: str, preprocess: PreprocessClient) -> Prompt:
    """The prompt, a gap and the suffix, in the model's markers; SluiceError(INVALID_ARGUMENT) when it has none."""
    if not isinstance(request.prompt, TextPrompt):
        raise invalid("suffix needs a prompt that is text.", param="suffix", code="invalid_value")
    for markers in FIM_MARKERS:
        ids = [await _ids(marker, request.model, preprocess) for marker in markers]
        if all(len(found) == 1 for found in ids):
            break
    else:
        raise invalid(
            "suffix is not supported: this model has no markers for filling in the middle.",
            param="suffix",
            code="unsupported_parameter",
        )
    start = TextPrompt(markers[0], request.prompt.add_special_tokens)
    opening = await preprocess.tokenize(request.model, start, 0, "", "")  # with a BOS, where the model wants one
    before = await _ids(request.prompt.text, request.model, preprocess)
    after = await _ids(suffix, request.model, preprocess)
    return TokenPrompt(opening.token_ids + pack_u32([*before, *ids[1], *after, *ids[2]]))


async def _bad_words(words: list[str], model: str, preprocess: PreprocessClient) -> tuple[tuple[int, ...], ...]:
    """Each word as it is written at the beginning of a text and, where that differs, after a space."""
    forms = [form for word in words for form in (word.lstrip() or word, " " + word.lstrip())]
    ids = await asyncio.gather(*(_ids(form, model, preprocess) for form in forms))
    return tuple(dict.fromkeys(found for found in ids if found))


async def _ids(text: str, model: str, preprocess: PreprocessClient) -> tuple[int, ...]:
    prompt = await preprocess.tokenize(model, TextPrompt(text, add_special_tokens=False), 0, "", "")
    return tuple(unpack_u32(prompt.token_ids))


async def _truncated(
    request: GenerationRequest, fields: GenerationFields, entry: WorkerEntry, preprocess: PreprocessClient
) -> Prompt:
    """The prompt's last tokens, or its first ones."""
    prompt = await preprocess.tokenize(entry.model, request.prompt, 0, "", "")
    length = fields.truncate_prompt_tokens or 0
    if length == -1:
        contexts = [context for context in (entry.context_length, prompt.context_length) if context]
        length = max(min(contexts, default=prompt.length + 1) - (request.stop.max_tokens or 1), 1)
    if prompt.length <= length:
        return request.prompt
    ids = prompt.token_ids
    return TokenPrompt(ids[: 4 * length] if fields.truncation_side == "right" else ids[-4 * length :])

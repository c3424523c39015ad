"""What of a request takes preprocess to understand: words that must not come out, and prompts cut to a length."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from services.common.packing import unpack_u32
from services.gateway.clients.catalogue import WorkerEntry
from services.gateway.clients.preprocess import PreprocessClient
from services.gateway.generation import EmbedsPrompt, GenerationRequest, Prompt, TextPrompt, TokenPrompt
from services.gateway.openai.schemas import GenerationFields


async def resolve(
    request: GenerationRequest, fields: GenerationFields, entry: WorkerEntry, preprocess: PreprocessClient
) -> GenerationRequest:
    """The request with nothing left that only text says; SluiceError as preprocess says."""
    if fields.bad_words:
        words = await _bad_words(fields.bad_words, entry.model, preprocess)
        request = replace(request, sampling=replace(request.sampling, bad_words=words))
    if fields.truncate_prompt_tokens is not None and not isinstance(request.prompt, EmbedsPrompt):
        prompt = await _truncated(request, fields, entry, preprocess)
        request = replace(request, prompt=prompt)
    return request


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

"""`truncation: auto`: drops the oldest turns of a conversation that exceeds the context."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from services.common.apis.responses.conversation import Conversation
from services.common.base.errors import SluiceError
from services.gateway.operations.media import check_media
from services.gateway.operations.runner import TranslatedRequest
from services.gateway.pipeline.models import Pipelines


async def truncated_to_fit(
    pipelines: Pipelines,
    chat: Conversation,
    whole: TranslatedRequest,
    reserved: int,
    translate: Callable[[Conversation], Awaitable[TranslatedRequest]],
) -> TranslatedRequest:
    """Returns the request of a conversation with as many of its newest turns as fit; the last turn is always retained.

    Sends one tokenize request for a conversation that fits, else about log2(turns) more.

    Args:
        whole: the generation request of the whole conversation.
        reserved: tokens of the context that are reserved for the output.
        translate: returns the generation request of a conversation.
    """
    starts = chat.turn_starts()
    if len(starts) == 1 or await _fits(pipelines, whole, reserved):
        return whole
    too_few, enough = 0, len(starts) - 1
    fitting: TranslatedRequest | None = None
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        shorter = await translate(chat.without_oldest(middle))
        if await _fits(pipelines, shorter, reserved):
            enough, fitting = middle, shorter
        else:
            too_few = middle
    return fitting or await translate(chat.without_oldest(enough))


async def _fits(pipelines: Pipelines, translated: TranslatedRequest, reserved: int) -> bool:
    generation = translated.generation
    entry = pipelines.registry.model(generation.model)
    try:
        check_media(pipelines.registry, entry.model, generation.prompt)
        prompt = await pipelines.preprocess.tokenize(entry.model, generation.prompt)
    except SluiceError as error:
        if error.code == "prompt_too_large":
            return False
        raise
    limit = prompt.context_limit(entry.context_length)
    return not limit or prompt.length + reserved <= limit

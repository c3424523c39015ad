"""Prompts with media items for engines that insert the placeholder tokens of an item themselves."""

from __future__ import annotations

import base64
from array import array
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from services.common.base.errors import SluiceError, internal, invalid
from services.common.types.media.spans import MediaKind
from services.worker.contract.generation import GenerateRequest, MediaItem


def unexpanded(
    token_ids: array[int], media: Sequence[MediaItem], placeholders: Collection[int] = (), generated: int = 0
) -> list[int]:
    """Returns a prompt as its engine expands it: each item's placeholder tokens are replaced by its `unexpanded_ids`.

    Args:
        placeholders: the model's placeholder tokens of every kind, which must not occur outside the items: vLLM would
            run with them.
        generated: number of tokens at the end that the model generated, which may be any.

    Raises:
        SluiceError: INVALID_ARGUMENT when the spans overlap, are out of order, or reach beyond the prompt, or a
            placeholder belongs to no item.
    """
    found: list[int] = []
    position = 0
    for index, item in enumerate(media):
        span = item.span
        if span.offset < position or span.length < 1 or span.end > len(token_ids):
            raise invalid(
                f"media[{index}] stands for the tokens {span.offset} to {span.end} of {len(token_ids)}; send items by "
                "offset, which do not overlap.",
                param="media",
            )
        found += _text(token_ids[position : span.offset], placeholders)
        found += array("I", span.unexpanded_ids) if span.unexpanded_ids else token_ids[span.offset : span.end]
        position = span.end
    prompt = max(len(token_ids) - generated, position)
    found += _text(token_ids[position:prompt], placeholders)
    found += token_ids[prompt:]
    return found


def _text(token_ids: array[int], placeholders: Collection[int]) -> array[int]:
    if any(placeholder in token_ids for placeholder in placeholders):
        raise invalid(
            "The prompt has a placeholder token without a media item; send as many items as placeholders.",
            param="media",
        )
    return token_ids


def with_single_placeholders(request: GenerateRequest, placeholder: int | None, engine: str) -> list[int]:
    """Returns a prompt with one placeholder for each image, for engines that neither check nor report the counts.

    Args:
        placeholder: the model's placeholder token; None for a model without images.
        engine: its name in errors.

    Raises:
        SluiceError: INVALID_ARGUMENT when images and placeholders do not match.
    """
    if placeholder is None:
        raise invalid(f"{engine} takes no images with this model.", param="media")
    for index, item in enumerate(request.media):
        if item.span.kind is not MediaKind.IMAGE or array("I", item.span.unexpanded_ids).count(placeholder) != 1:
            raise invalid(
                f"media[{index}] has no unexpanded_ids with one placeholder token of an image, as {engine} requires.",
                param="media",
            )
    return unexpanded(request.token_ids, request.media, (placeholder,), request.resumed_tokens)


def placeholder_of(config: Mapping[str, Any]) -> int | None:
    """Returns the placeholder token of images in a model's config.json; None if it has none."""
    found = [config[name] for name in ("image_token_id", "image_token_index") if isinstance(config.get(name), int)]
    return found[0] if found else None


def data_url(data: bytes) -> str:
    """Returns an image as a data URL; engines recognize the format by the content."""
    return "data:image/*;base64," + base64.b64encode(data).decode("ascii")


def check_expansion(token_ids: array[int], expanded: Sequence[int]) -> None:
    """Raises unless an engine expanded a prompt to the tokens of the request.

    An engine that runs with other tokens would answer another prompt: vLLM leaves a surplus placeholder as it is.

    Raises:
        SluiceError: INTERNAL, because preprocess and engine then disagree about the model.
    """
    if token_ids.tolist() != list(expanded):
        raise _disagreement(len(expanded), len(token_ids))


def check_length(found: int, expected: int) -> None:
    """Raises unless an engine expanded a prompt to as many tokens as the request has, if it reports only the number.

    Raises:
        SluiceError: INTERNAL, as `check_expansion`.
    """
    if found != expected:
        raise _disagreement(found, expected)


def _disagreement(engine: int, request: int) -> SluiceError:
    return internal(
        f"The engine expands this prompt with media items to {engine} other tokens than the {request} of the request; "
        "use the same model files in preprocess and worker."
    )

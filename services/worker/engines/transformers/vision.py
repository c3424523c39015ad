"""Runs models with a vision part: encodes pictures, and computes one sequence token by token.

Uses the public interface of transformers' models only. The placeholder tokens of the prompt are replaced by the
features of the pictures before the language model sees them, so that a placeholder that the model generates is text.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from transformers import AutoImageProcessor, DynamicCache

from services.common.base.errors import internal, invalid
from services.worker.contract.generation import GenerateRequest, MediaItem, PositionLogprobs
from services.worker.engines.transformers.batch_request import BatchRequest, Pictures
from services.worker.engines.transformers.folder import ModelFolder
from services.worker.engines.transformers.pictures import check_placeholders, open_picture
from services.worker.engines.transformers.sampler import choose

log = logging.getLogger(__name__)


class VisionModel:
    """A loaded model with a vision part, and its image processor.

    Args:
        model: A model of `AutoModelForImageTextToText`, on its device.
        processor: Turns decoded pictures into tensors, as `AutoImageProcessor` returns it.

    Attributes:
        placeholder: The token that stands for pictures.
    """

    def __init__(self, model: Any, processor: Any) -> None:
        self.placeholder = int(model.config.image_token_id)
        self._model = model
        self._processor = processor
        self._has_grid = hasattr(model.model, "get_rope_index")

    def check(self, request: GenerateRequest) -> None:
        """Raises SluiceError(INVALID_ARGUMENT) when placeholder tokens and media items do not belong together."""
        check_placeholders(request, self.placeholder)
        spans = [item.span for item in request.media]
        if self._has_grid and any(span.end == after.offset for span, after in pairwise(spans)):
            raise invalid(
                "Two media items follow each other without a token between them; this model cannot tell them apart.",
                param="media",
            )

    def encode(self, request: GenerateRequest) -> Pictures:
        """Decodes and encodes the pictures of a checked request, which is slow.

        Raises:
            SluiceError: INVALID_ARGUMENT for a picture that cannot be decoded or is rejected by the image processor,
                INTERNAL when the model makes another number of tokens of a picture than the prompt has.
        """
        tensors = [self._process(index, item) for index, item in enumerate(request.media)]
        try:
            inputs = {name: torch.cat([each[name] for each in tensors]).to(self._model.device) for name in tensors[0]}
            with torch.no_grad():
                features = list(self._model.model.get_image_features(**inputs).pooler_output)
        except Exception:  # models raise many types
            log.exception("failed to encode the pictures of a request", extra={"request": request.request_id})
            raise internal("The engine failed to encode the media items of this request.") from None
        _check_lengths(request.media, [int(each.shape[0]) for each in features])
        places = [place for item in request.media for place in range(item.span.offset, item.span.end)]
        return Pictures(torch.cat(features), self._ids(places), inputs.get("image_grid_thw"))

    def begin(self, batch_request: BatchRequest, token_ids: list[int]) -> VisionSequence:
        """Returns the sequence of a request; computes nothing yet."""
        return VisionSequence(self, batch_request, token_ids)

    def prompt(self, token_ids: list[int], pictures: Pictures | None) -> tuple[torch.Tensor, torch.Tensor | None, int]:
        """Returns the embeddings and positions of a whole sequence, and how far later positions are shifted."""
        ids = self._ids(token_ids)[None]
        embeddings = self._embed(ids)
        if pictures is not None:
            embeddings[0, pictures.places] = pictures.features.to(embeddings.dtype)
        if not self._has_grid:
            return embeddings, None, 0
        if pictures is None:
            return embeddings, self._positions(0, len(token_ids)), 0
        kinds = torch.zeros_like(ids, dtype=torch.int)
        kinds[0, pictures.places] = 1
        positions, shift = self._model.model.get_rope_index(ids, kinds, image_grid_thw=pictures.grid)
        return embeddings, positions, int(shift)

    def continuation(self, token_id: int, place: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the embedding and position of the next token.

        Args:
            place: Index of the token, shifted as `prompt` returned it.
        """
        positions = self._positions(place, place + 1) if self._has_grid else None
        return self._embed(self._ids([token_id])[None]), positions

    def logits(self, embeddings: torch.Tensor, positions: torch.Tensor | None, cache: Any) -> torch.Tensor:
        """Returns the logits after the last token [1, vocabulary] as float32, and adds the tokens to the cache."""
        output = self._model(
            inputs_embeds=embeddings, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1
        )
        logits: torch.Tensor = output.logits[:, -1].float()
        return logits

    def new_cache(self) -> Any:
        """Returns an empty cache for one sequence."""
        return DynamicCache(config=self._model.config.get_text_config())

    def _process(self, index: int, item: MediaItem) -> dict[str, torch.Tensor]:
        picture = open_picture(item.file)
        try:
            return dict(self._processor(images=[picture], return_tensors="pt"))
        except Exception as error:  # image processors raise many types
            log.debug("the image processor failed", exc_info=True)
            raise invalid(
                f"The model's image processor rejects media[{index}], {picture.width} x {picture.height} pixels; send "
                "another picture.",
                param="media",
                code="invalid_media",
            ) from error

    def _embed(self, ids: torch.Tensor) -> torch.Tensor:
        embeddings: torch.Tensor = self._model.get_input_embeddings()(ids)
        return embeddings

    def _ids(self, ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor(ids, dtype=torch.long, device=self._model.device)

    def _positions(self, start: int, end: int) -> torch.Tensor:
        """The same for time, height and width, as text has them."""
        return torch.arange(start, end, device=self._model.device).expand(3, 1, -1)


class VisionSequence:
    """The tokens of one request and their cache; used by one thread."""

    def __init__(self, model: VisionModel, batch_request: BatchRequest, token_ids: list[int]) -> None:
        self._model = model
        self._sampler = batch_request.sampler
        self._pictures: Pictures | None = batch_request.pictures
        self._token_ids = token_ids
        self._cache: Any = None
        self._shift = 0

    def next(self) -> tuple[int, PositionLogprobs | None]:
        """Computes and samples the next token; the whole prompt first."""
        with torch.no_grad():
            if self._cache is None:
                self._cache = self._model.new_cache()
                embeddings, positions, self._shift = self._model.prompt(self._token_ids, self._pictures)
            else:
                place = len(self._token_ids) - 1 + self._shift
                embeddings, positions = self._model.continuation(self._token_ids[-1], place)
            logits = self._model.logits(embeddings, positions, self._cache)
            _, (token_id,), logprobs = choose(logits, [self._sampler])
        self._token_ids.append(token_id)
        return token_id, None if logprobs is None else logprobs[0]

    def forget(self) -> None:
        """Frees the cache; the next token computes the whole sequence again."""
        self._cache = None


def load_processor(folder: ModelFolder) -> Any:
    """Returns the model's image processor, which needs Pillow and no torchvision.

    Raises:
        SluiceError: INVALID_ARGUMENT when the folder has none.
    """
    try:
        return AutoImageProcessor.from_pretrained(folder.path, backend="pil", local_files_only=True)
    except Exception as error:  # the library raises many unrelated types
        log.debug("failed to load the image processor", exc_info=True)
        raise invalid(
            f"transformers cannot load the image processor of the model at {folder.path}; use a folder with its "
            "preprocessor_config.json, and install Pillow.",
            param="model",
        ) from error


def _check_lengths(media: Sequence[MediaItem], lengths: Sequence[int]) -> None:
    if len(lengths) != len(media):
        raise internal(f"The model encodes {len(media)} pictures as {len(lengths)}; it is not one of the kinds served.")
    for index, (item, length) in enumerate(zip(media, lengths, strict=True)):
        if item.span.length != length:
            raise internal(
                f"media[{index}] has {item.span.length} placeholder tokens, but the model makes {length} of this "
                "picture; use the same model files in preprocess and worker."
            )

"""Which tokens stand for an image: the rules of the two most common families, read from the model's files.

The numbers equal those of the models' own processors in transformers, see `tests/engines/test_engines_image_rules.py`,
which preprocess does not need then.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from services.common.errors import SluiceError, invalid
from services.common.media.spans import MediaKind, MediaSpan
from services.common.packing import pack_u32, unpack_u32
from services.preprocess.media.images import ImageFacts
from services.preprocess.protocol import ImageRule

MOST_TOKENS = 1 << 20
_MOST_RATIO = 200  # of transformers
_QWEN_CLASSES = ("Qwen2VLProcessor", "Qwen2_5_VLProcessor")


@dataclass(frozen=True, slots=True)
class PatchGrid(ImageRule):
    """LLaVA: every image is cropped to one size, so all have the same number of tokens."""

    token_id: int
    tokens: int

    def ids(self, width: int, height: int) -> array[int]:
        return array("I", [self.token_id]) * self.tokens


@dataclass(frozen=True, slots=True)
class ResizedGrid(ImageRule):
    """Qwen2-VL: an image keeps its shape, and is scaled to a number of pixels within bounds.

    Attributes:
        side: pixels of a side of the square that becomes one token.
        least, most: bounds on the pixels of a scaled image.
    """

    token_id: int
    side: int
    least: int
    most: int

    def ids(self, width: int, height: int) -> array[int]:
        if max(width, height) / min(width, height) > _MOST_RATIO:
            raise ValueError(f"has sides whose ratio is over {_MOST_RATIO}")
        return array("I", [self.token_id]) * _scaled_squares(width, height, self.side, self.least, self.most)


@lru_cache(maxsize=4096)
def _scaled_squares(width: int, height: int, side: int, least: int, most: int) -> int:
    rows, columns = round(height / side), round(width / side)
    if rows * columns * side * side > most:
        scale = math.sqrt(height * width / most)
        rows, columns = (max(1, math.floor(length / scale / side)) for length in (height, width))
    elif rows * columns * side * side < least:
        scale = math.sqrt(least / (height * width))
        rows, columns = (math.ceil(length * scale / side) for length in (height, width))
    return rows * columns


def image_rule(
    config: Mapping[str, Any], preprocessor: Mapping[str, Any], processor: Mapping[str, Any]
) -> ImageRule | None:
    """Returns the rule that a model's files declare; None for models without images, and for other families.

    Args:
        config: the model's config.json.
        preprocessor: its preprocessor_config.json.
        processor: its processor_config.json.
    """
    preprocessor = {**preprocessor, **_mapping(processor.get("image_processor"))}
    name = processor.get("processor_class") or preprocessor.get("processor_class")
    token_id = config.get("image_token_id", config.get("image_token_index"))
    if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
        return None
    if name == "LlavaProcessor":
        tokens = _llava_tokens(config, preprocessor, processor)
        return PatchGrid(token_id, tokens) if 0 < tokens <= MOST_TOKENS else None
    if name in _QWEN_CLASSES:
        return _qwen_rule(preprocessor, token_id)
    return None


def _llava_tokens(config: Mapping[str, Any], preprocessor: Mapping[str, Any], processor: Mapping[str, Any]) -> int:
    """Returns the tokens of an image; 0 if the files do not fix one size."""
    crops = preprocessor.get("do_center_crop", True) and "crop_size" in preprocessor
    size = preprocessor.get("crop_size") if crops else preprocessor.get("size")
    sides = {"height": size, "width": size} if isinstance(size, int) else _mapping(size)
    height, width = _number(sides, "height", 0), _number(sides, "width", 0)
    vision = _mapping(config.get("vision_config"))
    patch = _number(processor, "patch_size", 0) or _number(vision, "patch_size", 0)
    if min(height, width, patch) < 1:
        return 0
    strategy = processor.get("vision_feature_select_strategy") or config.get("vision_feature_select_strategy")
    extra = processor.get("num_additional_image_tokens", 0)
    if not isinstance(extra, int):
        return 0
    return (height // patch) * (width // patch) + extra - (strategy == "default")


def _qwen_rule(preprocessor: Mapping[str, Any], token_id: int) -> ImageRule | None:
    size = _mapping(preprocessor.get("size"))
    least = preprocessor.get("min_pixels") or size.get("shortest_edge") or 56 * 56
    most = preprocessor.get("max_pixels") or size.get("longest_edge") or 28 * 28 * 1280
    side = _number(preprocessor, "patch_size", 14) * _number(preprocessor, "merge_size", 2)
    if not all(isinstance(number, int) and number > 0 for number in (least, most, side)):
        return None
    if most // (side * side) > MOST_TOKENS or least > most:
        return None
    return ResizedGrid(token_id, side, least, most)


def _number(values: Mapping[str, Any], name: str, default: int) -> int:
    value = values.get(name, default)
    return value if isinstance(value, int) else 0


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


@dataclass(frozen=True, slots=True)
class CountedItem:
    """A checked media item whose placeholder is to be expanded.

    Attributes:
        part: its content part, for errors.
        hash: of its file.
    """

    part: str
    hash: bytes
    facts: ImageFacts


def expand(packed: bytes, rule: ImageRule, items: Sequence[CountedItem]) -> tuple[bytes, tuple[MediaSpan, ...]]:
    """Replaces the i-th placeholder of packed ids by the tokens of item i.

    Returns:
        The packed ids, and a span for each item.

    Raises:
        SluiceError: INVALID_ARGUMENT if the model does not take an image, or the template wrote another number of
            placeholders.
    """
    ids = unpack_u32(packed)
    if ids.count(rule.token_id) != len(items):
        raise invalid(
            f"The chat template of the model writes {ids.count(rule.token_id)} placeholders for {len(items)} images; "
            "send images only in messages whose role may have them.",
            param=items[0].part if items else "messages",
            code="invalid_media",
        )
    expanded = array("I")
    spans = []
    start = 0
    single = pack_u32([rule.token_id])
    for item in items:
        at = ids.index(rule.token_id, start)
        expanded += ids[start:at]
        ids_of_item = _ids(rule, item)
        length = len(ids_of_item)
        spans.append(MediaSpan(MediaKind.IMAGE, item.hash, len(expanded), length, single, length))
        expanded += ids_of_item
        start = at + 1
    expanded += ids[start:]
    return pack_u32(expanded), tuple(spans)


def look_up(rule: ImageRule, items: Sequence[CountedItem]) -> None:
    """Makes a rule that waits for another process know the tokens of items; raises SluiceError as `expand`."""
    for item in items:
        _ids(rule, item)


def _ids(rule: ImageRule, item: CountedItem) -> array[int]:
    try:
        return rule.ids(item.facts.width, item.facts.height)
    except ValueError as error:
        raise _refused(item, error) from None


def _refused(item: CountedItem, error: ValueError) -> SluiceError:
    return invalid(f"The image of {item.part} {error}.", param=item.part, code="invalid_media")

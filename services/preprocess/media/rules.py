"""Which tokens stand for a media item: the rules of the most common families, read from the model's files.

The numbers equal those of the models' own processors in transformers, see `tests/engines/test_engines_image_rules.py`,
which preprocess does not need then.
"""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from services.common.packages.model_files import read_json
from services.common.types.media.facts import AudioFacts, MediaFacts, VideoFacts
from services.common.types.media.spans import MediaKind
from services.preprocess.contract.tokenizer import ImageRule, MediaRule, MediaRules

MAX_TOKENS = 1 << 20
"""Tokens of one media item; one that takes more is refused, and a model whose every item would is not supported."""
_MAX_RATIO = 200
"""Ratio of the sides of a picture, as in transformers; a picture with more is refused with INVALID_ARGUMENT."""
_IMAGE_PIXELS = (56 * 56, 28 * 28 * 1280)
_VIDEO_PIXELS = (28 * 28 * 128, 28 * 28 * 768)
_SAMPLES_A_SECOND = 2
_SAMPLED_FRAMES = (4, 768)
_QWEN_AUDIO_CLASS = "Qwen2AudioProcessor"
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
        return array("I", [self.token_id]) * _scaled_squares(width, height, self.side, self.least, self.most)


@lru_cache(maxsize=4096)
def _scaled_squares(width: int, height: int, side: int, least: int, most: int) -> int:
    """Returns the number of tokens of a scaled image; raises ValueError for a shape that is refused."""
    if max(width, height) / min(width, height) > _MAX_RATIO:
        raise ValueError(f"has sides whose ratio is over {_MAX_RATIO}")
    rows, columns = round(height / side), round(width / side)
    if rows * columns * side * side > most:
        scale = math.sqrt(height * width / most)
        rows, columns = (max(1, math.floor(length / scale / side)) for length in (height, width))
    elif rows * columns * side * side < least:
        scale = math.sqrt(least / (height * width))
        rows, columns = (math.ceil(length * scale / side) for length in (height, width))
    return rows * columns


@dataclass(frozen=True, slots=True)
class SampledFrames(MediaRule):
    """Qwen2-VL: frames are taken out of a video and scaled as images are; neighbours share tokens.

    The frames are those of vLLM's loader for this family: two a second, an even number within bounds, and one more
    where the division of the length leaves room for it.

    Attributes:
        side, least, most: as in ResizedGrid.
        together: number of frames that share tokens.
    """

    token_id: int
    side: int
    least: int
    most: int
    together: int

    def ids_of(self, facts: MediaFacts) -> array[int]:
        assert isinstance(facts, VideoFacts)
        if facts.frames < 2:
            raise ValueError("has a single frame; send it as an image")
        groups = -(-sampled_frames(facts.frames, facts.rate, facts.lost) // self.together)
        squares = _scaled_squares(facts.width, facts.height, self.side, self.least, self.most)
        return _repeated(self.token_id, groups * squares)


def sampled_frames(frames: int, rate: float, lost: int = 0) -> int:
    """Returns the number of frames that engines take out of a video of the Qwen2-VL family.

    Args:
        lost: how many of the last frames cannot be read, so that they are left out.
    """
    least, most = _SAMPLED_FRAMES
    wanted = min(max(frames / rate * _SAMPLES_A_SECOND, least), min(most, frames) // 2 * 2, frames)
    step = frames / (int(wanted) // 2 * 2)
    count = math.ceil(frames / step)
    return sum(min(int(step * index), frames - 1) < frames - lost for index in range(count)) if lost else count


@dataclass(frozen=True, slots=True)
class AudioWindow(MediaRule):
    """Qwen2-Audio: a token stands for four steps of the spectrogram; only the first seconds are used.

    Attributes:
        rate: samples a second that the model takes; audio with another rate is resampled.
        step: samples of a step of the spectrogram.
        samples: most samples.
    """

    token_id: int
    rate: int
    step: int
    samples: int

    def ids_of(self, facts: MediaFacts) -> array[int]:
        assert isinstance(facts, AudioFacts)
        samples = min(_resampled(facts.samples, facts.rate, self.rate), self.samples)
        tokens = ((-(-samples // self.step) - 1) // 2 - 1) // 2 + 1
        if tokens < 1:
            raise ValueError("is too short for a token")
        return _repeated(self.token_id, tokens)


def _resampled(samples: int, rate: int, wanted: int) -> int:
    """Returns the number of samples at another rate, rounded as torchaudio does: through a float of 32 bits."""
    if rate == wanted:
        return samples
    common = math.gcd(rate, wanted)
    exact: float = struct.unpack("f", struct.pack("f", (wanted // common) * samples / (rate // common)))[0]
    return math.ceil(exact)


def _repeated(token_id: int, count: int) -> array[int]:
    if count > MAX_TOKENS:
        raise ValueError(f"has more than {MAX_TOKENS:,} tokens")
    return array("I", [token_id]) * count


class ModelFiles(NamedTuple):
    """The files of a model that declare its media items; empty where it lacks one.

    Attributes:
        config: config.json.
        preprocessor: preprocessor_config.json.
        processor: processor_config.json.
        video: video_preprocessor_config.json.
    """

    config: Mapping[str, Any]
    preprocessor: Mapping[str, Any] = {}
    processor: Mapping[str, Any] = {}
    video: Mapping[str, Any] = {}

    @classmethod
    def read(cls, path: Path) -> ModelFiles:
        """Returns the files in a model's folder."""
        names = ("config.json", "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
        return cls(*(read_json(path, name) for name in names))

    @property
    def processor_class(self) -> Any:
        """Name of the model's class in transformers that makes the tokens of media items."""
        nested = _mapping(self.processor.get("image_processor")).get("processor_class")
        return self.processor.get("processor_class") or nested or self.preprocessor.get("processor_class")

    def token_id(self, kind: MediaKind) -> int | None:
        """Returns the placeholder token of a kind; None without one."""
        name = kind.capability
        value = self.config.get(f"{name}_token_id", self.config.get(f"{name}_token_index"))
        return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def media_rules(files: ModelFiles) -> MediaRules:
    """Returns the rules that a model's files declare; empty for models without media, and for other families."""
    makers = {MediaKind.IMAGE: image_rule, MediaKind.AUDIO: _audio_rule, MediaKind.VIDEO: _video_rule}
    found = {kind: make(files) for kind, make in makers.items()}
    return {kind: rule for kind, rule in found.items() if rule is not None}


def image_rule(files: ModelFiles) -> ImageRule | None:
    """Returns the rule of images among `media_rules`."""
    preprocessor = {**files.preprocessor, **_mapping(files.processor.get("image_processor"))}
    name, token_id = files.processor_class, files.token_id(MediaKind.IMAGE)
    if token_id is None:
        return None
    if name == "LlavaProcessor":
        tokens = _llava_tokens(files.config, preprocessor, files.processor)
        return PatchGrid(token_id, tokens) if 0 < tokens <= MAX_TOKENS else None
    grid = _qwen_grid(preprocessor, _IMAGE_PIXELS) if name in _QWEN_CLASSES else None
    return None if grid is None else ResizedGrid(token_id, *grid)


def _audio_rule(files: ModelFiles) -> MediaRule | None:
    extractor = {**files.preprocessor, **_mapping(files.processor.get("feature_extractor"))}
    token_id = files.token_id(MediaKind.AUDIO)
    if files.processor_class != _QWEN_AUDIO_CLASS or token_id is None:
        return None
    rate, step = _number(extractor, "sampling_rate", 16_000), _number(extractor, "hop_length", 160)
    samples = rate * _number(extractor, "chunk_length", 30)
    if min(rate, step, samples) < 1 or samples // step > MAX_TOKENS:
        return None
    return AudioWindow(token_id, rate, step, samples)


def _video_rule(files: ModelFiles) -> MediaRule | None:
    own = _mapping(files.processor.get("video_processor")) or files.video or files.preprocessor
    token_id = files.token_id(MediaKind.VIDEO)
    grid = _qwen_grid(own, _VIDEO_PIXELS) if files.processor_class in _QWEN_CLASSES else None
    together = _number(own, "temporal_patch_size", 2)
    if token_id is None or grid is None or together < 1:
        return None
    return SampledFrames(token_id, *grid, together)


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


def _qwen_grid(preprocessor: Mapping[str, Any], default: tuple[int, int]) -> tuple[int, int, int] | None:
    """Returns side, least and most of a ResizedGrid.

    Args:
        default: least and most where the file declares none.
    """
    size = _mapping(preprocessor.get("size"))
    least = preprocessor.get("min_pixels") or size.get("shortest_edge") or default[0]
    most = preprocessor.get("max_pixels") or size.get("longest_edge") or default[1]
    side = _number(preprocessor, "patch_size", 14) * _number(preprocessor, "merge_size", 2)
    if not all(isinstance(number, int) and number > 0 for number in (least, most, side)):
        return None
    if most // (side * side) > MAX_TOKENS or least > most:
        return None
    return side, least, most


def _number(values: Mapping[str, Any], name: str, default: int) -> int:
    value = values.get(name, default)
    return value if isinstance(value, int) else 0


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}

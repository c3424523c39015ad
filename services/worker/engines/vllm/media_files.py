"""How vLLM reads files of media items: by its own loaders, with the options of its server, within a bound.

As in `library`, vLLM is imported when it is used.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from services.common.base.errors import invalid
from services.common.types.media.spans import MediaKind
from services.worker.engines.vllm import library

log = logging.getLogger(__name__)

DECODED_BYTES = "VLLM_MAX_MEDIA_REQUEST_DECODE_BYTES"
"""Environment variable by which vLLM 0.33 and newer bound the decoded items of a prompt; here all but images."""
MAX_DECODED_BYTES = 715_827_880
"""Bytes of a prompt's decoded audio and videos, unless DECODED_BYTES is set; more are refused with INVALID_ARGUMENT."""


@dataclass
class DecodedBudget:
    """What the decoded audio and videos of a prompt may still occupy, in bytes."""

    most: int
    left: int

    def check(self, size: float) -> None:
        """Raises SluiceError(INVALID_ARGUMENT) if it is less than `size`."""
        if size > self.left:
            raise invalid(
                f"The decoded audio and videos of a prompt occupy more than {self.most} bytes; send fewer, smaller or "
                f"shorter ones, or set {DECODED_BYTES} in the worker's environment.",
                param="media",
            )

    @classmethod
    def full(cls) -> Self:
        """A budget of which nothing is taken."""
        most = int(os.environ.get(DECODED_BYTES) or MAX_DECODED_BYTES) or sys.maxsize
        return cls(most, most)

    def take(self, size: int) -> None:
        """Reduces it by `size`; raises as `check`."""
        self.check(size)
        self.left -= size


Load = Callable[[bytes, DecodedBudget], Any]
"""Decodes a file as vLLM's server does; slow."""

_AUDIO_PACKAGES = {"auto": ("av", "soundfile"), "pyav": ("av",)}
_VIDEO_PACKAGES = {"opencv": ("cv2",)}
"""Packages of vLLM's backends; others are named as their package."""
MAX_FRAMES = 1 << 18
"""Frames that a video declares; a video with more is refused with INVALID_ARGUMENT."""
_FRAME_WIDTH, _FRAME_HEIGHT = 3, 4
"""Properties of OpenCV's captures."""


@dataclass(frozen=True)
class Reader:
    """How vLLM reads files of a kind.

    Attributes:
        options: of its loader; JSON.
        isolated: whether another process may read the files, because its loader needs no GPU.
    """

    options: Mapping[str, Any]
    isolated: bool


def readers_of(model_config: Any, info: Any) -> dict[MediaKind, Reader]:
    """Returns how files of each kind are read: as by `vllm serve` with the same options."""
    found: dict[MediaKind, Reader] = {}
    for kind in MediaKind:
        if info.allowed_mm_limits.get(kind.capability, 0) <= 0:
            continue
        needed, reader = _READERS[kind](model_config, info, model_config.multimodal_config.media_io_kwargs)
        if problem := _problem(needed):
            log.warning("vLLM's model takes %s, which is not offered: %s", kind.capability, problem)
        else:
            found[kind] = reader
    return found


def _images(model_config: Any, info: Any, options: Mapping[str, Any]) -> tuple[Collection[str], Reader]:
    return (), Reader(options.get("image", {}), isolated=False)


def _audio(model_config: Any, info: Any, options: Mapping[str, Any]) -> tuple[Collection[str], Reader]:
    chosen = options.get("audio", {})
    backend = chosen.get("audio_backend") or "auto"
    resampler = {"pyav": "av"}.get(info.data_parser.audio_resampler.method, info.data_parser.audio_resampler.method)
    return {*_AUDIO_PACKAGES.get(backend, (backend,)), resampler}, Reader(chosen, isolated=True)


def _videos(model_config: Any, info: Any, options: Mapping[str, Any]) -> tuple[Collection[str], Reader]:
    from vllm.multimodal.video import get_video_loader_backend_for_processor
    from vllm.transformers_utils.processor import get_video_processor_cls_name

    chosen = dict(options.get("video", {}))
    backend = get_video_loader_backend_for_processor(get_video_processor_cls_name(model_config))
    if backend and "video_backend" not in chosen:
        chosen["video_backend"] = backend
    decoder = chosen.get("backend", "opencv")
    reader = Reader({"image": options.get("image", {}), "video": chosen}, isolated=decoder in _VIDEO_PACKAGES)
    return _VIDEO_PACKAGES.get(decoder, (decoder,)), reader


def load_of(kind: MediaKind, options: Mapping[str, Any]) -> Load:
    """Returns the function that decodes files of a kind, given the options of their reader."""
    return _LOADS[kind](options)


def _load_of_images(options: Mapping[str, Any]) -> Load:
    image_io = _image_io(options)
    return lambda data, budget: image_io.load_bytes(data)


def _image_io(options: Mapping[str, Any]) -> Any:
    from vllm.multimodal.media.image import ImageMediaIO

    return ImageMediaIO(**{"image_mode": "RGB", **options})


def _load_of_audio(options: Mapping[str, Any]) -> Load:
    from vllm.multimodal.media.audio import AudioMediaIO

    audio_io = AudioMediaIO(**options)

    def load(data: bytes, budget: DecodedBudget) -> Any:
        samples, rate = audio_io.load_bytes(data)
        budget.take(samples.nbytes)
        return samples, rate

    return load


def _load_of_videos(options: Mapping[str, Any]) -> Load:
    from vllm.multimodal.media.video import VideoMediaIO

    image_io = _image_io(options["image"])

    def load(data: bytes, budget: DecodedBudget) -> Any:
        video_io = VideoMediaIO(image_io, **options["video"])
        video_io.video_loader = _bounded(video_io.video_loader, budget)
        video = video_io.load_bytes(data)
        frames, _ = video.media
        budget.take(frames.nbytes)
        return video

    return load


def _bounded(loader: Any, budget: DecodedBudget) -> Any:
    """Returns vLLM's loader of videos with a check of the frames that it has chosen to decode."""
    base: Any = type(loader)

    class Bounded(base):  # type: ignore[misc]
        @classmethod
        def read_frames(cls, cap: Any, frame_idx: Sequence[int], *args: Any, **kwargs: Any) -> Any:
            width, height = cap.get(_FRAME_WIDTH), cap.get(_FRAME_HEIGHT)
            budget.check(3 * width * height * len(set(frame_idx)))
            if max(frame_idx, default=0) >= MAX_FRAMES:
                raise invalid(f"A video declares more than {MAX_FRAMES:,} frames; send a shorter one.", param="media")
            return super().read_frames(cap, frame_idx, *args, **kwargs)

    return Bounded()


_READERS = {MediaKind.IMAGE: _images, MediaKind.AUDIO: _audio, MediaKind.VIDEO: _videos}
_LOADS = {MediaKind.IMAGE: _load_of_images, MediaKind.AUDIO: _load_of_audio, MediaKind.VIDEO: _load_of_videos}


def _problem(packages: Collection[str]) -> str:
    """Returns why a package of several cannot be imported; empty if all can."""
    for package in sorted(packages):
        try:
            importlib.import_module(package)
        except Exception as error:  # also what a library of another machine raises
            return f"install {package} in the worker's environment ({library.first_line(error)})"
    return ""

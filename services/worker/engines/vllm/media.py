"""Media items in vLLM: kinds that its model takes, and prompts that its own loaders and processor make of files.

As in `library`, vLLM is imported when it is used.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from services.common.errors import invalid
from services.common.media.spans import MediaKind, content_hash
from services.worker.contract.generation import MediaItem
from services.worker.engines.shared.media_prompts import check_expansion, unexpanded
from services.worker.engines.vllm import library

log = logging.getLogger(__name__)

Load = Callable[[bytes], Any]
"""Decodes a file as vLLM's server does; slow."""

KNOWN_FILES = 1 << 18
"""Files whose kind is remembered; more than vLLM's caches hold."""

_AUDIO_PACKAGES = {"auto": ("av", "soundfile"), "pyav": ("av",)}
_VIDEO_PACKAGES = {"opencv": ("cv2",)}
"""Packages of vLLM's backends; others are named as their package."""


class MediaPrompts:
    """Makes prompts with media items for a started vLLM.

    Attributes:
        kinds: kinds of items that the model takes, without those whose files vLLM lacks packages for.
    """

    def __init__(self, llm: Any) -> None:
        """Asks vLLM for the model's kinds; logs a warning for a kind whose packages cannot be imported."""
        self._llm = llm
        self._loads: dict[MediaKind, Load] = {}
        self._placeholders: frozenset[int] = frozenset()
        self._first_kind: OrderedDict[bytes, MediaKind] = OrderedDict()
        processor = llm.renderer.mm_processor
        if processor is not None:
            self._loads = _loads(llm.model_config, processor.info)
            self._placeholders = _placeholders(llm.model_config.hf_config, processor.info.get_hf_processor())
        self.kinds = frozenset(self._loads)

    async def prompt(self, token_ids: array[int], media: Sequence[MediaItem], cache_salt: str, generated: int) -> Any:
        """Returns a prompt with media items as a preprocessed vLLM input.

        The content hash is each item's identifier in vLLM's caches and events.

        Args:
            generated: number of tokens at the end that an earlier worker generated.

        Raises:
            SluiceError: INVALID_ARGUMENT for a file that vLLM rejects, INTERNAL when vLLM expands the prompt otherwise.
        """
        from vllm.renderers.inputs.preprocess import parse_model_prompt

        short = unexpanded(token_ids, media, self._placeholders, generated)
        raw: dict[str, Any] = {
            "prompt_token_ids": short,
            "multi_modal_data": await asyncio.to_thread(self._decoded, media),
            "multi_modal_uuids": _by_kind(media, map(self._identifier, media)),
        }
        if cache_salt:
            raw["cache_salt"] = cache_salt
        renderer = self._llm.renderer
        try:
            parsed = parse_model_prompt(self._llm.model_config, raw)
            (prompt,) = await renderer.render_cmpl_async([parsed], renderer.default_cmpl_tok_params)
        except (AssertionError, RuntimeError) as error:  # vLLM's own, such as of an item without a placeholder
            raise invalid(f"vLLM rejected the media items: {library.first_line(error)}", param="media") from error
        except Exception as error:
            raise library.error_of(error) from error
        check_expansion(token_ids, prompt["prompt_token_ids"])
        return prompt

    def _decoded(self, media: Sequence[MediaItem]) -> dict[str, list[Any]]:
        found = []
        for index, item in enumerate(media):
            kind = item.span.kind
            if kind not in self._loads:
                raise invalid(
                    f"vLLM does not take media[{index}] of the kind {kind.capability} with this model; omit it.",
                    param="media",
                )
            try:
                found.append(self._loads[kind](item.file.data))
            except Exception as error:  # decoders raise many types for broken files
                reason = library.first_line(error)
                raise invalid(
                    f"vLLM cannot read media[{index}] as {kind.capability}: {reason}", param="media"
                ) from error
        return _by_kind(media, found)

    def _identifier(self, item: MediaItem) -> str:
        """Returns an item's identifier: its content hash, unless the same file was an item of another kind before.

        vLLM's caches know items by identifier only, and a film can be an audio clip as well. Other services cannot
        compute the identifier of its second kind, so their predictions leave out its blocks.
        """
        kind, content = item.span.kind, item.span.hash
        first = self._first_kind.setdefault(content, kind)
        self._first_kind.move_to_end(content)
        if len(self._first_kind) > KNOWN_FILES:
            self._first_kind.popitem(last=False)
        return (content if first is kind else content_hash(kind.capability.encode() + content)).hex()


def _by_kind(media: Sequence[MediaItem], values: Iterable[Any]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for item, value in zip(media, values, strict=True):
        found.setdefault(item.span.kind.capability, []).append(value)
    return found


def _loads(model_config: Any, info: Any) -> dict[MediaKind, Load]:
    """Returns how files of each kind are read: as by `vllm serve` with the same options."""
    options = model_config.multimodal_config.media_io_kwargs
    found: dict[MediaKind, Load] = {}
    for kind in MediaKind:
        if info.allowed_mm_limits.get(kind.capability, 0) <= 0:
            continue
        needed, load = _READERS[kind](model_config, info, options)
        if problem := _problem(needed):
            log.warning("vLLM's model takes %s, which is not offered: %s", kind.capability, problem)
        else:
            found[kind] = load
    return found


def _images(model_config: Any, info: Any, options: Mapping[str, Any]) -> tuple[Collection[str], Load]:
    return (), _image_io(options).load_bytes


def _image_io(options: Mapping[str, Any]) -> Any:
    from vllm.multimodal.media.image import ImageMediaIO

    return ImageMediaIO(**{"image_mode": "RGB", **options.get("image", {})})


def _audio(model_config: Any, info: Any, options: Mapping[str, Any]) -> tuple[Collection[str], Load]:
    from vllm.multimodal.media.audio import AudioMediaIO

    chosen = options.get("audio", {})
    backend = chosen.get("audio_backend") or "auto"
    resampler = {"pyav": "av"}.get(info.data_parser.audio_resampler.method, info.data_parser.audio_resampler.method)
    logging.getLogger(AudioMediaIO.__module__).addFilter(_Once("torchcodec unavailable"))
    return {*_AUDIO_PACKAGES.get(backend, (backend,)), resampler}, AudioMediaIO(**chosen).load_bytes


def _videos(model_config: Any, info: Any, options: Mapping[str, Any]) -> tuple[Collection[str], Load]:
    from vllm.multimodal.media.video import VideoMediaIO
    from vllm.multimodal.video import get_video_loader_backend_for_processor
    from vllm.transformers_utils.processor import get_video_processor_cls_name

    chosen = dict(options.get("video", {}))
    backend = get_video_loader_backend_for_processor(get_video_processor_cls_name(model_config))
    if backend and "video_backend" not in chosen:
        chosen["video_backend"] = backend
    decoder = chosen.get("backend", "opencv")
    return _VIDEO_PACKAGES.get(decoder, (decoder,)), VideoMediaIO(_image_io(options), **chosen).load_bytes


_READERS = {MediaKind.IMAGE: _images, MediaKind.AUDIO: _audio, MediaKind.VIDEO: _videos}


def _problem(packages: Collection[str]) -> str:
    """Returns why a package of several cannot be imported; empty if all can."""
    for package in sorted(packages):
        try:
            importlib.import_module(package)
        except Exception as error:  # also what a library of another machine raises
            return f"install {package} in the worker's environment ({library.first_line(error)})"
    return ""


def _placeholders(*sources: Any) -> frozenset[int]:
    """Returns the placeholder tokens of every kind, by the names that models' configs and processors have for them."""
    names = [f"{kind.capability}_token_{end}" for kind in MediaKind for end in ("id", "index")]
    found = (getattr(source, name, None) for source in sources for name in names)
    return frozenset(token for token in found if isinstance(token, int))


class _Once(logging.Filter):
    """Lets the first record pass whose text begins as given: vLLM logs it for every clip."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text
        self._passed = False

    def filter(self, record: logging.LogRecord) -> bool:
        if not str(record.msg).startswith(self._text):
            return True
        passed, self._passed = self._passed, True
        return not passed

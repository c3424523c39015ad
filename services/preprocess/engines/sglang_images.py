"""SGLang's own processor of images for one model, without its engine."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # nothing is compiled here, and the compiler may be missing
os.environ.setdefault("SGLANG_IO_WORKERS", "1")  # each thread takes address space, which is limited

import torch

from services.common.base.errors import first_line

ARCHITECTURES = ("Qwen2VLForConditionalGeneration",)
"""Models whose images are tested."""
_CPU_KERNELS = (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
)
_NAMESPACE = "sgl_kernel"
_libraries: list[Any] = []  # declarations end with their library


class UnsupportedImages(Exception):
    """The model takes no images; the text says why, as a sentence."""


class ImageProcessor:
    """The processor of a model's images.

    Args:
        model_config: SGLang's configuration of the model, which must be published for this process.
        server_args: SGLang's arguments.

    Raises:
        UnsupportedImages: SGLang has none, or it cannot be used here.
    """

    def __init__(self, model_config: Any, server_args: Any) -> None:
        named = getattr(model_config.hf_config, "architectures", None) or []
        if not set(named).intersection(ARCHITECTURES):
            raise UnsupportedImages(f"With the processor sglang, only {', '.join(ARCHITECTURES)} takes images.")
        try:
            version("torchvision")
        except PackageNotFoundError:
            raise UnsupportedImages(
                "The processor sglang needs the package torchvision for images: install it beside sglang."
            ) from None
        _declare_missing_kernels()
        try:
            # Imported here: the modules load every model of the family.
            from sglang.srt.managers.tokenizer_manager import get_processor_wrapper
            from sglang.srt.multimodal.processors.qwen_vl import QwenVLImageProcessor

            own = get_processor_wrapper()
            self._processor = QwenVLImageProcessor(
                model_config.hf_config, server_args, own, "default", skip_mm_pool=True
            )
        except Exception as error:
            reason = first_line(error, 200).rstrip(".") or type(error).__name__
            raise UnsupportedImages(f"SGLang's processor of images cannot be loaded: {reason}.") from error
        self.token_id = int(self._processor.IM_TOKEN_ID)
        self._loop = asyncio.new_event_loop()

    def expand(self, text: str, images: Sequence[Any]) -> tuple[list[int], list[tuple[int, int]]]:
        """Returns the ids of a rendered prompt with the tokens of its images, and the spans of those.

        Args:
            images: SGLang's `ImageData`, one for each placeholder.
        """
        made = self._loop.run_until_complete(
            self._processor.process_mm_data_async(
                image_data=list(images),
                audio_data=None,
                input_text=text,
                request_obj=SimpleNamespace(video_data=None, audio_data=None, rid="preprocess"),
                max_req_input_len=None,
            )
        )
        ranges = sorted((int(first), int(last)) for item in made.mm_items for first, last in item.offsets)
        return [int(token) for token in made.input_ids], [(first, last - first + 1) for first, last in ranges]


def _declare_missing_kernels() -> None:
    """Declares operators that modules of SGLang look up when imported, and that builds for CPUs may lack."""
    library = torch.library.Library(_NAMESPACE, "FRAGMENT")
    _libraries.append(library)
    for name in _CPU_KERNELS:
        if not hasattr(getattr(torch.ops, _NAMESPACE), name):
            library.define(f"{name}(Tensor value) -> Tensor")

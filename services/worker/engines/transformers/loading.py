"""Loads a model's weights with torch and transformers."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any, Literal

import torch
import transformers

from services.common.base.errors import ErrorKind, SluiceError, invalid
from services.worker.engines.transformers.folder import DTYPE_BYTES, ModelFolder
from services.worker.engines.transformers.options import Options
from services.worker.engines.transformers.sizing import MIB, free_memory

Kind = Literal["text", "images", "classes"]
_CLASSES = {
    "text": "AutoModelForCausalLM",
    "images": "AutoModelForImageTextToText",
    "classes": "AutoModelForSequenceClassification",
}
VERSION = str(transformers.__version__)
log = logging.getLogger(__name__)


def device_of(options: Options) -> torch.device:
    """Returns the configured device.

    Raises:
        SluiceError: INVALID_ARGUMENT when the device is not available.
    """
    name = options.device if options.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except Exception as error:  # torch raises many unrelated types
        raise invalid(f"Device {name!r} is not available: {_sentence(error)}.", param="engine_args") from error
    return device


def dtype_of(folder: ModelFolder, options: Options) -> str:
    """Returns torch's name of the weights' data type."""
    return folder.dtype if options.dtype == "auto" else options.dtype


def free_memory_on(device: torch.device) -> int:
    """Returns the free memory of a device in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return free_memory()


def load_model(folder: ModelFolder, options: Options, device: torch.device, kind: Kind = "text") -> Any:
    """Returns the model on its device in evaluation mode.

    Args:
        kind: "text" for continuous batching, "images" for a model with a vision part, "classes" with its head for
            sequence classification.

    Raises:
        SluiceError: INVALID_ARGUMENT when transformers cannot load it, FAILED_PRECONDITION when memory is insufficient.
    """
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    needed = folder.weight_bytes * DTYPE_BYTES[dtype_of(folder, options)] // DTYPE_BYTES[folder.dtype]
    if needed > free_memory_on(device):
        raise _out_of_memory(needed, free_memory_on(device))
    transformers.logging.disable_progress_bar()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.WARNING)
    paged = kind == "text" and options.attention == "eager"
    with _load_errors(folder):
        model = getattr(transformers, _CLASSES[kind]).from_pretrained(
            folder.path,
            dtype=getattr(torch, dtype_of(folder, options)),
            attn_implementation="paged|eager" if paged else options.attention,
            trust_remote_code=options.trust_remote_code,
            local_files_only=True,
        )
        model = model.to(device)
    model.eval()
    model.requires_grad_(False)
    return model


@contextlib.contextmanager
def _load_errors(folder: ModelFolder) -> Iterator[None]:
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise _out_of_memory(folder.weight_bytes, 0) from error
    except Exception as error:  # the library raises many unrelated types
        log.debug("failed to load the model", exc_info=True)
        raise invalid(
            f"transformers {VERSION} cannot load the model at {folder.path}: {_sentence(error)}.", param="model"
        ) from error


def _out_of_memory(needed: int, free: int) -> SluiceError:
    return SluiceError(
        ErrorKind.FAILED_PRECONDITION,
        f"Not enough memory: the weights need {needed // MIB} MiB and {free // MIB} MiB are free; use a smaller model.",
        code="not_enough_memory",
    )


def _sentence(error: Exception) -> str:
    """Returns the first sentence of an error message."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].split(". ")[0].rstrip(".:")[:300]

"""Loads a model into memory; needs torch and transformers."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
import transformers

from services.common.errors import ErrorKind, SluiceError, invalid
from services.worker.engines.transformers.folder import DTYPE_BYTES, ModelFolder
from services.worker.engines.transformers.options import Options
from services.worker.engines.transformers.sizing import MIB, free_memory

VERSION = str(transformers.__version__)
log = logging.getLogger(__name__)


def device_of(options: Options) -> torch.device:
    """The device that options name.

    Raises:
        SluiceError: INVALID_ARGUMENT when there is no such device.
    """
    name = options.device if options.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except Exception as error:  # torch raises many unrelated types
        raise invalid(f"Device {name!r} cannot be used: {_sentence(error)}.", param="engine_args") from error
    return device


def dtype_of(folder: ModelFolder, options: Options) -> str:
    """The numbers' type as torch names it."""
    return folder.dtype if options.dtype == "auto" else options.dtype


def room_on(device: torch.device) -> int:
    """Bytes that are free."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return free_memory()


def load_model(folder: ModelFolder, options: Options, device: torch.device) -> Any:
    """The model, on its device, ready to generate.

    Raises:
        SluiceError: INVALID_ARGUMENT when the library does not know it, FAILED_PRECONDITION when memory is short.
    """
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    needed = folder.weight_bytes * DTYPE_BYTES[dtype_of(folder, options)] // DTYPE_BYTES[folder.dtype]
    if needed > room_on(device):
        raise _too_big(needed, room_on(device))
    transformers.logging.disable_progress_bar()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.WARNING)
    with _explained(folder):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder.path,
            dtype=getattr(torch, dtype_of(folder, options)),
            attn_implementation="paged|eager" if options.attention == "eager" else options.attention,
            trust_remote_code=options.trust_remote_code,
            local_files_only=True,
        ).to(device)
    model.eval()
    model.requires_grad_(False)
    return model


@contextlib.contextmanager
def _explained(folder: ModelFolder) -> Iterator[None]:
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise _too_big(folder.weight_bytes, 0) from error
    except Exception as error:  # the library raises many unrelated types
        log.debug("the model cannot be loaded", exc_info=True)
        raise invalid(
            f"transformers {VERSION} cannot load the model at {folder.path}: {_sentence(error)}.", param="model"
        ) from error


def _too_big(needed: int, free: int) -> SluiceError:
    return SluiceError(
        ErrorKind.FAILED_PRECONDITION,
        f"Not enough memory: the weights take {needed // MIB} MiB and {free // MIB} are free.",
        code="not_enough_memory",
    )


def _sentence(error: Exception) -> str:
    """The first sentence of what the library says."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].split(". ")[0].rstrip(".:")[:300]

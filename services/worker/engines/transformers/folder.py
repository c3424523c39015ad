"""Reads a model folder's configuration, without importing torch."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.base.errors import ErrorKind, SluiceError, invalid
from services.common.packages import model_files as models

log = logging.getLogger(__name__)

DEFAULT_CONTEXT_LENGTH = 4096
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
VISION_MODELS = frozenset({"llava", "qwen2_vl"})
"""Values of model_type whose images are supported."""
_POOLINGS = {"pooling_mode_lasttoken": "last", "pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A folder with config.json and weights.

    Attributes:
        config: The text model's configuration from config.json.
        dtype: Data type of the weights from config.json; float32 by default.
        pooling: Pooling of embeddings; empty if the folder defines none.
        takes_images: Whether the model has a vision part that is supported.
        normalise: Whether embeddings are normalised to length one.
        generation: Contents of generation_config.json.
    """

    path: Path
    config: Mapping[str, Any]
    dtype: str
    eos_token_ids: tuple[int, ...]
    context_length: int
    vocab_size: int
    pooling: str
    normalise: bool
    takes_images: bool
    generation: Mapping[str, Any]

    @property
    def weight_bytes(self) -> int:
        """Size of the weights on disk."""
        files = list(self.path.glob("*.safetensors")) or list(self.path.glob("*.bin"))
        return sum(file.stat().st_size for file in files)


def read_folder(source: str) -> ModelFolder:
    """Reads the folder of a model's source; downloads a hub id, so call it off the event loop.

    Raises:
        SluiceError: NOT_FOUND when the model does not exist, INVALID_ARGUMENT when its files are not usable.
    """
    path = _locate(source)
    config = models.read_json(path, "config.json")
    if not config:
        raise invalid(
            f"{path} has no config.json; the transformers engine needs a model folder with config.json and weights.",
            param="model",
        )
    text = {**config, **(config.get("text_config") or {})}
    for name in ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size"):
        if not isinstance(text.get(name), int):
            raise invalid(
                f"config.json in {path} has no {name}; use the folder of a causal language model.", param="model"
            )
    if not any(path.glob("*.safetensors")) and not any(path.glob("*.bin")):
        raise invalid(f"{path} contains no weights; use a folder with *.safetensors files.", param="model")
    generation = models.read_json(path, "generation_config.json")
    pooling, normalise = _pooling(path)
    dtype = text.get("dtype") or text.get("torch_dtype") or "float32"
    return ModelFolder(
        path=path,
        config=text,
        dtype=dtype if dtype in DTYPE_BYTES else "float32",
        eos_token_ids=_eos_ids(path, generation, text),
        context_length=int(text.get("max_position_embeddings") or DEFAULT_CONTEXT_LENGTH),
        vocab_size=int(text["vocab_size"]),
        pooling=pooling,
        normalise=normalise,
        takes_images=config.get("model_type") in VISION_MODELS and isinstance(config.get("vision_config"), dict),
        generation=generation,
    )


def _locate(source: str) -> Path:
    if source.startswith(models.BUNDLED):
        raise invalid(
            f"{source} is a tokenizer without weights; the transformers engine requires a model.", param="model"
        )
    path = Path(source).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.exists() or source.startswith((".", "/", "~")):
        raise SluiceError(ErrorKind.NOT_FOUND, f"Model folder {source} does not exist; check --model.", param="model")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(source, ignore_patterns=["*.bin", "*.gguf", "*.onnx", "original/*"]))
    except Exception as error:  # the hub's client raises many unrelated types
        raise SluiceError(
            ErrorKind.NOT_FOUND,
            f"Model {source} is not a folder and cannot be downloaded from the hub ({type(error).__name__}).",
            param="model",
        ) from error


def _eos_ids(path: Path, generation: Mapping[str, Any], text: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the declared end-of-sequence ids; those outside the vocabulary have no logits and are ignored."""
    declared = _ids(generation.get("eos_token_id")) or _ids(text.get("eos_token_id"))
    known = tuple(token_id for token_id in declared if token_id < text["vocab_size"])
    if len(known) < len(declared):
        log.warning(
            "the model's files list end-of-sequence ids outside its vocabulary, which are ignored",
            extra={"folder": str(path), "ids": sorted({*declared} - {*known}), "vocabulary": text["vocab_size"]},
        )
    return known


def _ids(declared: Any) -> tuple[int, ...]:
    ids = declared if isinstance(declared, list) else [declared]
    return tuple(token_id for token_id in ids if isinstance(token_id, int) and token_id >= 0)


def _pooling(path: Path) -> tuple[str, bool]:
    """Returns the pooling and whether to normalise, from the module folders that sentence-transformers writes."""
    for folder in sorted(path.glob("*_Pooling")):
        declared = models.read_json(folder, "config.json")
        for name, pooling in _POOLINGS.items():
            if declared.get(name):
                return pooling, any(path.glob("*_Normalize"))
        raise invalid(f"{folder.name}/config.json uses an unsupported pooling; use last, mean or cls.", param="model")
    return "", True

"""What a model's folder says before anything is loaded; needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common import models
from services.common.errors import ErrorKind, SluiceError, invalid

DEFAULT_CONTEXT_LENGTH = 4096
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_POOLINGS = {"pooling_mode_lasttoken": "last", "pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A folder with config.json and weights.

    Attributes:
        config: the text model's part of config.json.
        dtype: of the weights, as config.json says; float32 when it does not.
        pooling: how hidden states become an embedding; empty when the folder does not say.
        normalise: whether embeddings get length one.
        generation: generation_config.json.
    """

    path: Path
    config: Mapping[str, Any]
    dtype: str
    eos_token_ids: tuple[int, ...]
    context_length: int
    vocab_size: int
    pooling: str
    normalise: bool
    generation: Mapping[str, Any]

    @property
    def weight_bytes(self) -> int:
        """Size of the weights on disk."""
        files = list(self.path.glob("*.safetensors")) or list(self.path.glob("*.bin"))
        return sum(file.stat().st_size for file in files)


def read_folder(source: str) -> ModelFolder:
    """Reads the folder behind a model's source; a hub id is downloaded, so call it off the event loop.

    Raises:
        SluiceError: NOT_FOUND or INVALID_ARGUMENT with one sentence.
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
                f"config.json in {path} does not say {name}; this is no causal language model.", param="model"
            )
    if not any(path.glob("*.safetensors")) and not any(path.glob("*.bin")):
        raise invalid(f"{path} holds no weights (*.safetensors).", param="model")
    generation = models.read_json(path, "generation_config.json")
    pooling, normalise = _pooling(path)
    dtype = text.get("dtype") or text.get("torch_dtype") or "float32"
    return ModelFolder(
        path=path,
        config=text,
        dtype=dtype if dtype in DTYPE_BYTES else "float32",
        eos_token_ids=_ids(generation.get("eos_token_id")) or _ids(text.get("eos_token_id")),
        context_length=int(text.get("max_position_embeddings") or DEFAULT_CONTEXT_LENGTH),
        vocab_size=int(text["vocab_size"]),
        pooling=pooling,
        normalise=normalise,
        generation=generation,
    )


def _locate(source: str) -> Path:
    if source.startswith(models.BUNDLED):
        raise invalid(f"{source} is a tokenizer without weights; the transformers engine needs a model.", param="model")
    path = Path(source).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.exists() or source.startswith((".", "/", "~")):
        raise SluiceError(ErrorKind.NOT_FOUND, f"Model folder {source} does not exist.", param="model")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(source, ignore_patterns=["*.bin", "*.gguf", "*.onnx", "original/*"]))
    except Exception as error:  # the hub's client raises many unrelated types
        raise SluiceError(
            ErrorKind.NOT_FOUND,
            f"Model {source} is neither a folder nor available from the hub ({type(error).__name__}).",
            param="model",
        ) from error


def _ids(declared: Any) -> tuple[int, ...]:
    ids = declared if isinstance(declared, list) else [declared]
    return tuple(one for one in ids if isinstance(one, int) and one >= 0)


def _pooling(path: Path) -> tuple[str, bool]:
    """As sentence-transformers writes it: modules.json beside one folder per step."""
    for folder in sorted(path.glob("*_Pooling")):
        declared = models.read_json(folder, "config.json")
        for name, pooling in _POOLINGS.items():
            if declared.get(name):
                return pooling, any(path.glob("*_Normalize"))
        raise invalid(f"The pooling that {folder.name}/config.json asks for is not supported.", param="model")
    return "", True

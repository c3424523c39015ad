"""Prepares a model folder for an engine: files under the names it expects, and a minimal model configuration."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from services.common.packages.model_files import detect_processor, file_name, read_json, tokenizer_files

_FAMILIES = {"hf": ("LlamaForCausalLM", "llama"), "mistral": ("MistralForCausalLM", "mistral")}
_SMALLEST_MODEL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 32_000,
    "max_position_embeddings": 1 << 20,
}


def engine_folder(path: Path) -> Path:
    """Returns `path` if it is a model folder; otherwise a temporary folder with links to its files.

    Engines do not load a tokenizer without a model. Without one, the configuration describes a small model; it does not
    affect the ids.
    """
    if path.is_dir() and read_json(path, "config.json").get("architectures"):
        return path
    folder = Path(tempfile.mkdtemp(prefix="sluice-engine-"))
    for file in tokenizer_files(path):
        if file.name != "config.json":
            link = folder / _expected_name(path, file)
            link.parent.mkdir(exist_ok=True)
            link.symlink_to(file)
    existing = read_json(path, "config.json") if path.is_dir() else {}
    retained = {key: value for key, value in existing.items() if key not in ("model_type", "architectures")}
    architecture, model_type = _FAMILIES[detect_processor(path)]
    config = {"architectures": [architecture], "model_type": model_type, **_SMALLEST_MODEL, **retained}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    return folder


def _expected_name(path: Path, file: Path) -> str:
    """Returns the name an engine expects; a single file may have any name, such as those of mistral-common."""
    if path.is_dir() or detect_processor(path) == "hf":
        return file_name(path, file)
    if file.suffix == ".json":
        return "tekken.json"
    return f"tokenizer.model{file.suffix}" if file.suffix != ".model" else "tokenizer.model"


def is_mistral(folder: Path) -> bool:
    """Whether mistral-common reads this tokenizer."""
    return detect_processor(folder) == "mistral"

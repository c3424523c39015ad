"""Tiny model folders for tests: what `sluice tiny-model` makes, its embedding variant and LoRA adapters.

``python -m tests.support.data.tiny_models OUT`` writes folders that engines can serve: OUT/model generates,
OUT/embedder is the same model with the files that say how its hidden states become an embedding, OUT/adapter and
OUT/adapter-2 are LoRA adapters.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy

from sluice.cli import tiny_weights
from sluice.cli.tiny_model import (
    CHATML,
    CONTEXT_LENGTH,
    CORPUS,
    END_OF_TEXT,
    SPECIAL_TOKENS,
    TURN_END,
    TURN_START,
    VOCAB_SIZE,
    build_servable_model,
    build_tiny_model,
)
from sluice.cli.tiny_weights import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LAYERS, Tensors

__all__ = [
    "CHATML",
    "CONTEXT_LENGTH",
    "CORPUS",
    "END_OF_TEXT",
    "SPECIAL_TOKENS",
    "TURN_END",
    "TURN_START",
    "VOCAB_SIZE",
    "ServableFolders",
    "build_servable",
    "build_servable_model",
    "build_tiny_model",
]

ADAPTER_RANK, ADAPTER_ALPHA = 8, 16


class ServableFolders(NamedTuple):
    """Folders an engine can serve."""

    model: Path
    embedder: Path
    adapter: Path
    second_adapter: Path


def build_servable(folder: Path) -> ServableFolders:
    """Writes a model with random weights, its embedding variant and two LoRA adapters, once a folder.

    The model is a two-layer Qwen3 in float32 (hidden size 64, 4 heads of 32, 2 KV heads) over the tokenizer of
    `build_tiny_model`. The embedding is the last position's hidden state, normalised.
    """
    made = ServableFolders(*(folder / name for name in ("model", "embedder", "adapter", "adapter-2")))
    done = folder / ".done"
    if not done.exists():
        build_servable_model(made.model)
        build_servable_model(made.embedder)
        _add_pooling(made.embedder)
        for seed, adapter in enumerate((made.adapter, made.second_adapter)):
            adapter.mkdir(parents=True, exist_ok=True)
            _write(adapter / "adapter_config.json", adapter_settings(str(made.model)))
            tiny_weights.write_safetensors(adapter / "adapter_model.safetensors", adapter_weights(seed + 1))
        done.touch()
    return made


def adapter_settings(base: str) -> dict[str, object]:
    """What adapter_config.json says, in PEFT's form."""
    return {
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_alpha": ADAPTER_ALPHA,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": ADAPTER_RANK,
        "target_modules": ["q_proj", "v_proj"],
        "task_type": "CAUSAL_LM",
    }


def adapter_weights(seed: int) -> Tensors:
    """A LoRA adapter strong enough to change what the model says."""
    random = numpy.random.default_rng(seed)
    tensors: Tensors = {}
    for layer in range(LAYERS):
        for name, rows in (("q_proj", HEADS * HEAD_DIM), ("v_proj", KV_HEADS * HEAD_DIM)):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            down = random.standard_normal((ADAPTER_RANK, HIDDEN)) * 0.2
            up = random.standard_normal((rows, ADAPTER_RANK)) * 0.2
            tensors[f"{prefix}.lora_A.weight"] = down.astype(numpy.float32)
            tensors[f"{prefix}.lora_B.weight"] = up.astype(numpy.float32)
    return tensors


def _add_pooling(folder: Path) -> None:
    parts = (
        ("", "sentence_transformers.models.Transformer"),
        ("1_Pooling", "sentence_transformers.models.Pooling"),
        ("2_Normalize", "sentence_transformers.models.Normalize"),
    )
    modules = [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (path, kind) in enumerate(parts)]
    (folder / "modules.json").write_text(json.dumps(modules, indent=2), "utf-8")
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "2_Normalize").mkdir(exist_ok=True)
    pooling = {
        "word_embedding_dimension": tiny_weights.HIDDEN,
        "pooling_mode_cls_token": False,
        "pooling_mode_mean_tokens": False,
        "pooling_mode_max_tokens": False,
        "pooling_mode_lasttoken": True,
        "include_prompt": True,
    }
    _write(folder / "1_Pooling" / "config.json", pooling)


def _write(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2), "utf-8")


if __name__ == "__main__":
    print(*build_servable(Path(sys.argv[1])), sep="\n")

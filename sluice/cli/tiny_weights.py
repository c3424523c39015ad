"""Random weights for the tiny model, written without any engine: reproducible bytes, a few hundred KiB."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy
from numpy.typing import NDArray

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 2, 64, 4, 2, 32, 128
SEED = 20_250_101

Tensors = dict[str, NDArray[numpy.float32]]


def write_safetensors(path: Path, tensors: Mapping[str, NDArray[numpy.float32]]) -> None:
    """Writes float32 tensors in the safetensors format."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, values in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(values.shape), "data_offsets": [offset, offset + values.nbytes]}
        offset += values.nbytes
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for values in tensors.values():
            file.write(values.tobytes())


def model_settings(vocab_size: int, context_length: int, eos_token_id: int) -> dict[str, object]:
    """Returns the config.json of a two-layer Qwen3."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": eos_token_id,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": INTERMEDIATE,
        "max_position_embeddings": context_length,
        "max_window_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": vocab_size,
    }


def model_weights(vocab_size: int) -> Tensors:
    """Returns weights spread so far that rounding does not change the most likely token."""
    random = numpy.random.default_rng(SEED)

    def matrix(rows: int, columns: int, scale: float) -> NDArray[numpy.float32]:
        return (random.standard_normal((rows, columns)) * scale).astype(numpy.float32)

    ones = numpy.ones(HIDDEN, numpy.float32)
    tensors: Tensors = {"model.embed_tokens.weight": matrix(vocab_size, HIDDEN, 1.0)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for name, rows, columns in (
            ("self_attn.q_proj", HEADS * HEAD_DIM, HIDDEN),
            ("self_attn.k_proj", KV_HEADS * HEAD_DIM, HIDDEN),
            ("self_attn.v_proj", KV_HEADS * HEAD_DIM, HIDDEN),
            ("self_attn.o_proj", HIDDEN, HEADS * HEAD_DIM),
            ("mlp.gate_proj", INTERMEDIATE, HIDDEN),
            ("mlp.up_proj", INTERMEDIATE, HIDDEN),
            ("mlp.down_proj", HIDDEN, INTERMEDIATE),
        ):
            tensors[f"{prefix}.{name}.weight"] = matrix(rows, columns, 1.2 / columns**0.5)
        for name in ("self_attn.q_norm", "self_attn.k_norm"):
            tensors[f"{prefix}.{name}.weight"] = numpy.ones(HEAD_DIM, numpy.float32)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{name}.weight"] = ones
    tensors["model.norm.weight"] = ones
    tensors["lm_head.weight"] = matrix(vocab_size, HIDDEN, 0.4)
    return tensors

"""Random weights of the tiny vision-language models, by the names of the published checkpoints."""

from __future__ import annotations

import math

import numpy
from numpy.typing import NDArray

from sluice.cli.tiny_weights import Tensors

LAYERS, HEADS, KV_HEADS, HEAD_DIM = 2, 4, 2, 32
HIDDEN, INTERMEDIATE = HEADS * HEAD_DIM, 256
VISION_LAYERS, VISION_HEADS, VISION_HIDDEN, VISION_INTERMEDIATE = 2, 2, 64, 128
PATCH = 14
LLAVA_IMAGE_SIDE = 4 * PATCH
LLAVA_TOKENS_PER_IMAGE = (LLAVA_IMAGE_SIDE // PATCH) ** 2
QWEN_MERGE, QWEN_FRAMES_PER_PATCH = 2, 2
QWEN_PIXELS_PER_TOKEN_SIDE = PATCH * QWEN_MERGE
QWEN_MIN_TOKENS_PER_IMAGE, QWEN_MAX_TOKENS_PER_IMAGE = 4, 64


class RandomWeights:
    """Collects named random tensors, spread so far that rounding does not change the most likely token."""

    def __init__(self, seed: int) -> None:
        self.tensors: Tensors = {}
        self._random = numpy.random.default_rng(seed)

    def random(self, name: str, *shape: int, scale: float) -> None:
        """Adds normally distributed values."""
        values: NDArray[numpy.float64] = self._random.standard_normal(shape) * scale
        self.tensors[name] = values.astype(numpy.float32)

    def linear(self, name: str, rows: int, columns: int, *, bias: bool = True) -> None:
        """Adds a projection of `columns` values to `rows` values."""
        self.random(f"{name}.weight", rows, columns, scale=1.2 / math.sqrt(columns))
        if bias:
            self.random(f"{name}.bias", rows, scale=0.1)

    def norm(self, name: str, width: int, *, bias: bool = True) -> None:
        """Adds a normalization with weights of one and biases of zero."""
        self.tensors[f"{name}.weight"] = numpy.ones(width, numpy.float32)
        if bias:
            self.tensors[f"{name}.bias"] = numpy.zeros(width, numpy.float32)


def add_language_model(weights: RandomWeights, vocab_size: int, *, prefix: str, bias: bool) -> None:
    """Adds a Llama, or with biases a Qwen2."""
    weights.random(f"{prefix}model.embed_tokens.weight", vocab_size, HIDDEN, scale=1.0)
    for index in range(LAYERS):
        layer = f"{prefix}model.layers.{index}"
        weights.linear(f"{layer}.self_attn.q_proj", HEADS * HEAD_DIM, HIDDEN, bias=bias)
        weights.linear(f"{layer}.self_attn.k_proj", KV_HEADS * HEAD_DIM, HIDDEN, bias=bias)
        weights.linear(f"{layer}.self_attn.v_proj", KV_HEADS * HEAD_DIM, HIDDEN, bias=bias)
        weights.linear(f"{layer}.self_attn.o_proj", HIDDEN, HEADS * HEAD_DIM, bias=False)
        weights.linear(f"{layer}.mlp.gate_proj", INTERMEDIATE, HIDDEN, bias=False)
        weights.linear(f"{layer}.mlp.up_proj", INTERMEDIATE, HIDDEN, bias=False)
        weights.linear(f"{layer}.mlp.down_proj", HIDDEN, INTERMEDIATE, bias=False)
        weights.norm(f"{layer}.input_layernorm", HIDDEN, bias=False)
        weights.norm(f"{layer}.post_attention_layernorm", HIDDEN, bias=False)
    weights.norm(f"{prefix}model.norm", HIDDEN, bias=False)
    weights.random(f"{prefix}lm_head.weight", vocab_size, HIDDEN, scale=0.4)


def add_clip_vision(weights: RandomWeights, prefix: str) -> None:
    """Adds a CLIP vision tower for images of LLAVA_IMAGE_SIDE."""
    weights.random(f"{prefix}.embeddings.class_embedding", VISION_HIDDEN, scale=1.0)
    weights.random(
        f"{prefix}.embeddings.patch_embedding.weight",
        *(VISION_HIDDEN, 3, PATCH, PATCH),
        scale=1.2 / math.sqrt(3 * PATCH**2),
    )
    positions = LLAVA_TOKENS_PER_IMAGE + 1
    weights.random(f"{prefix}.embeddings.position_embedding.weight", positions, VISION_HIDDEN, scale=0.3)
    # The name is spelled this way in every checkpoint.
    weights.norm(f"{prefix}.pre_layrnorm", VISION_HIDDEN)
    for index in range(VISION_LAYERS):
        layer = f"{prefix}.encoder.layers.{index}"
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            weights.linear(f"{layer}.self_attn.{name}", VISION_HIDDEN, VISION_HIDDEN)
        weights.norm(f"{layer}.layer_norm1", VISION_HIDDEN)
        weights.norm(f"{layer}.layer_norm2", VISION_HIDDEN)
        weights.linear(f"{layer}.mlp.fc1", VISION_INTERMEDIATE, VISION_HIDDEN)
        weights.linear(f"{layer}.mlp.fc2", VISION_HIDDEN, VISION_INTERMEDIATE)
    weights.norm(f"{prefix}.post_layernorm", VISION_HIDDEN)


def add_qwen_vision(weights: RandomWeights, prefix: str) -> None:
    """Adds a vision tower of Qwen2-VL and the merger behind it."""
    weights.random(
        f"{prefix}.patch_embed.proj.weight",
        *(VISION_HIDDEN, 3, QWEN_FRAMES_PER_PATCH, PATCH, PATCH),
        scale=1.2 / math.sqrt(3 * QWEN_FRAMES_PER_PATCH * PATCH**2),
    )
    for index in range(VISION_LAYERS):
        block = f"{prefix}.blocks.{index}"
        weights.norm(f"{block}.norm1", VISION_HIDDEN)
        weights.norm(f"{block}.norm2", VISION_HIDDEN)
        weights.linear(f"{block}.attn.qkv", 3 * VISION_HIDDEN, VISION_HIDDEN)
        weights.linear(f"{block}.attn.proj", VISION_HIDDEN, VISION_HIDDEN)
        weights.linear(f"{block}.mlp.fc1", VISION_INTERMEDIATE, VISION_HIDDEN)
        weights.linear(f"{block}.mlp.fc2", VISION_HIDDEN, VISION_INTERMEDIATE)
    merged = VISION_HIDDEN * QWEN_MERGE**2
    weights.norm(f"{prefix}.merger.ln_q", VISION_HIDDEN)
    weights.linear(f"{prefix}.merger.mlp.0", merged, merged)
    weights.linear(f"{prefix}.merger.mlp.2", HIDDEN, merged)

"""Tiny vision-language models for tests: folders with random weights, written without torch or transformers.

Two kinds: `build_llava` writes a LlavaForConditionalGeneration (every image is 16 tokens), `build_qwen2_vl` a
Qwen2VLForConditionalGeneration (4 to 64 tokens, by the size of the image). transformers and vLLM serve both, SGLang
the second.
``python -m tests.support.data.tiny_vlm OUT`` writes OUT/llava and OUT/qwen2-vl.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tokenizers import AddedToken, Tokenizer

from sluice.cli.tiny_model import CONTEXT_LENGTH, END_OF_TEXT, TURN_END, build_tiny_model
from sluice.cli.tiny_weights import write_safetensors
from tests.support.data.tiny_vlm_weights import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INTERMEDIATE,
    KV_HEADS,
    LAYERS,
    LLAVA_IMAGE_SIDE,
    LLAVA_TOKENS_PER_IMAGE,
    PATCH,
    QWEN_FRAMES_PER_PATCH,
    QWEN_MAX_TOKENS_PER_IMAGE,
    QWEN_MERGE,
    QWEN_MIN_TOKENS_PER_IMAGE,
    QWEN_PIXELS_PER_TOKEN_SIDE,
    VISION_HEADS,
    VISION_HIDDEN,
    VISION_INTERMEDIATE,
    VISION_LAYERS,
    RandomWeights,
    add_clip_vision,
    add_language_model,
    add_qwen_vision,
)

__all__ = [
    "LLAVA_IMAGE_TOKEN",
    "LLAVA_TOKENS_PER_IMAGE",
    "QWEN_IMAGE_TOKEN",
    "QWEN_MAX_TOKENS_PER_IMAGE",
    "QWEN_MIN_TOKENS_PER_IMAGE",
    "QWEN_PIXELS_PER_TOKEN_SIDE",
    "VisionFolders",
    "build_llava",
    "build_qwen2_vl",
    "build_vision_models",
]

SEED = 20_250_102
LLAVA_IMAGE_TOKEN = "<image>"
QWEN_VISION_START, QWEN_VISION_END, QWEN_IMAGE_TOKEN, QWEN_VIDEO_TOKEN = (
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
MROPE_SECTION = (4, 6, 6)
"""How many pairs of dimensions turn with time, height and width; the sum is half of HEAD_DIM."""
ROPE_THETA = 10_000.0
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)

TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' + (tool | tojson) }}
    {%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + ('user' if message.role == 'tool' else message.role) + '\\n' }}
    {%- if message.role == 'tool' %}
        {{- '<tool_response>\\n' }}
    {%- endif %}
    {%- if message.content is string %}
        {{- message.content }}
    {%- elif message.content %}
        {%- for part in message.content %}
            {%- if part.type == 'text' %}
                {{- part.text }}
            {%- elif part.type in ('image', 'image_url', 'input_image') %}
                {{- 'IMAGE' }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments | tojson }}
        {{- '}\\n</tool_call>' }}
    {%- endfor %}
    {%- if message.role == 'tool' %}
        {{- '\\n</tool_response>' }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


class VisionFolders(NamedTuple):
    """Folders of vision-language models that engines can serve."""

    llava: Path
    qwen2_vl: Path


def build_vision_models(folder: Path, *, seed: int = SEED) -> VisionFolders:
    """Writes both models below `folder`: llava and qwen2-vl."""
    return VisionFolders(
        build_llava(folder / "llava", seed=seed),
        build_qwen2_vl(folder / "qwen2-vl", seed=seed),
    )


def build_llava(folder: Path, *, seed: int = SEED) -> Path:
    """Writes a LLaVA-like model: a CLIP vision tower, a projector and a Llama.

    An image is resized and cropped to 56 x 56 pixels and becomes LLAVA_TOKENS_PER_IMAGE times `<image>`.

    Returns:
        `folder`, whose files are equal for equal seeds.
    """
    tokenizer = _write_tokenizer(folder, (LLAVA_IMAGE_TOKEN,), image=LLAVA_IMAGE_TOKEN, processor="LlavaProcessor")
    _write(
        folder / "config.json",
        {
            **_shared_settings(tokenizer, "LlavaForConditionalGeneration", "llava"),
            "ignore_index": -100,
            "image_seq_length": LLAVA_TOKENS_PER_IMAGE,
            "image_token_index": _id(tokenizer, LLAVA_IMAGE_TOKEN),
            "multimodal_projector_bias": True,
            "projector_hidden_act": "gelu",
            "vision_feature_layer": -2,
            "vision_feature_select_strategy": "default",
            "text_config": {
                **_text_settings(tokenizer),
                "architectures": ["LlamaForCausalLM"],
                "attention_bias": False,
                "head_dim": HEAD_DIM,
                "mlp_bias": False,
                "model_type": "llama",
                "torch_dtype": "float32",
            },
            "vision_config": {
                "hidden_act": "quick_gelu",
                "hidden_size": VISION_HIDDEN,
                "image_size": LLAVA_IMAGE_SIDE,
                "intermediate_size": VISION_INTERMEDIATE,
                "layer_norm_eps": 1e-05,
                "model_type": "clip_vision_model",
                "num_attention_heads": VISION_HEADS,
                "num_channels": 3,
                "num_hidden_layers": VISION_LAYERS,
                "patch_size": PATCH,
                "projection_dim": VISION_HIDDEN,
            },
        },
    )
    _write(
        folder / "preprocessor_config.json",
        {
            **_normalization(),
            "crop_size": {"height": LLAVA_IMAGE_SIDE, "width": LLAVA_IMAGE_SIDE},
            "do_center_crop": True,
            "image_processor_type": "CLIPImageProcessor",
            "processor_class": "LlavaProcessor",
            "size": {"shortest_edge": LLAVA_IMAGE_SIDE},
        },
    )
    _write(
        folder / "processor_config.json",
        {
            "image_token": LLAVA_IMAGE_TOKEN,
            "num_additional_image_tokens": 1,
            "patch_size": PATCH,
            "processor_class": "LlavaProcessor",
            "vision_feature_select_strategy": "default",
        },
    )
    weights = RandomWeights(seed)
    add_language_model(weights, tokenizer.get_vocab_size(), prefix="language_model.", bias=False)
    add_clip_vision(weights, "vision_tower.vision_model")
    weights.linear("multi_modal_projector.linear_1", HIDDEN, VISION_HIDDEN)
    weights.linear("multi_modal_projector.linear_2", HIDDEN, HIDDEN)
    write_safetensors(folder / "model.safetensors", weights.tensors)
    return folder


def build_qwen2_vl(folder: Path, *, seed: int = SEED) -> Path:
    """Writes a Qwen2-VL-like model: a vision tower for any size of image, and a Qwen2 with multimodal rotary positions.

    An image is resized to multiples of QWEN_PIXELS_PER_TOKEN_SIDE pixels; each square of that side becomes one
    `<|image_pad|>`, QWEN_MIN_TOKENS_PER_IMAGE to QWEN_MAX_TOKENS_PER_IMAGE of them between `<|vision_start|>` and
    `<|vision_end|>`.

    Returns:
        `folder`, whose files are equal for equal seeds.
    """
    specials = (QWEN_VISION_START, QWEN_VISION_END, QWEN_IMAGE_TOKEN, QWEN_VIDEO_TOKEN)
    image = QWEN_VISION_START + QWEN_IMAGE_TOKEN + QWEN_VISION_END
    tokenizer = _write_tokenizer(folder, specials, image=image, processor="Qwen2VLProcessor")
    _write(
        folder / "config.json",
        {
            **_shared_settings(tokenizer, "Qwen2VLForConditionalGeneration", "qwen2_vl"),
            **_text_settings(tokenizer),
            "attention_dropout": 0.0,
            "image_token_id": _id(tokenizer, QWEN_IMAGE_TOKEN),
            "max_window_layers": LAYERS,
            "rope_scaling": {"mrope_section": list(MROPE_SECTION), "type": "mrope"},
            "sliding_window": None,
            "use_sliding_window": False,
            "video_token_id": _id(tokenizer, QWEN_VIDEO_TOKEN),
            "vision_end_token_id": _id(tokenizer, QWEN_VISION_END),
            "vision_start_token_id": _id(tokenizer, QWEN_VISION_START),
            "vision_token_id": _id(tokenizer, QWEN_IMAGE_TOKEN),
            "vision_config": {
                "depth": VISION_LAYERS,
                "embed_dim": VISION_HIDDEN,
                "hidden_act": "quick_gelu",
                "hidden_size": HIDDEN,
                "in_chans": 3,
                "mlp_ratio": VISION_INTERMEDIATE // VISION_HIDDEN,
                "model_type": "qwen2_vl",
                "num_heads": VISION_HEADS,
                "patch_size": PATCH,
                "spatial_merge_size": QWEN_MERGE,
                "spatial_patch_size": PATCH,
                "temporal_patch_size": QWEN_FRAMES_PER_PATCH,
            },
        },
    )
    _write(
        folder / "preprocessor_config.json",
        {
            **_normalization(),
            "image_processor_type": "Qwen2VLImageProcessor",
            "max_pixels": QWEN_MAX_TOKENS_PER_IMAGE * QWEN_PIXELS_PER_TOKEN_SIDE**2,
            "merge_size": QWEN_MERGE,
            "min_pixels": QWEN_MIN_TOKENS_PER_IMAGE * QWEN_PIXELS_PER_TOKEN_SIDE**2,
            "patch_size": PATCH,
            "processor_class": "Qwen2VLProcessor",
            "temporal_patch_size": QWEN_FRAMES_PER_PATCH,
        },
    )
    weights = RandomWeights(seed)
    add_language_model(weights, tokenizer.get_vocab_size(), prefix="", bias=True)
    add_qwen_vision(weights, "visual")
    write_safetensors(folder / "model.safetensors", weights.tensors)
    return folder


def _write_tokenizer(folder: Path, specials: Sequence[str], *, image: str, processor: str) -> Tokenizer:
    """Writes the tiny model's tokenizer with more special tokens and a template whose images are `image`."""
    build_tiny_model(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write(
        folder / "tokenizer_config.json",
        {
            "bos_token": None,
            "chat_template": TEMPLATE.replace("IMAGE", image),
            "eos_token": TURN_END,
            "model_max_length": CONTEXT_LENGTH,
            "pad_token": END_OF_TEXT,
            "processor_class": processor,
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    )
    return tokenizer


def _shared_settings(tokenizer: Tokenizer, architecture: str, model_type: str) -> dict[str, object]:
    return {
        "architectures": [architecture],
        "eos_token_id": _id(tokenizer, TURN_END),
        "model_type": model_type,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "vocab_size": tokenizer.get_vocab_size(),
    }


def _text_settings(tokenizer: Tokenizer) -> dict[str, object]:
    return {
        "bos_token_id": None,
        "eos_token_id": _id(tokenizer, TURN_END),
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": INTERMEDIATE,
        "max_position_embeddings": CONTEXT_LENGTH,
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": KV_HEADS,
        "pad_token_id": _id(tokenizer, END_OF_TEXT),
        "rms_norm_eps": 1e-06,
        "rope_theta": ROPE_THETA,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": tokenizer.get_vocab_size(),
    }


def _normalization() -> dict[str, object]:
    return {
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": list(CLIP_MEAN),
        "image_std": list(CLIP_STD),
        "resample": 3,
        "rescale_factor": 1 / 255,
    }


def _id(tokenizer: Tokenizer, text: str) -> int:
    number = tokenizer.token_to_id(text)
    assert number is not None, f"{text} is a special token of the tokenizer"
    return number


def _write(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2), "utf-8")


if __name__ == "__main__":
    for built in build_vision_models(Path(sys.argv[1])):
        print(built)

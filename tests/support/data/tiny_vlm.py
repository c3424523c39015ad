"""Tiny vision-language models for tests: folders with random weights, written without torch or transformers.

Two kinds: `build_llava` writes a LlavaForConditionalGeneration (every image is 16 tokens), `build_qwen2_vl` a
Qwen2VLForConditionalGeneration (4 to 64 tokens, by the size of the image). transformers and vLLM serve both, SGLang
the second.
``python -m tests.support.data.tiny_vlm OUT`` writes OUT/llava and OUT/qwen2-vl.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

from sluice.cli.tiny_weights import write_safetensors
from tests.support.data.tiny_vlm_files import (
    IMAGE_TYPES,
    VIDEO_TYPES,
    constant,
    id_of,
    shared_settings,
    text_settings,
    write_json,
    write_tokenizer,
)
from tests.support.data.tiny_vlm_weights import (
    HEAD_DIM,
    HIDDEN,
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
    "QWEN_VIDEO_TOKEN",
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
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


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
    tokenizer = write_tokenizer(
        folder,
        (LLAVA_IMAGE_TOKEN,),
        media={IMAGE_TYPES: constant(LLAVA_IMAGE_TOKEN)},
        processor="LlavaProcessor",
    )
    write_json(
        folder / "config.json",
        {
            **shared_settings(tokenizer, "LlavaForConditionalGeneration", "llava"),
            "ignore_index": -100,
            "image_seq_length": LLAVA_TOKENS_PER_IMAGE,
            "image_token_index": id_of(tokenizer, LLAVA_IMAGE_TOKEN),
            "multimodal_projector_bias": True,
            "projector_hidden_act": "gelu",
            "vision_feature_layer": -2,
            "vision_feature_select_strategy": "default",
            "text_config": {
                **text_settings(tokenizer),
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
    write_json(
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
    write_json(
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
    `<|vision_end|>`. Each QWEN_FRAMES_PER_PATCH frames of a video become as many `<|video_pad|>` as an image.

    Returns:
        `folder`, whose files are equal for equal seeds.
    """
    specials = (QWEN_VISION_START, QWEN_VISION_END, QWEN_IMAGE_TOKEN, QWEN_VIDEO_TOKEN)
    image, video = (QWEN_VISION_START + token + QWEN_VISION_END for token in (QWEN_IMAGE_TOKEN, QWEN_VIDEO_TOKEN))
    tokenizer = write_tokenizer(
        folder,
        specials,
        media={IMAGE_TYPES: constant(image), VIDEO_TYPES: constant(video)},
        processor="Qwen2VLProcessor",
    )
    write_json(
        folder / "config.json",
        {
            **shared_settings(tokenizer, "Qwen2VLForConditionalGeneration", "qwen2_vl"),
            **text_settings(tokenizer),
            "attention_dropout": 0.0,
            "image_token_id": id_of(tokenizer, QWEN_IMAGE_TOKEN),
            "max_window_layers": LAYERS,
            "rope_scaling": {"mrope_section": list(MROPE_SECTION), "type": "mrope"},
            "sliding_window": None,
            "use_sliding_window": False,
            "video_token_id": id_of(tokenizer, QWEN_VIDEO_TOKEN),
            "vision_end_token_id": id_of(tokenizer, QWEN_VISION_END),
            "vision_start_token_id": id_of(tokenizer, QWEN_VISION_START),
            "vision_token_id": id_of(tokenizer, QWEN_IMAGE_TOKEN),
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
    write_json(
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


if __name__ == "__main__":
    for built in build_vision_models(Path(sys.argv[1])):
        print(built)

"""A tiny audio-language model for tests: a folder with random weights, written without torch or transformers.

``python -m tests.support.data.tiny_audio OUT`` writes OUT/qwen2-audio.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy

from sluice.cli.tiny_weights import write_safetensors
from tests.support.data.tiny_vlm_files import (
    AUDIO_TYPES,
    id_of,
    shared_settings,
    text_settings,
    write_json,
    write_tokenizer,
)
from tests.support.data.tiny_vlm_weights import HIDDEN, RandomWeights, add_language_model

SEED = 20_250_102
AUDIO_TOKEN, AUDIO_START, AUDIO_END = "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"
SAMPLE_RATE, SECONDS, SAMPLES_PER_FRAME = 16_000, 30, 160
"""Rate to which clips are resampled, where longer ones are cut, and the distance of two frames of the spectrogram."""
POSITIONS = SECONDS * SAMPLE_RATE // SAMPLES_PER_FRAME // 2
"""Positions of the encoder, each of two frames of the spectrogram; two of them become one token."""
MELS, WIDTH, INNER, HEADS, LAYERS = 16, 64, 128, 2, 2
NUMBERED = "{%- set clips.count = clips.count + 1 %}{{- 'Audio ' ~ clips.count ~ ': CLIP\\n' }}".replace(
    "CLIP", AUDIO_START + AUDIO_TOKEN + AUDIO_END
)


def build_qwen2_audio(folder: Path, *, seed: int = SEED) -> Path:
    """Writes a Qwen2-Audio-like model: a Whisper encoder, a projector and a Qwen2.

    A clip becomes one `<|AUDIO|>` for each 40 ms, up to 750; the template numbers the clips of a conversation.

    Returns:
        `folder`, whose files are equal for equal seeds.
    """
    tokenizer = write_tokenizer(
        folder,
        (AUDIO_TOKEN, AUDIO_START, AUDIO_END),
        media={AUDIO_TYPES: NUMBERED},
        processor="Qwen2AudioProcessor",
    )
    write_json(
        folder / "config.json",
        {
            **shared_settings(tokenizer, "Qwen2AudioForConditionalGeneration", "qwen2_audio"),
            "audio_token_index": id_of(tokenizer, AUDIO_TOKEN),
            "audio_config": {
                "activation_function": "gelu",
                "d_model": WIDTH,
                "encoder_attention_heads": HEADS,
                "encoder_ffn_dim": INNER,
                "encoder_layers": LAYERS,
                "max_source_positions": POSITIONS,
                "model_type": "qwen2_audio_encoder",
                "num_mel_bins": MELS,
                "scale_embedding": False,
            },
            "text_config": {
                **text_settings(tokenizer),
                "architectures": ["Qwen2ForCausalLM"],
                "model_type": "qwen2",
                "torch_dtype": "float32",
            },
        },
    )
    write_json(
        folder / "preprocessor_config.json",
        {
            "chunk_length": SECONDS,
            "feature_extractor_type": "WhisperFeatureExtractor",
            "feature_size": MELS,
            "hop_length": SAMPLES_PER_FRAME,
            "n_fft": 400,
            "padding_side": "right",
            "padding_value": 0.0,
            "processor_class": "Qwen2AudioProcessor",
            "return_attention_mask": True,
            "sampling_rate": SAMPLE_RATE,
        },
    )
    template = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))["chat_template"]
    # Without this file the processor of transformers has a template of its own, which begins with a system message.
    (folder / "chat_template.jinja").write_text(template, "utf-8")
    weights = RandomWeights(seed)
    add_language_model(weights, tokenizer.get_vocab_size(), prefix="language_model.", bias=True)
    add_audio_tower(weights, "audio_tower")
    weights.linear("multi_modal_projector.linear", HIDDEN, WIDTH)
    write_safetensors(folder / "model.safetensors", weights.tensors)
    return folder


def add_audio_tower(weights: RandomWeights, prefix: str) -> None:
    """Adds the encoder of Qwen2-Audio, which is Whisper's with a pooling at the end."""
    for name, channels in (("conv1", MELS), ("conv2", WIDTH)):
        weights.random(f"{prefix}.{name}.weight", WIDTH, channels, 3, scale=1.2 / math.sqrt(3 * channels))
        weights.tensors[f"{prefix}.{name}.bias"] = numpy.zeros(WIDTH, numpy.float32)
    weights.random(f"{prefix}.embed_positions.weight", POSITIONS, WIDTH, scale=0.3)
    for index in range(LAYERS):
        layer = f"{prefix}.layers.{index}"
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            weights.linear(f"{layer}.self_attn.{name}", WIDTH, WIDTH, bias=name != "k_proj")
        weights.norm(f"{layer}.self_attn_layer_norm", WIDTH)
        weights.linear(f"{layer}.fc1", INNER, WIDTH)
        weights.linear(f"{layer}.fc2", WIDTH, INNER)
        weights.norm(f"{layer}.final_layer_norm", WIDTH)
    weights.norm(f"{prefix}.layer_norm", WIDTH)


if __name__ == "__main__":
    print(build_qwen2_audio(Path(sys.argv[1]) / "qwen2-audio"))

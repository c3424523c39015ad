"""Files that the tiny models for images, audio and video share: tokenizer, template, settings of the language model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from sluice.cli.tiny_model import CONTEXT_LENGTH, END_OF_TEXT, TURN_END, build_tiny_model
from tests.support.data.tiny_vlm_weights import HEADS, HIDDEN, INTERMEDIATE, KV_HEADS, LAYERS

ROPE_THETA = 10_000.0
TEMPLATE = """\
{%- set clips = namespace(count=0) %}
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
            MEDIA
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
"""MEDIA stands for the statements for parts other than text."""
IMAGE_TYPES = ("image", "image_url", "input_image")
AUDIO_TYPES = ("audio", "audio_url", "input_audio")
VIDEO_TYPES = ("video", "video_url")


def constant(text: str) -> str:
    """Returns the statement of a template that writes a text."""
    return "{{- '" + text + "' }}"


def write_tokenizer(
    folder: Path, specials: Sequence[str], *, media: Mapping[tuple[str, ...], str], processor: str
) -> Tokenizer:
    """Writes the tiny model's tokenizer with more special tokens and a template.

    Args:
        media: statements of the template for the parts of some types.
    """
    branches = [f"{{%- elif part.type in {types} %}}\n{' ' * 16}{write}" for types, write in media.items()]
    build_tiny_model(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {
            "bos_token": None,
            "chat_template": TEMPLATE.replace("MEDIA", ("\n" + " " * 12).join(branches)),
            "eos_token": TURN_END,
            "model_max_length": CONTEXT_LENGTH,
            "pad_token": END_OF_TEXT,
            "processor_class": processor,
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    )
    return tokenizer


def shared_settings(tokenizer: Tokenizer, architecture: str, model_type: str) -> dict[str, object]:
    return {
        "architectures": [architecture],
        "eos_token_id": id_of(tokenizer, TURN_END),
        "model_type": model_type,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "vocab_size": tokenizer.get_vocab_size(),
    }


def text_settings(tokenizer: Tokenizer) -> dict[str, object]:
    return {
        "bos_token_id": None,
        "eos_token_id": id_of(tokenizer, TURN_END),
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": INTERMEDIATE,
        "max_position_embeddings": CONTEXT_LENGTH,
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": KV_HEADS,
        "pad_token_id": id_of(tokenizer, END_OF_TEXT),
        "rms_norm_eps": 1e-06,
        "rope_theta": ROPE_THETA,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": tokenizer.get_vocab_size(),
    }


def id_of(tokenizer: Tokenizer, text: str) -> int:
    number = tokenizer.token_to_id(text)
    assert number is not None, f"{text} is a special token of the tokenizer"
    return number


def write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2), "utf-8")

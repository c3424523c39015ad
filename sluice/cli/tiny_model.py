"""`sluice tiny-model`: creates a model folder in Hugging Face's format, without any download.

Its tokenizer is trained on a few sentences and its weights are random, so its output is meaningless. It is for testing
engines and templates, and for the examples in the documentation.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from sluice.cli import tiny_weights
from sluice.cli.errors import BadFlag

FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json", "model.safetensors")
CONTEXT_LENGTH = 4096
VOCAB_SIZE = 1024
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)

CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- '# Tools\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {%- if not loop.first %}
            {{- raise_exception('System message must be at the beginning.') }}
        {%- endif %}
        {%- continue %}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

CORPUS = (
    "The quick brown fox jumps over the lazy dog while rain falls softly on old roofs.",
    "What is the weather in Paris today? It is sunny, and the temperature is twenty degrees.",
    'A function call looks like {"name": "get_weather", "arguments": {"city": "Paris"}} in JSON.',
    "user assistant system tool think answer question model token prompt stream worker router",
    "def main() -> None:\n    for index in range(10):\n        print(index, 'hello world')\n",
    "Grüße aus München, ça va bien, привет мир, 你好世界, こんにちは, 😀🎉",
)


def build_tiny_model(folder: Path) -> Path:
    """Writes a byte-level BPE tokenizer with a ChatML template and the configuration files.

    Args:
        folder: where to write; created if missing.

    Returns:
        `folder`, with tokenizer.json, tokenizer_config.json, generation_config.json and config.json. The end-of-turn
        token and the end-of-text token both end a generation; there is no BOS. The files are equal on every run.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    end_of_text, _, turn_end = (tokenizer.token_to_id(text) for text in SPECIAL_TOKENS)
    _write(
        folder / "tokenizer_config.json",
        {
            "bos_token": None,
            "eos_token": TURN_END,
            "pad_token": END_OF_TEXT,
            "model_max_length": CONTEXT_LENGTH,
            "chat_template": CHATML,
        },
    )
    _write(folder / "generation_config.json", {"eos_token_id": [turn_end, end_of_text]})
    _write(
        folder / "config.json",
        {
            "model_type": "qwen3",
            "max_position_embeddings": CONTEXT_LENGTH,
            "vocab_size": tokenizer.get_vocab_size(),
            "eos_token_id": turn_end,
        },
    )
    return folder


def build_servable_model(folder: Path) -> Path:
    """Writes a tiny model with random weights that engines can load.

    The model is a two-layer Qwen3 in float32: hidden size 64, 4 heads of 32, 2 KV heads.

    Returns:
        `folder`, with model.safetensors beside the tokenizer's files. The files are equal on every run.
    """
    build_tiny_model(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    vocab_size, turn_end = tokenizer.get_vocab_size(), tokenizer.token_to_id(TURN_END)
    assert turn_end is not None, "TURN_END is one of the special tokens"
    settings = tiny_weights.model_settings(vocab_size, CONTEXT_LENGTH, turn_end)
    _write(folder / "config.json", settings)
    tokenizer_config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    _write(folder / "tokenizer_config.json", {**tokenizer_config, "tokenizer_class": "PreTrainedTokenizerFast"})
    tiny_weights.write_safetensors(folder / "model.safetensors", tiny_weights.model_weights(vocab_size))
    return folder


def run(folder: Path) -> str:
    """Writes the model and returns a message; raises BadFlag if the folder has other files or cannot be written."""
    try:
        if other_files := _other_files(folder):
            raise BadFlag(f"{folder} contains {other_files[0]}, which is not part of a tiny model; name another folder")
        build_servable_model(folder)
        size = sum((folder / name).stat().st_size for name in FILES)
    except OSError as error:
        raise BadFlag(f"{folder} cannot be written: {error.strerror or error}") from error
    return (
        f"{folder}: a tokenizer of {VOCAB_SIZE:,} tokens with a chat template, and random weights ({size >> 10} KiB).\n"
        f"sluice up --model {folder}"
    )


def _other_files(folder: Path) -> Sequence[str]:
    """Returns the names of files in the folder that are not part of a tiny model."""
    if not folder.is_dir():
        return []
    return sorted(path.name for path in folder.iterdir() if path.name not in FILES)


def _write(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2), "utf-8")

"""A tiny Hugging Face style model folder, made on the spot: real files, no download.

``python -m tests.support.tiny_models OUT`` writes folders that engines can serve: OUT/model generates, OUT/embedder is
the same model with the files that say how its hidden states become an embedding, OUT/adapter and OUT/adapter-2 LoRA.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import NamedTuple

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.support import tiny_weights

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
    """Writes a byte-level BPE tokenizer with a ChatML template and the configuration files beside it.

    Args:
        folder: where to write; made when missing.

    Returns:
        `folder`, with tokenizer.json, tokenizer_config.json, generation_config.json and config.json. The end-of-turn
        token and the end-of-text token both end a generation; there is no BOS. Equal on every run.
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
        _build_model(made.model)
        _build_model(made.embedder)
        _add_pooling(made.embedder)
        for seed, adapter in enumerate((made.adapter, made.second_adapter)):
            adapter.mkdir(parents=True, exist_ok=True)
            _write(adapter / "adapter_config.json", tiny_weights.adapter_settings(str(made.model)))
            tiny_weights.write_safetensors(
                adapter / "adapter_model.safetensors", tiny_weights.adapter_weights(seed + 1)
            )
        done.touch()
    return made


def _build_model(folder: Path) -> None:
    build_tiny_model(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    vocab_size = tokenizer.get_vocab_size()
    settings = tiny_weights.model_settings(vocab_size, CONTEXT_LENGTH, tokenizer.token_to_id(TURN_END))
    _write(folder / "config.json", settings)
    tokenizer_config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    _write(folder / "tokenizer_config.json", {**tokenizer_config, "tokenizer_class": "PreTrainedTokenizerFast"})
    tiny_weights.write_safetensors(folder / "model.safetensors", tiny_weights.model_weights(vocab_size))


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


def _write(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2), "utf-8")


if __name__ == "__main__":
    print(*build_servable(Path(sys.argv[1])), sep="\n")

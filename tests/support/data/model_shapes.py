"""Tiny models in the shape of published families: their chat template, special tokens, parsers and way of writing.

The templates are the publishers' own and are no part of this repository: SLUICE_CHAT_TEMPLATES names a folder of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.support.data.call_formats import FORMATS
from tests.support.repository import ROOT

VOCABULARY = 8_192
CONTEXT_LENGTH = 262_144
THOUGHT = "The task is clear."


@dataclass(frozen=True)
class Shape:
    """How the models of a family read and write.

    Attributes:
        template: file with the chat template; empty for the default model.
        calls: how it writes calls, in `FORMATS`.
        thinks: what it writes before an answer or a call, after the template's generation prompt.
        answers: what it writes before the text of an answer.
        ends: tokens that end a generation, the usual one first.
        special: its other special tokens.
        added: tokens of its vocabulary that are plain text to the tokenizer.
        numbers_calls: the number of a call in the conversation is part of the call.
    """

    name: str
    template: str = ""
    calls: str = "mistral, tokenizer 11"
    thinks: str = ""
    answers: str = ""
    ends: tuple[str, ...] = ()
    special: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    numbers_calls: bool = False

    def call(self, number: int, tool: str, arguments: dict[str, Any]) -> str:
        """The conversation's call of this number as the model generates it, after a thought if it thinks."""
        written = FORMATS[self.calls].render([(tool, arguments)])
        if self.numbers_calls:
            written = written.replace(":0<", f":{number}<", 1)
        return self.thinks + written

    def answer(self, text: str) -> str:
        """An answer as the model generates it."""
        return self.thinks + self.answers + text


DEFAULT = Shape("tekken")
SHAPES = (
    Shape(
        "qwen",
        "Qwen3.5-4B.jinja",
        "qwen3_coder",
        f"{THOUGHT}\n</think>\n\n",
        ends=("<|im_end|>", "<|endoftext|>"),
        special=("<|im_start|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
        added=("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    ),
    Shape(
        "glm",
        "GLM-5.2.jinja",
        "glm45",
        f"{THOUGHT}</think>",
        ends=("<|endoftext|>", "<|user|>", "<|observation|>"),
        special=("[gMASK]", "<sop>", "<|system|>", "<|assistant|>"),
        added=(
            *("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
            *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        ),
    ),
    Shape(
        "gpt-oss",
        "openai-gpt-oss-120b.jinja",
        "harmony",
        f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant",
        "<|channel|>final<|message|>",
        ends=("<|return|>", "<|call|>"),
        special=("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>"),
    ),
    Shape(
        "kimi",
        "moonshotai-Kimi-K2.jinja",
        "kimi_k2",
        ends=("<|im_end|>", "[EOS]"),
        special=("[BOS]", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>"),
        added=(
            *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
            *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        ),
        numbers_calls=True,
    ),
    Shape(
        "gemma",
        "google-gemma-4-31B-it.jinja",
        "gemma4",
        f"<|channel>thought\n{THOUGHT}\n<channel|>",
        ends=("<turn|>", "<eos>", "<|tool_response>"),
        special=(
            *("<bos>", "<|turn>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", "<tool_response|>"),
            *("<|channel>", "<channel|>", "<|think|>", '<|"|>'),
        ),
    ),
)


def build_shape(shape: Shape, templates: Path, folder: Path) -> Path:
    """Writes a model's folder with the shape's template and tokens over a byte-level tokenizer of English and code.

    Raises:
        FileNotFoundError: the template is not in the folder `templates`.
    """
    folder.mkdir(parents=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(_english_and_code(), trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in shape.added])
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in (*shape.ends, *shape.special)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_bytes((templates / shape.template).read_bytes())
    ends = list(map(tokenizer.token_to_id, shape.ends))
    bos = next((text for text in shape.special if text in ("<bos>", "[BOS]")), None)
    written: dict[str, dict[str, Any]] = {
        "tokenizer_config.json": {"eos_token": shape.ends[0], "bos_token": bos},
        "generation_config.json": {"eos_token_id": ends},
        "config.json": {"max_position_embeddings": CONTEXT_LENGTH, "vocab_size": tokenizer.get_vocab_size()},
    }
    for name, content in written.items():
        (folder / name).write_text(json.dumps(content))
    return folder


def _english_and_code() -> Iterator[str]:
    for pattern in ("docs/*.md", "sluice/*.py", "examples/**/*.py"):
        for file in sorted(ROOT.glob(pattern)):
            yield file.read_text("utf-8")

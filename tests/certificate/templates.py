"""Models whose chat templates are compared: a folder each, with the same tokenizer of bytes and markers."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from services.common.packages.model_files import resolve
from tests.support.data.marked_vocabulary import build_marked_model
from tests.support.data.tiny_models import CHATML
from tests.support.data.tokenizer_families import INST, LLAMA
from tests.support.oracles.parsing import MARKUP, RECORDED

OWN: Mapping[str, str] = {"own-chatml": CHATML, "own-llama": LLAMA, "own-inst": INST}
"""Templates of this repository."""
MISTRAL = {
    "mistral-v3": "mistral-common:mistral_instruct_tokenizer_240323.model.v3",
    "mistral-v7": "mistral-common:mistral_instruct_tokenizer_241114.model.v7",
}
"""Tokenizers of mistral-common, which write prompts without a template."""
READ_MISTRAL = frozenset(("vllm", "plain"))
"""Sides that read their files."""
BOS, EOS = "<bos>", "<eos>"
_SPECIAL = re.compile(r"<\|[^\s<>'\"{}]{1,40}>|\[/?[A-Z_]{3,30}\]|<[^\s<>'\"{}]{1,40}\|>")
_PLAIN = re.compile(r"<[/｜]?[a-z][^\s<>'\"{}=|]{3,40}>|<｜[^\s<>'\"{}=|]{1,40}｜>")
"""Markers that are tokens, but not special ones: `<think>`, `<tool_call>`."""
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1 << 20,
}


def texts_of(folder: Path | None) -> dict[str, str]:
    """Templates by name: those of this repository, and the files of a folder."""
    files = sorted(folder.glob("*.jinja")) if folder is not None else []
    return {**OWN, **{file.stem: file.read_text("utf-8") for file in files}}


def mistral() -> dict[str, Path]:
    """The files of mistral-common's tokenizers."""
    return {name: resolve(source) for name, source in MISTRAL.items()}


def build(folder: Path, templates: Mapping[str, str]) -> dict[str, Path]:
    """Writes a model folder for each template; their tokenizers are equal."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = [
        *templates.values(),
        *(text for known in (MARKUP, RECORDED) for pieces in known.values() for text in pieces),
    ]
    special = {marker for text in texts for marker in _SPECIAL.findall(text)} - {EOS}
    plain = {marker for text in texts for marker in _PLAIN.findall(text)} - special
    build_marked_model(folder, [BOS, *sorted(special)])
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(marker, special=False, normalized=False) for marker in sorted(plain)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    size = tokenizer.get_vocab_size()
    made = {}
    for name, text in templates.items():
        made[name] = folder / name
        made[name].mkdir(exist_ok=True)
        shutil.copy(folder / "tokenizer.json", made[name])
        settings = {**config, "bos_token": BOS, "eos_token": EOS, "chat_template": text}
        (made[name] / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
        (made[name] / "config.json").write_text(json.dumps({**_CONFIG, "vocab_size": size}), "utf-8")
    return made

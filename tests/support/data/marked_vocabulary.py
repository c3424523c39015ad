"""A model's folder whose tokenizer has the markers of every parser as tokens of their own."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

_MARKER = re.compile(r"""["'](</?[^\s<>"']{1,40}>|\[/?[A-Z_]{3,30}\]|<[|｜][^\s<>"']{1,40}[|｜]>)""")


RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor_pattern": r"<\|start\|>assistant",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>", "content": "text"},
        "content": {"open": "<answer>", "close": "</answer>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"<tool_call>(?P<name>[^\s<]+)\n",
            "close": "</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<arg_key>(?P<key>[^<]+)</arg_key><arg_value>(?P<value>.*?)</arg_value>"},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
    },
}
"""How a model says of itself that it writes calls and thoughts; some parsers read nothing else."""


def markers_in(folders: Iterable[Path]) -> list[str]:
    """What looks like a marker in the string constants of Python files."""
    found = set()
    for folder in folders:
        for file in sorted(folder.rglob("*.py")):
            found.update(_MARKER.findall(file.read_text("utf-8", errors="replace")))
    return sorted(found)


def build_marked_model(folder: Path, markers: Iterable[str]) -> Path:
    """Writes a byte-level tokenizer: 256 bytes, a few words, and every marker as a special token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {char: place for place, char in enumerate(alphabet)}
    for piece in ("Ġ</", "</", "think"):  # tokens that a parser asks for by name
        ids[piece] = len(ids)
    tokenizer = Tokenizer(models.BPE(ids, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<eos>", *[marker for marker in markers if marker != "<eos>"]]
    tokenizer.add_special_tokens([AddedToken(marker, special=True, normalized=False) for marker in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<eos>",
        "response_template": RESPONSE_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    return folder

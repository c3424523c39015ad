"""A Hugging Face style model folder with a real vocabulary of 131,072 tokens: Tekken's, written as a tokenizer.json."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

from mistral_common.tokens.tokenizers.tekken import Tekkenizer
from tokenizers import pre_tokenizers

from services.common.packages.model_files import DEFAULT_SOURCE, resolve
from tests.support.data.tiny_models import CHATML, SPECIAL_TOKENS

CONTEXT_LENGTH = 131_072


def build_big_model(folder: Path) -> Path:
    """Writes tokenizer.json and the files beside it; text gets the ids that Tekken gives it.

    Returns:
        `folder`. Chats take the ChatML template, whose tokens stand for three of Tekken's unused control tokens.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tekken = Tekkenizer.from_file(resolve(DEFAULT_SOURCE))
    spelled = _speller()
    ranks = tekken._model._mergeable_ranks
    specials = [tekken.id_to_piece(token) for token in range(tekken.num_special_tokens)]
    specials[20 : 20 + len(SPECIAL_TOKENS)] = SPECIAL_TOKENS
    vocabulary = {text: token for token, text in enumerate(specials)}
    vocabulary |= {spelled(token): rank + len(specials) for token, rank in ranks.items()}
    merges = [
        [spelled(part) for part in _merged_from(token, rank, ranks)] for token, rank in ranks.items() if len(token) > 1
    ]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    split = {"type": "Split", "pattern": {"Regex": tekken._model._pat_str}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    content: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": token, "content": text, **flags} for token, text in enumerate(specials)],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": merges, "ignore_merges": True, "unk_token": None},
    }
    (folder / "tokenizer.json").write_text(json.dumps(content, ensure_ascii=False), "utf-8")
    config = {"eos_token": SPECIAL_TOKENS[2], "chat_template": CHATML, "model_max_length": CONTEXT_LENGTH}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    return folder


def _speller() -> Any:
    """Bytes to the letters that stand for them in byte-level vocabularies."""
    letters = {}
    spare = iter(range(256, 512))
    shown = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    for byte in range(256):
        letters[byte] = chr(byte if byte in shown else next(spare))
    assert set(letters.values()) == set(pre_tokenizers.ByteLevel.alphabet())
    return lambda token: "".join(letters[byte] for byte in token)


def _merged_from(token: bytes, rank: int, ranks: dict[bytes, int]) -> list[bytes]:
    """The two parts that byte pair encoding puts together to this token."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        pairs = [ranks.get(left + right, rank) for left, right in pairwise(parts)]
        best = min(range(len(pairs)), key=pairs.__getitem__)
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    return parts

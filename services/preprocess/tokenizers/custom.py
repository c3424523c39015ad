"""Loads the classes of operators that implement a tokenizer."""

from __future__ import annotations

import importlib
import inspect
import types
from pathlib import Path
from typing import Any

from services.common.base.errors import ErrorKind, SluiceError
from services.common.packages.model_files import fingerprint, read_json
from services.preprocess.contract.generation_defaults import eos_ids, generation_defaults
from services.preprocess.contract.tokenizer import HINTS, TokenizerFacts, TokenizerProtocol

UNKNOWN_VOCABULARY = 1 << 31
"""Size of a vocabulary that neither the class nor the model's files give: every id may be one."""

METHODS = ("tokenize", "decode")


def load_custom(name: str, model: str, path: Path) -> TokenizerProtocol:
    """Returns an instance of `package.module:Class`, called with the path of the model's files.

    A class that has the methods without being derived from TokenizerProtocol receives the defaults of the others.

    Raises:
        SluiceError: FAILED_PRECONDITION; the class lacks one of the two methods, or is none.
    """
    module, _, class_name = name.partition(":")
    given: Any = getattr(importlib.import_module(module), class_name)
    if not isinstance(given, type):
        raise _unusable(name, "is not a class")
    lacking = [method for method in METHODS if not _implements(given, method)]
    if lacking:
        raise _unusable(name, f"lacks the method {' and '.join(lacking)}")
    if waiting := [method for method in METHODS if inspect.iscoroutinefunction(getattr(given, method))]:
        raise _unusable(name, f"has an async {waiting[0]}, which must be a plain method")
    derived = given
    if not issubclass(given, TokenizerProtocol):
        derived = types.new_class(given.__name__, (given, TokenizerProtocol))
    tokenizer: TokenizerProtocol = derived(path)
    tokenizer.model = model
    if getattr(tokenizer, "facts", None) is None:
        tokenizer.facts = facts_of(name, path)
    return tokenizer


def facts_of(processor: str, path: Path) -> TokenizerFacts:
    """Returns the facts in a model's files, for a class that states none."""
    config, generation = read_json(path, "config.json"), read_json(path, "generation_config.json")
    size, length = config.get("vocab_size"), config.get("max_position_embeddings")
    return TokenizerFacts(
        processor=processor,
        fingerprint=fingerprint(path),
        vocab_size=size if isinstance(size, int) and size > 0 else UNKNOWN_VOCABULARY,
        eos_ids=eos_ids(generation.get("eos_token_id", config.get("eos_token_id"))),
        context_length=length if isinstance(length, int) and length > 0 else 0,
        has_chat_template=True,
        defaults=generation_defaults(generation),
        without_effect=HINTS,
    )


def _implements(given: type, method: str) -> bool:
    implementation = getattr(given, method, None)
    return callable(implementation) and not getattr(implementation, "__isabstractmethod__", False)


def _unusable(name: str, why: str) -> SluiceError:
    return SluiceError(
        ErrorKind.FAILED_PRECONDITION,
        f"The tokenizer {name} {why}; implement tokenize(messages, model, tools) and decode(token_ids, "
        "skip_special_tokens), as sluice.tokenizers.TokenizerProtocol describes.",
        param="model",
    )

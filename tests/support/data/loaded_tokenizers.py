"""Loaded tokenizers that tests share, because loading one costs more than most tests."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

from services.common.packages.model_files import ModelSpec
from services.preprocess.limits import Limits
from services.preprocess.tokenizers.hf import HfTokenizer
from services.preprocess.tokenizers.loading import load_tokenizer
from services.preprocess.tokenizers.mistral import MistralTokenizer
from tests.support.data.small_tekken import small_tekken
from tests.support.data.tiny_models import build_tiny_model


@cache
def limits() -> Limits:
    """Limits that are the same for all."""
    return Limits.default()


@cache
def tiny_folder() -> Path:
    """A tiny Hugging Face model's folder."""
    return build_tiny_model(Path(tempfile.mkdtemp(prefix="sluice-tiny-")))


@cache
def tiny_hf() -> HfTokenizer:
    """Its tokenizer."""
    tokenizer = load_tokenizer(ModelSpec("tiny", str(tiny_folder())), limits())
    assert isinstance(tokenizer, HfTokenizer)
    return tokenizer


@cache
def tekken() -> MistralTokenizer:
    """The bundled default model's tokenizer."""
    tokenizer = load_tokenizer(ModelSpec.parse("mistral-common:tekken_240911"), limits())
    assert isinstance(tokenizer, MistralTokenizer)
    return tokenizer


@cache
def small_tokenizer() -> MistralTokenizer:
    """The tokenizer of `small_tekken`, which the suites of end-to-end tests serve as `tekken`."""
    tokenizer = load_tokenizer(ModelSpec("tekken", str(small_tekken())), limits())
    assert isinstance(tokenizer, MistralTokenizer)
    return tokenizer

"""Encodes text with Mistral's vocabularies, without control tokens."""

from __future__ import annotations

import logging
import re
from array import array
from collections.abc import Sequence
from typing import Any

import numpy
from mistral_common.tokens.tokenizers.base import Tokenizer
from mistral_common.tokens.tokenizers.tekken import Tekkenizer

from services.common.base.packing import pack_u32, unpack_u32
from services.preprocess.contract.tokenizer import CacheStats
from services.preprocess.encoders.backend import Backend, EncoderOptions, fastest
from services.preprocess.encoders.fastokens_backend import FastokensBackend
from services.preprocess.encoders.segment_cache import SegmentCache

log = logging.getLogger(__name__)

_RISKY_CHARS = 16 << 10
# Anchored at the start of a run: matching from every character would take quadratic time.
_LONG_RUN = re.compile(rf"(?<!\s)\s{{{_RISKY_CHARS}}}")


class TiktokenBackend(Backend):
    """The library mistral-common uses for Tekken."""

    name = "tiktoken"

    def __init__(self, tekken: Tekkenizer) -> None:
        self._encoding = tekken._model
        self._offset = tekken.num_special_tokens

    def encode(self, texts: Sequence[str]) -> list[bytes]:
        """Implements `Backend.encode`; also raises ValueError for a whitespace run the library cannot split."""
        return [_shifted(array("I", self._ids(text)).tobytes(), self._offset) for text in texts]

    def _ids(self, text: str) -> list[int]:
        # On such text encode_ordinary panics, with a trace on standard error, where encode raises.
        risky = len(text) > _RISKY_CHARS and _LONG_RUN.search(text) is not None
        return self._encoding.encode(text, disallowed_special=()) if risky else self._encoding.encode_ordinary(text)


class LibraryBackend(Backend):
    """The tokenizer of mistral-common, through its own interface."""

    name = "sentencepiece"

    def __init__(self, text: Tokenizer) -> None:
        self._encode = text.encode

    def encode(self, texts: Sequence[str]) -> list[bytes]:
        return [pack_u32(self._encode(text, bos=False, eos=False)) for text in texts]


class FastTekken(Backend):
    """Tekken's vocabulary in fastokens, whose ids start at 0."""

    def __init__(self, tekken: Tekkenizer) -> None:
        inner = tekken._model
        self._inner = FastokensBackend.of_ranks(inner._mergeable_ranks, inner._pat_str)
        self._offset = tekken.num_special_tokens
        self.name = self._inner.name

    def encode(self, texts: Sequence[str]) -> list[bytes]:
        return [_shifted(packed, self._offset) for packed in self._inner.encode(texts)]


def _shifted(packed: bytes, offset: int) -> bytes:
    return (numpy.frombuffer(packed, "<u4") + numpy.uint32(offset)).tobytes()


class MistralEncoder:
    """Encodes pieces of text, each by itself.

    Mistral's conversations are pieces between control tokens that no text can produce, so caching pieces is exact.

    Args:
        text: mistral-common's text tokenizer.
        encoder_options: which optimizations to use.
    """

    def __init__(self, text: Tokenizer, encoder_options: EncoderOptions) -> None:
        backend: Backend
        if isinstance(text, Tekkenizer):
            tekken = text
            backend = TiktokenBackend(tekken)
            if encoder_options.fast_backend:
                backend = fastest(backend, lambda: FastTekken(tekken))
        else:
            backend = LibraryBackend(text)
        self.backend = backend.name
        self._bos, self._eos = text.bos_id, text.eos_id
        self._cache: SegmentCache | None = None
        if encoder_options.cache_bytes:
            backend = self._cache = SegmentCache(backend, encoder_options.cache_bytes)
        self._backend = backend

    @property
    def cache_stats(self) -> CacheStats | None:
        """Statistics of the cache; None without one."""
        return self._cache.stats if self._cache is not None else None

    def pack(self, texts: Sequence[str]) -> list[bytes]:
        """Returns packed uint32 ids of each text; raises ValueError for text that cannot be encoded."""
        return self._backend.encode(texts)

    def encode(self, s: str, bos: bool, eos: bool) -> list[int]:
        """Replaces mistral-common's method of this name, which it calls for every piece."""
        (packed,) = self._backend.encode([s])
        ids = unpack_u32(packed).tolist()
        return [*([self._bos] if bos else ()), *ids, *([self._eos] if eos else ())]

    def stand_in(self, text: Any) -> None:
        """Makes mistral-common's conversation encoding use this encoder."""
        text.encode = self.encode

"""Encodes text with a tokenizer.json, using the fastest method verified to return the same ids."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import orjson
from tokenizers import Tokenizer

from services.common.base.packing import pack_u32
from services.preprocess.contract.tokenizer import CacheStats
from services.preprocess.encoders.backend import CACHE_OFF, Backend, EncoderOptions, fastest
from services.preprocess.encoders.fastokens_backend import FastokensBackend
from services.preprocess.encoders.samples import SAMPLES
from services.preprocess.encoders.segment_cache import SegmentCache
from services.preprocess.encoders.split_points import SplitPoint, cut_before, find_cut

log = logging.getLogger(__name__)

_MAX_ADDED_SAMPLES = 64


class TokenizersBackend(Backend):
    """The reference for every tokenizer.json."""

    name = "tokenizers"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, texts: Sequence[str]) -> list[bytes]:
        # The only encoding method that releases the GIL.
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [pack_u32(encoding.ids) for encoding in encodings]


class HfEncoder:
    """Encodes complete texts.

    Args:
        file: the tokenizer.json.
        tokenizer: the same, loaded by `tokenizers`, without truncation and padding.
        probe: a rendered conversation, from which the token to split at is chosen.
        encoder_options: which optimizations to use.
    """

    def __init__(self, file: Path, tokenizer: Tokenizer, probe: str, encoder_options: EncoderOptions) -> None:
        self._tokenizer = tokenizer
        content = orjson.loads(file.read_bytes())
        added = [entry["content"] for entry in content.get("added_tokens") or []]
        backend: Backend = TokenizersBackend(tokenizer)
        if encoder_options.fast_backend:
            samples = [f"x {token}y\n{token} " for token in _spread(added, _MAX_ADDED_SAMPLES)]
            backend = fastest(backend, lambda: FastokensBackend.of_file(file), samples)
        self.backend = backend.name
        self._split_point = (
            find_cut(content, _by_frequency(added, probe))
            if encoder_options.cache_bytes
            else SplitPoint(refusal=CACHE_OFF)
        )
        self._cache: SegmentCache | None = None
        if self._split_point.token:
            backend = self._cache = SegmentCache(backend, encoder_options.cache_bytes)
        elif encoder_options.cache_bytes:
            log.info("prompt segments are not cached", extra={"reason": self._split_point.refusal})
        self._backend = backend
        self._special_ids = _find_special_ids(tokenizer)

    @property
    def cache_refusal(self) -> str:
        """Why segments are not cached; empty when they are."""
        return self._split_point.refusal

    @property
    def cache_stats(self) -> CacheStats | None:
        """Statistics of the cache; None without one."""
        return self._cache.stats if self._cache is not None else None

    def encode(self, text: str, add_special_tokens: bool) -> bytes:
        """Returns packed uint32 ids; raises ValueError or TypeError for invalid Unicode."""
        if not add_special_tokens:
            return self._plain(text)
        if self._special_ids is None:
            (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=True)
            return pack_u32(encoding.ids)
        before, after = self._special_ids
        return before + self._plain(text) + after

    def _plain(self, text: str) -> bytes:
        parts = cut_before(text, self._split_point.token) if self._split_point.token else [text]
        return b"".join(self._backend.encode(parts))


def _spread(items: Sequence[str], count: int) -> Sequence[str]:
    return items[:: max(1, len(items) // count)]


def _by_frequency(tokens: Sequence[str], probe: str) -> list[str]:
    """Returns the tokens that occur in the probe, most frequent first, then by position."""
    counts = Counter({token: probe.count(token) for token in tokens if token in probe})
    return sorted(counts, key=lambda token: (-counts[token], probe.index(token)))


def _find_special_ids(tokenizer: Tokenizer) -> tuple[bytes, bytes] | None:
    """Returns the packed ids added before and after every text by default; None when they depend on the text."""
    added = tokenizer.num_special_tokens_to_add(is_pair=False)
    samples = SAMPLES[:40]
    plain = [e.ids for e in tokenizer.encode_batch_fast(list(samples), add_special_tokens=False)]
    complete = [e.ids for e in tokenizer.encode_batch_fast(list(samples), add_special_tokens=True)]
    for size in range(added + 1):
        before, after = complete[0][:size], complete[0][size:]
        if all([*before, *ids, *after] == expected for ids, expected in zip(plain, complete, strict=True)):
            return pack_u32(before), pack_u32(after)
    return None

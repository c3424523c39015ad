"""What loaded tokenizers are and what their caches do, observed when metrics are collected."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from services.common.observability.declarations import MODEL
from services.common.observability.instruments import watch
from services.common.observability.label_bounds import Label
from services.preprocess.encoders.segment_cache import CacheStats
from services.preprocess.metrics.catalogue import METRICS
from services.preprocess.tokenizers.protocol import TokenizerFacts
from services.preprocess.tokenizers.registry import ModelRegistry

Observed = Iterator[tuple[float, Mapping[str, str]]]

INFO = METRICS.gauge(
    "tokenizer_info",
    "1 for each loaded tokenizer: what runs it, and its cache",
    MODEL,
    Label("processor", "whose code makes prompts", most=20),
    Label("backend", "what encodes", most=20),
    Label("cache", "whether ids of earlier prompts are remembered", ("on", "refused")),
    together="max",
)
CHARACTERS = METRICS.counter(
    "cache_characters",
    "prompt text that was remembered, and that was not",
    MODEL,
    Label("result", "whether", ("hit", "miss")),
)
BYTES = METRICS.gauge("cache_bytes", "memory that the ids of earlier prompts take", MODEL, unit="By")


def watch_tokenizers(registry: ModelRegistry) -> None:
    """Makes the instruments; call it after telemetry is configured."""

    def loaded() -> Iterator[tuple[str, TokenizerFacts]]:
        return ((spec.name, tokenizer.facts) for spec, tokenizer in registry if tokenizer is not None)

    def caches() -> Iterator[tuple[str, CacheStats]]:
        for spec, tokenizer in registry:
            stats = getattr(tokenizer, "cache_stats", None)  # a user's class need not know of it
            if stats is not None:
                yield spec.name, stats

    def info() -> Observed:
        for model, facts in loaded():
            labels = {"model": model, "processor": facts.processor, "backend": facts.backend}
            yield 1, {**labels, "cache": "refused" if facts.cache_refusal else "on"}

    def characters() -> Observed:
        for model, stats in caches():
            yield stats.hit, {"model": model, "result": "hit"}
            yield stats.missed, {"model": model, "result": "miss"}

    watch(INFO, info)
    watch(CHARACTERS, characters)
    watch(BYTES, lambda: ((stats.held, {"model": model}) for model, stats in caches()))

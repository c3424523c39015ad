"""What loaded tokenizers are and what their caches do, observed when metrics are collected."""

from __future__ import annotations

from collections.abc import Iterator

from opentelemetry.metrics import CallbackOptions, Observation

from services.common import telemetry
from services.preprocess.registry import ModelRegistry
from services.preprocess.segment_cache import CacheStats
from services.preprocess.tokenizer import TokenizerFacts


def watch_tokenizers(registry: ModelRegistry) -> None:
    """Makes the instruments; call it after telemetry is configured."""

    def loaded() -> Iterator[tuple[str, TokenizerFacts]]:
        return ((spec.name, tokenizer.facts) for spec, tokenizer in registry if tokenizer is not None)

    def caches() -> Iterator[tuple[str, CacheStats]]:
        for spec, tokenizer in registry:
            stats = getattr(tokenizer, "cache_stats", None)  # a user's class need not know of it
            if stats is not None:
                yield spec.name, stats

    def info(_: CallbackOptions) -> Iterator[Observation]:
        for model, facts in loaded():
            labels = {"model": model, "processor": facts.processor, "backend": facts.backend}
            yield Observation(1, {**labels, "cache": "refused" if facts.cache_refusal else "on"})

    def chars(_: CallbackOptions) -> Iterator[Observation]:
        for model, stats in caches():
            yield Observation(stats.hit, {"model": model, "result": "hit"})
            yield Observation(stats.missed, {"model": model, "result": "miss"})

    def held(_: CallbackOptions) -> Iterator[Observation]:
        for model, stats in caches():
            yield Observation(stats.held, {"model": model})

    meter = telemetry.meter("preprocess")
    meter.create_observable_gauge(
        "sluice_preprocess_tokenizer_info", [info], "1", "1 for each loaded tokenizer: what runs it, and its cache"
    )
    meter.create_observable_counter(
        "sluice_preprocess_cache_characters_total", [chars], "1", "prompt text that was remembered, and that was not"
    )
    meter.create_observable_gauge(
        "sluice_preprocess_cache_bytes", [held], "By", "memory that the ids of earlier prompts take"
    )

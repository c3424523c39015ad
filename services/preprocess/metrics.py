"""Metrics of preprocess: requests, recorded once each, and tokenizers with their caches, read on scrape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from services.common.base.errors import ErrorKind, SluiceError
from services.common.observability.declarations import ERROR_KINDS, MODEL, MetricDeclarations
from services.common.observability.instruments import Counter, Histogram, watch
from services.common.observability.label_bounds import Label
from services.preprocess.contract.tokenizer import CacheStats, TokenizerFacts
from services.preprocess.media.fetching import FETCH_FAILED, FETCH_REFUSED, FETCH_TOO_LARGE, OVERLOADED
from services.preprocess.media.loading import MediaLoader
from services.preprocess.thread_pool import ComputePool
from services.preprocess.tokenizers.registry import ModelRegistry

Observed = Iterator[tuple[float, Mapping[str, str]]]

METRICS = MetricDeclarations("preprocess")

MEDIA_CODES = (
    "invalid_media",
    "media_too_large",
    "too_many_media",
    "media_not_supported",
    FETCH_REFUSED,
    FETCH_FAILED,
)

VERB = Label("verb", "the requested operation", ("tokenize", "render", "detokenize", "list_models", "get_fingerprint"))

REQUEST_SECONDS = METRICS.histogram("request_seconds", "time from request to response", VERB)
ERRORS = METRICS.counter("errors", "requests rejected or failed", VERB, Label("kind", "kind of the error", ERROR_KINDS))
PROMPT_TOKENS = METRICS.histogram(
    "prompt_tokens",
    "tokens of a tokenized prompt",
    MODEL,
    unit="",
    buckets=(16, 64, 256, 1024, 4096, 16384, 65536, 262144),
)
POOL_JOBS = METRICS.gauge("pool_jobs", "large requests waiting or running")

WITH_MEDIA = "chats have images or other media items"
MEDIA_FETCHES = METRICS.counter(
    "media_fetches",
    "media files that were to be fetched",
    Label(
        "result",
        "fetched, or the code of the error",
        ("fetched", FETCH_REFUSED, FETCH_FAILED, FETCH_TOO_LARGE, OVERLOADED),
    ),
    when=WITH_MEDIA,
)
MEDIA_FETCHED_BYTES = METRICS.counter(
    "media_fetched_bytes", "size of the fetched media files", unit="By", when=WITH_MEDIA
)
MEDIA_CHECKS = METRICS.counter(
    "media_checks",
    "media files that were checked",
    Label("result", "whether the content was known", ("hit", "miss")),
    when=WITH_MEDIA,
)
MEDIA_CHECK_SECONDS = METRICS.counter(
    "media_check_seconds", "time of checking media files, with their waits", unit="s", when=WITH_MEDIA
)
MEDIA_REJECTED = METRICS.counter(
    "media_rejected",
    "chats rejected for a media item",
    Label("reason", "code of the error", MEDIA_CODES),
    when=WITH_MEDIA,
)
ENCODER_TOKENS = METRICS.counter(
    "encoder_tokens", "tokens that stand for media items in prompts", MODEL, when=WITH_MEDIA
)

INFO = METRICS.gauge(
    "tokenizer_info",
    "1 for each loaded tokenizer; its implementation and cache are in the labels",
    MODEL,
    Label("processor", "implementation that builds prompts", most=20),
    Label("backend", "library that encodes text", most=20),
    Label("cache", "whether ids of prompt segments are cached", ("on", "refused")),
    together="max",
)
CHARACTERS = METRICS.counter(
    "cache_characters",
    "characters of prompt text found in the cache, and not found",
    MODEL,
    Label("result", "whether the text was cached", ("hit", "miss")),
)
BYTES = METRICS.gauge("cache_bytes", "memory used by cached prompt segments", MODEL, unit="By")


class Instruments:
    """Counters and histograms of requests; create it after telemetry is configured.

    Args:
        pool: the pool whose load is exposed.
    """

    def __init__(self, pool: ComputePool) -> None:
        self._seconds = Histogram(REQUEST_SECONDS)
        self._errors = Counter(ERRORS)
        self._prompt_tokens = Histogram(PROMPT_TOKENS)
        self._media_rejected = Counter(MEDIA_REJECTED)
        self._encoder_tokens = Counter(ENCODER_TOKENS)
        watch(POOL_JOBS, lambda: [(pool.taken, {})])

    def completed(self, verb: str, seconds: float) -> None:
        """Records a request that succeeded."""
        self._seconds.record(seconds, {"verb": verb})

    def failed(self, verb: str, error: Exception) -> None:
        """Records a request that was rejected or failed."""
        kind = error.kind if isinstance(error, SluiceError) else ErrorKind.INTERNAL
        self._errors.add(1, {"verb": verb, "kind": kind.name.lower()})
        if isinstance(error, SluiceError) and error.code in MEDIA_CODES:
            self._media_rejected.add(1, {"reason": error.code})

    def prompt(self, model: str, tokens: int, encoder_tokens: int = 0) -> None:
        """Records a tokenized prompt; `model` must exist."""
        self._prompt_tokens.record(tokens, {"model": model})
        if encoder_tokens:
            self._encoder_tokens.add(encoder_tokens, {"model": model})


def watch_media(loader: MediaLoader) -> None:
    """Creates the instruments of media files; call it after telemetry is configured."""
    fetches = loader.fetcher.counts
    checks = [checker.counts for checker in (loader.checker, loader.clip_checker) if checker is not None]

    def checked() -> Observed:
        yield sum(each.known for each in checks), {"result": "hit"}
        yield sum(each.checked for each in checks), {"result": "miss"}

    watch(MEDIA_FETCHES, lambda: [(count, {"result": result}) for result, count in fetches.results.items()])
    watch(MEDIA_FETCHED_BYTES, lambda: [(fetches.bytes, {})])
    watch(MEDIA_CHECKS, checked)
    watch(MEDIA_CHECK_SECONDS, lambda: [(sum(each.seconds for each in checks), {})])


def watch_tokenizers(registry: ModelRegistry) -> None:
    """Creates the instruments; call it after telemetry is configured."""

    def loaded() -> Iterator[tuple[str, TokenizerFacts]]:
        return ((spec.name, tokenizer.facts) for spec, tokenizer in registry if tokenizer is not None)

    def caches() -> Iterator[tuple[str, CacheStats]]:
        for spec, tokenizer in registry:
            if tokenizer is not None and tokenizer.cache_stats is not None:
                yield spec.name, tokenizer.cache_stats

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

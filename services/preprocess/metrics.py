"""The metrics of preprocess: one record a request, and the state of tokenizers and their caches at each scrape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter

from services.common.errors import ErrorKind, SluiceError
from services.common.observability.declarations import ERROR_KINDS, MODEL, MetricDeclarations
from services.common.observability.instruments import Counter, Histogram, watch
from services.common.observability.label_bounds import Label
from services.preprocess.encoders.segment_cache import CacheStats
from services.preprocess.protocol import TokenizerFacts
from services.preprocess.thread_pool import ComputePool
from services.preprocess.tokenizers.registry import ModelRegistry

Observed = Iterator[tuple[float, Mapping[str, str]]]

METRICS = MetricDeclarations("preprocess")

VERB = Label("verb", "what was asked for", ("tokenize", "render", "detokenize", "list_models", "get_fingerprint"))

REQUEST_SECONDS = METRICS.histogram("request_seconds", "time from request to answer", VERB)
ERRORS = METRICS.counter("errors", "requests refused or failed", VERB, Label("kind", "of error", ERROR_KINDS))
PROMPT_TOKENS = METRICS.histogram(
    "prompt_tokens",
    "tokens of a tokenized prompt",
    MODEL,
    unit="",
    buckets=(16, 64, 256, 1024, 4096, 16384, 65536, 262144),
)
POOL_JOBS = METRICS.gauge("pool_jobs", "large requests that wait or compute")

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


class Instruments:
    """Counters and histograms; make it after telemetry is configured.

    Args:
        pool: whose load is shown.
    """

    def __init__(self, pool: ComputePool) -> None:
        self._seconds = Histogram(REQUEST_SECONDS)
        self._errors = Counter(ERRORS)
        self._prompt_tokens = Histogram(PROMPT_TOKENS)
        watch(POOL_JOBS, lambda: [(pool.taken, {})])

    @contextmanager
    def request(self, verb: str) -> Iterator[None]:
        """Measures one request."""
        started = perf_counter()
        try:
            yield
        except SluiceError as error:
            self._errors.add(1, {"verb": verb, "kind": error.kind.name.lower()})
            raise
        except Exception:
            self._errors.add(1, {"verb": verb, "kind": ErrorKind.INTERNAL.name.lower()})
            raise
        self._seconds.record(perf_counter() - started, {"verb": verb})

    def prompt(self, model: str, tokens: int) -> None:
        """One prompt was tokenized; `model` is one that exists."""
        self._prompt_tokens.record(tokens, {"model": model})


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

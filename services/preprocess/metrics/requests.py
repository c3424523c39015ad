"""What the service measures, once per request."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from services.common.errors import ErrorKind, SluiceError
from services.common.observability.declarations import ERROR_KINDS, MODEL
from services.common.observability.instruments import Counter, Histogram, watch
from services.common.observability.label_bounds import Label
from services.preprocess.metrics.catalogue import METRICS
from services.preprocess.thread_pool import ComputePool

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

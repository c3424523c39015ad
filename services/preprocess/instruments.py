"""What the service measures, once per request."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from opentelemetry.metrics import CallbackOptions, Observation

from services.common import telemetry
from services.common.errors import ErrorKind, SluiceError
from services.preprocess.pool import ComputePool

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_TOKENS = (16, 64, 256, 1024, 4096, 16384, 65536, 262144)


class Instruments:
    """Counters and histograms; make it after telemetry is configured.

    Args:
        pool: whose load is shown.
    """

    def __init__(self, pool: ComputePool) -> None:
        meter = telemetry.meter("preprocess")
        self._seconds = meter.create_histogram(
            "sluice_preprocess_request_seconds",
            "s",
            "time from request to answer, by verb",
            explicit_bucket_boundaries_advisory=_SECONDS,
        )
        self._errors = meter.create_counter(
            "sluice_preprocess_errors_total", "1", "requests refused or failed, by verb and kind"
        )
        self._prompt_tokens = meter.create_histogram(
            "sluice_preprocess_prompt_tokens",
            "1",
            "tokens of a tokenized prompt, by model",
            explicit_bucket_boundaries_advisory=_TOKENS,
        )

        def busy(_: CallbackOptions) -> Iterator[Observation]:
            yield Observation(pool.taken)

        meter.create_observable_gauge("sluice_preprocess_pool_jobs", [busy], "1", "large requests that wait or compute")

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

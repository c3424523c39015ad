"""Options of the mock engine in `--engine-args`."""

from __future__ import annotations

from dataclasses import dataclass

from services.common.base.errors import SluiceError, invalid
from services.common.types.media.spans import MediaKind
from services.worker.engines.shared.arguments import read_options

TIMINGS = ("modelled", "fixed", "table")
MAX_RANKS = 64
"""Data-parallel ranks of a mock engine; more are refused."""
MAX_LABELS = 1_024
"""Classes of a mock engine; more are refused."""


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the engine; documented in `docs/engines.md`.

    Attributes:
        timing: One of TIMINGS, the model of step durations.
        timing_file: JSON file with measured step durations, for `table`.
        fixed_step_ms: Milliseconds per step, for `fixed`.
        fixed_prefill_us: Microseconds per computed prompt token, for `fixed`.
        fault: Faults to inject from the start, such as "hang" or "error_after=3".
        data_parallel_size: Number of data-parallel ranks, each with its own blocks and batch.
        labels: Classes of a model that classifies texts; empty: it embeds.
        media: Kinds of media items to take besides those of the model's files: image, audio, video.
    """

    timing: str = "modelled"
    timing_file: str = ""
    fixed_step_ms: float = 5.0
    fixed_prefill_us: float = 20.0
    fault: tuple[str, ...] = ()
    data_parallel_size: int = 1
    labels: tuple[str, ...] = ()
    media: tuple[str, ...] = ()


def read(text: str) -> Options:
    """Parses `--engine-args`; raises SluiceError(INVALID_ARGUMENT) for unknown options and invalid values."""
    options = read_options(text, Options, "mock")
    if options.timing not in TIMINGS:
        raise _invalid_option(f"timing {options.timing!r} is not one of {', '.join(TIMINGS)}.")
    if not (options.fixed_step_ms >= 0 and options.fixed_prefill_us >= 0):
        raise _invalid_option("fixed_step_ms and fixed_prefill_us must be at least 0.")
    if not 1 <= options.data_parallel_size <= MAX_RANKS:
        raise _invalid_option(f"data_parallel_size must be between 1 and {MAX_RANKS}.")
    if len(options.labels) > MAX_LABELS:
        raise _invalid_option(f"labels has {len(options.labels)} entries; the maximum is {MAX_LABELS}.")
    kinds = [kind.capability for kind in MediaKind]
    for kind in options.media:
        if kind not in kinds:
            raise _invalid_option(f"media {kind!r} is not one of {', '.join(kinds)}.")
    return options


def _invalid_option(message: str) -> SluiceError:
    return invalid(f"mock engine: {message}", param="engine_args")

"""Loads the mock engine's files at its start, off the event loop."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from services.common.base.errors import ErrorKind, SluiceError
from services.common.packages import model_files as models
from services.worker.engines.mock.options import Options
from services.worker.engines.mock.text import TextGenerator
from services.worker.engines.mock.timing import FixedTiming, ModelledTiming, StepTiming, TableTiming
from services.worker.engines.mock.vocabulary import MockVocabulary, declared_context_length, load_vocabulary
from services.worker.settings import WorkerSettings

BLOCK_BYTES = 200  # memory of this process per simulated block


@dataclass(frozen=True, slots=True)
class Loaded:
    """Contents of the model's files; `media` are the kinds of media items that the model takes."""

    vocabulary: MockVocabulary
    text_generator: TextGenerator
    processor: str
    fingerprint: str
    context_length: int
    media: frozenset[str] = frozenset()


def load(settings: WorkerSettings, ranks: int) -> Loaded:
    """Loads the tokenizer; raises SluiceError when it is missing, or memory for the block table is insufficient."""
    check_memory(settings.total_blocks * ranks)
    path = models.resolve(settings.spec.source)
    processor = settings.spec.processor or models.detect_processor(path)
    # A custom processor may create the ids, but their text is defined by the model's files.
    vocabulary = load_vocabulary(path, processor if processor in models.PROCESSORS else models.detect_processor(path))
    return Loaded(
        vocabulary,
        TextGenerator(vocabulary),
        processor,
        models.fingerprint(path),
        declared_context_length(path),
        declared_media(path),
    )


def declared_media(path: Path) -> frozenset[str]:
    """Returns the kinds of media items that the model's config.json declares an encoder for."""
    config = models.read_json(path, "config.json")
    declared = {"image": "vision_config", "audio": "audio_config", "video": "video_token_id"}
    return frozenset(kind for kind, name in declared.items() if name in config)


def check_memory(total_blocks: int) -> None:
    """Raises SluiceError(FAILED_PRECONDITION) when the table of `total_blocks` blocks does not fit into free memory."""
    free = available_bytes()
    if free is not None and total_blocks * BLOCK_BYTES > free:
        raise SluiceError(
            ErrorKind.FAILED_PRECONDITION,
            f"Not enough memory for {total_blocks} blocks: {free >> 20} MiB are free; lower --total-blocks.",
            param="total-blocks",
            code="out_of_memory",
        )


def timing(options: Options, speedup: float) -> StepTiming:
    """Returns the configured step timing; raises SluiceError for an invalid timing file."""
    if options.timing == "fixed":
        return FixedTiming(options.fixed_step_ms, options.fixed_prefill_us, speedup)
    if options.timing == "table":
        return TableTiming.read(Path(options.timing_file), speedup)
    return ModelledTiming(speedup)


def available_bytes() -> int | None:
    """Returns the bytes usable without swapping and within the container's limit; None if neither is reported."""
    found = [available for available in (_machine(), _container()) if available is not None]
    return min(found, default=None)


def _machine() -> int | None:
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _container() -> int | None:
    limit, used = _read("/sys/fs/cgroup/memory.max"), _read("/sys/fs/cgroup/memory.current")
    return int(limit) - int(used) if limit.isdigit() and used.isdigit() else None


def _read(path: str) -> str:
    try:
        return Path(path).read_text("utf-8").strip()
    except OSError:
        return ""

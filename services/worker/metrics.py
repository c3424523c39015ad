"""The worker's metrics, recorded once per request or read when scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from services.common.observability.declarations import ERROR_KINDS, LONG_SECONDS, SECONDS, MetricDeclarations
from services.common.observability.instruments import Counter, Histogram, watch
from services.common.observability.label_bounds import Label
from services.worker.contract.engine import Load
from services.worker.contract.generation import FinishReason, Usage

METRICS = MetricDeclarations("worker")
RANK = Label("rank", "data-parallel rank", most=256)
EVENTS_OF_ENGINES = "the engine publishes KV events (vllm, sglang, vllm-grpc, http)"
ROUTED = "the worker registers with a router (`--routers`)"

REQUESTS = METRICS.counter(
    "requests",
    "completed generations",
    Label(
        "reason",
        "finish reason",
        tuple(reason.name.lower() for reason in FinishReason if reason is not FinishReason.TOOL_CALLS),
    ),
)
REFUSED = METRICS.counter(
    "refused", "requests rejected before they reached the engine", Label("error", "kind", ERROR_KINDS)
)
PROMPT_TOKENS = METRICS.counter("prompt_tokens", "prompt tokens of completed requests")
CACHED_TOKENS = METRICS.counter("cached_tokens", "prompt tokens of completed requests found in the prefix cache")
OUTPUT_TOKENS = METRICS.counter("output_tokens", "tokens generated for completed requests")
TTFT = METRICS.histogram(
    "time_to_first_token_seconds", "time from acceptance of a request to its first token", buckets=SECONDS
)
BETWEEN = METRICS.histogram(
    "inter_token_seconds",
    "mean time between the tokens of a generation, one value per generation",
    buckets=(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1),
)
DURATION = METRICS.histogram(
    "request_duration_seconds", "time from acceptance of a request to its terminal delta", buckets=LONG_SECONDS
)
BROKEN = METRICS.counter(
    "broken_contracts",
    "violations of the engine contract",
    Label("rule", "contract rule that the engine broke", most=30, rare=True),
)
CANARIES = METRICS.counter(
    "canaries", "one-token generations that check the engine", Label("outcome", "result", ("ok", "failed"))
)
EMBEDDED = METRICS.counter("embedded_inputs", "embedded inputs")
EMBEDDING = METRICS.histogram(
    "embedding_duration_seconds",
    "duration of an embedding call",
    buckets=LONG_SECONDS,
    when="embeddings were requested",
)
ATTACHES = METRICS.counter("attaches", "registrations accepted by a router", when=ROUTED)
ID_TAKEN = METRICS.gauge(
    "id_taken",
    "1 while the worker is not registered because another process holds its id",
    when=ROUTED,
    together="max",
)
EVENT_GAPS = METRICS.counter("kv_event_gaps", "gaps in the engine's KV events", when=EVENTS_OF_ENGINES)
EVENT_LOSSES = METRICS.counter(
    "kv_event_losses", "gaps in the engine's KV events that could not be replayed", when=EVENTS_OF_ENGINES
)
EVENT_ORPHANS = METRICS.counter(
    "kv_event_orphans", "blocks stored with an unknown parent block", when=EVENTS_OF_ENGINES
)
TAKES_MEDIA = "the engine takes images, audio or videos"
MEDIA_FILES = METRICS.counter(
    "media_files",
    "media files received, or dropped to make room",
    Label("outcome", "what became of it", ("stored", "known", "refused", "dropped")),
    when=TAKES_MEDIA,
)
MEDIA_MISSING = METRICS.counter(
    "media_missing", "requests refused because a media file of their prompt is not kept", when=TAKES_MEDIA
)
MEDIA_BYTES = METRICS.gauge("media_bytes", "bytes of media files kept and of unfinished uploads")
RUNNING = METRICS.gauge("running_requests", "requests in the running batch", RANK)
WAITING = METRICS.gauge("waiting_requests", "admitted requests that are not in the running batch", RANK)
USED_BLOCKS = METRICS.gauge("used_blocks", "KV-cache blocks held by running requests", RANK)
CACHED_BLOCKS = METRICS.gauge("cached_blocks", "KV-cache blocks that hold reusable prefixes", RANK)
LOADS = {
    "running_requests": RUNNING,
    "waiting_requests": WAITING,
    "used_blocks": USED_BLOCKS,
    "cached_blocks": CACHED_BLOCKS,
}
TOTAL_BLOCKS = METRICS.gauge("total_blocks", "capacity of the KV cache in blocks", RANK)


class MediaMetrics:
    """Records the media files of a worker."""

    def __init__(self) -> None:
        self._files, self._missing = Counter(MEDIA_FILES), Counter(MEDIA_MISSING)

    def watch(self, used: Callable[[], int]) -> None:
        """Reports the bytes in use; `used` is called from the scraping thread."""
        watch(MEDIA_BYTES, lambda: [(used(), {})])

    def record(self, outcome: str) -> None:
        """Counts a file."""
        self._files.add(1, {"outcome": outcome})

    def record_missing(self) -> None:
        """Counts a request whose file is not kept."""
        self._missing.add(1)


class WorkerMetrics:
    """Records the worker's metrics; create it after telemetry is configured.

    Args:
        load: returns the load of each data-parallel rank; called from the scraping thread.
        total_blocks: returns the number of KV-cache blocks of each rank; called from the scraping thread.
    """

    def __init__(
        self, load: Callable[[], Sequence[Load]], total_blocks: Callable[[], Sequence[int]] = lambda: ()
    ) -> None:
        self._load = load
        self._requests = Counter(REQUESTS)
        self._refused = Counter(REFUSED)
        self._prompt, self._cached, self._output = (
            Counter(PROMPT_TOKENS),
            Counter(CACHED_TOKENS),
            Counter(OUTPUT_TOKENS),
        )
        self._first, self._between, self._duration = Histogram(TTFT), Histogram(BETWEEN), Histogram(DURATION)
        self._broken = Counter(BROKEN)
        self._canaries = Counter(CANARIES)
        self._embedded, self._embedding = Counter(EMBEDDED), Histogram(EMBEDDING)
        for name, declared in LOADS.items():
            watch(declared, self._observer(name))
        watch(TOTAL_BLOCKS, lambda: [(blocks, {"rank": str(rank)}) for rank, blocks in enumerate(total_blocks())])

    def record(self, reason: FinishReason, usage: Usage, first_token_s: float | None, duration_s: float) -> None:
        """Records a completed request."""
        self._requests.add(1, {"reason": reason.name.lower()})
        self._prompt.add(usage.prompt_tokens)
        if usage.cached_tokens:
            self._cached.add(usage.cached_tokens)
        self._output.add(usage.completion_tokens)
        self._duration.record(duration_s)
        if first_token_s is not None:
            self._first.record(first_token_s)
            if usage.completion_tokens > 1:
                self._between.record((duration_s - first_token_s) / (usage.completion_tokens - 1))

    def record_refusal(self, kind: str) -> None:
        """Records a request rejected before it reached the engine."""
        self._refused.add(1, {"error": kind})

    def record_broken_contract(self, rule: str) -> None:
        """Records a violation of the engine contract."""
        self._broken.add(1, {"rule": rule})

    def record_canary(self, ok: bool) -> None:
        """Records the result of a canary."""
        self._canaries.add(1, {"outcome": "ok" if ok else "failed"})

    def record_embedding(self, inputs: int, prompt_tokens: int, duration_s: float) -> None:
        """Records a completed embedding call."""
        self._embedded.add(inputs)
        self._prompt.add(prompt_tokens)
        self._embedding.record(duration_s)

    def _observer(self, name: str) -> Callable[[], Iterable[tuple[float, Mapping[str, str]]]]:
        return lambda: [(getattr(load, name), {"rank": str(rank)}) for rank, load in enumerate(self._load())]

"""Reads vLLM's metrics, in the Prometheus text format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from prometheus_client.parser import text_string_to_metric_families

from services.worker.contract.engine import Load
from services.worker.engines.http.dialect import MAX_NUMBER

_CONFIG = "vllm:cache_config_info"
_RUNNING, _WAITING, _USAGE = "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"

MAX_SAMPLES = 4_096
"""Samples of one gauge of an engine's server, one for each rank; further ones are ignored."""

Samples = Mapping[str, list[tuple[Mapping[str, str], float]]]
"""Labels and values by name."""


def read_cache_configs(content: bytes) -> Sequence[Mapping[str, str]]:
    """Returns the configuration of the KV cache of each rank; empty if the server has no metrics."""
    return [labels for labels, _ in read_gauges(content, (_CONFIG,))[_CONFIG]]


def read_loads(content: bytes, total_blocks: int) -> Sequence[Load]:
    """Returns the load of each rank; empty if the server has no metrics.

    Args:
        total_blocks: blocks per rank.
    """
    gauges = read_gauges(content, (_RUNNING, _WAITING, _USAGE))
    running, waiting, usage = (by_rank(gauges[name], "engine") for name in (_RUNNING, _WAITING, _USAGE))
    return [
        Load(
            running_requests=whole(running[rank]),
            waiting_requests=whole(waiting.get(rank, 0)),
            used_blocks=whole(usage.get(rank, 0.0) * total_blocks),
        )
        for rank in sorted(running)
    ]


def whole(value: object) -> int:
    """Returns a reported number as a whole one in the range of 32-bit messages; 0 for anything else."""
    if not isinstance(value, int | float) or not value > 0:  # also false for NaN
        return 0
    return round(min(value, MAX_NUMBER))


def read_gauges(content: bytes, names: Iterable[str]) -> Samples:
    """Returns the samples of some gauges; malformed lines are omitted.

    Only their lines are parsed: an engine's metrics are hundreds of KiB, most of it histograms.
    """
    found: dict[str, list[tuple[Mapping[str, str], float]]] = {name: [] for name in names}
    for line in content.decode(errors="replace").splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name not in found or len(found[name]) >= MAX_SAMPLES:
            continue
        try:
            for family in text_string_to_metric_families(line + "\n"):
                found[name] += [(sample.labels, sample.value) for sample in family.samples]
        except ValueError:
            continue
    return found


def by_rank(samples: Iterable[tuple[Mapping[str, str], float]], label: str) -> dict[int, float]:
    """Returns the values summed by data-parallel rank; samples without a numeric rank count for rank 0."""
    values: dict[int, float] = {}
    for labels, value in samples:
        rank = labels.get(label, "0")
        number = int(rank) if rank.isascii() and rank.isdecimal() else 0
        values[number] = values.get(number, 0.0) + value
    return values

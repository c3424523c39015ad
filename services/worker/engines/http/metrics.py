"""Reads gauges from an engine's metrics in the Prometheus text format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.parser import text_string_to_metric_families

Samples = Mapping[str, list[tuple[Mapping[str, str], float]]]
"""Labels and values by name."""


def read_gauges(content: bytes, names: Iterable[str]) -> Samples:
    """Returns the samples of some gauges; malformed lines are omitted.

    Only their lines are parsed: an engine's metrics are hundreds of KiB, most of it histograms.
    """
    found: dict[str, list[tuple[Mapping[str, str], float]]] = {name: [] for name in names}
    for line in content.decode(errors="replace").splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name not in found:
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

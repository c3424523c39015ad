"""From what was measured to figures, as a table for people and as JSON for machines."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from load import Load, Outcome
from rich.console import Console
from rich.table import Table

_SPINE = ("gateway", "preprocess", "router", "postprocess")


def percentiles_ms(seconds: Sequence[float]) -> dict[str, float]:
    """p50, p90 and p99 in milliseconds; empty for no values."""
    ordered = sorted(seconds)
    if not ordered:
        return {}
    return {f"p{rank}": 1e3 * ordered[min(len(ordered) * rank // 100, len(ordered) - 1)] for rank in (50, 90, 99)}


def figures(name: str, load: Load, outcome: Outcome, cpu_s: Mapping[str, float]) -> dict[str, Any]:
    """The figures of one load; `cpu_s` is what each service used in the window."""
    window = outcome.ended - outcome.started
    tokens = max(outcome.tokens, 1)
    per_token = {service: 1e6 * used / tokens for service, used in cpu_s.items()}
    return {
        "name": name,
        "streams": load.streams,
        "requests": load.requests,
        "tokens_per_request": load.tokens,
        "words_per_prompt": load.words,
        "window_s": window,
        "tokens_per_s": outcome.tokens / window,
        "requests_per_s": outcome.answers / window,
        "first_text_ms": percentiles_ms(outcome.first_text),
        "inter_token_ms": percentiles_ms(outcome.per_token),
        "pause_ms": percentiles_ms(outcome.pauses),
        "events_per_token": outcome.events / tokens,
        "errors": dict(outcome.errors),
        "cpu_us_per_token": per_token,
        "cpu_us_per_token_without_workers": sum(
            used for service, used in per_token.items() if service.startswith(_SPINE)
        ),
        "client_cpu_us_per_token": 1e6 * outcome.client_cpu / tokens,
    }


def medians(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the median of each figure, at any depth; other values are those of the first row.

    Args:
        rows: at least one, of the same shape. Only `errors` may differ; all of them are kept.
    """
    merged = {key: _median([row[key] for row in rows]) for key in rows[0] if key != "errors"}
    if "errors" in rows[0]:
        merged["errors"] = {error: count for row in rows for error, count in row["errors"].items()}
    return merged


def _median(values: Sequence[Any]) -> Any:
    if isinstance(values[0], Mapping):
        return medians(values)
    return statistics.median(values) if isinstance(values[0], int | float) else values[0]


def machine() -> dict[str, Any]:
    """Where the figures come from."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return {
        "cpu": model or platform.processor(),
        "cores": psutil.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / (1 << 30)),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def show(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Prints the figures."""
    console.print(_speed(rows))
    if any(row["cpu_us_per_token"] for row in rows):
        console.print(_cpu(rows))
    for row in rows:
        for error, count in row["errors"].items():
            console.print(f"{row['name']}: {count} × {error}", style="red", markup=False)


def _speed(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title="speed (ms as p50 / p90 / p99)")
    for title in ("load", "streams × tokens", "tokens/s", "requests/s", "first text", "inter-token", "pause"):
        table.add_column(title, justify="left" if title == "load" else "right")
    table.add_column("events/token", justify="right")
    table.add_column("errors", justify="right")
    for row in rows:
        table.add_row(
            row["name"],
            f"{row['streams']} × {row['tokens_per_request']}",
            f"{row['tokens_per_s']:,.0f}",
            f"{row['requests_per_s']:,.1f}",
            *(_triple(row[key]) for key in ("first_text_ms", "inter_token_ms", "pause_ms")),
            f"{row['events_per_token']:.2f}",
            str(sum(row["errors"].values())),
        )
    return table


def _triple(values: Mapping[str, float]) -> str:
    return " / ".join(f"{value:.1f}" if value >= 1 else f"{value:.2f}" for value in values.values()) or "–"


def _cpu(rows: Sequence[Mapping[str, Any]]) -> Table:
    services = list(dict.fromkeys(service for row in rows for service in row["cpu_us_per_token"]))
    table = Table(title="CPU, µs per output token")
    table.add_column("load")
    for title in (*services, "all but workers", "client"):
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row(
            row["name"],
            *(f"{row['cpu_us_per_token'].get(service, 0):.1f}" for service in services),
            f"{row['cpu_us_per_token_without_workers']:.1f}",
            f"{row['client_cpu_us_per_token']:.2f}",
        )
    return table

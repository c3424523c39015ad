"""Draws what a trace showed: four diagrams over the arrival rate, with a line for each policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from sluice.cli.sizing.line_plot import Panel, Scale
from sluice.cli.sizing.line_plot import plot as plot_panels

COLOURS = {
    "kv": "#0b6e4f",
    "least_loaded": "#c1666b",
    "power_of_two": "#d4a24e",
    "round_robin": "#48639c",
    "random": "#8a8a8a",
}
OTHER_COLOUR = "#000"
COLUMNS = 2

Row = Mapping[str, Any]


class Measure(NamedTuple):
    """What one diagram shows of a row."""

    title: str
    value: Callable[[Row], float]
    scale: Scale


MEASURES = (
    Measure("mean time to first token, s", lambda row: row["ttft"]["mean"], "logarithmic"),
    Measure("p99 time to first token, s", lambda row: row["ttft"]["p99"], "logarithmic"),
    Measure("prompt tokens found in the cache, %", lambda row: 100 * row["hit"], "linear"),
    Measure("requests shed, %", lambda row: 100 * row["shed"], "linear"),
)


def plot(rows: Sequence[Row]) -> str:
    """Returns an SVG document with a diagram for each of `MEASURES`."""
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    colours = {policy: COLOURS.get(policy, OTHER_COLOUR) for policy in policies}
    return plot_panels([_panel(measure, policies, rows) for measure in MEASURES], COLUMNS, colours)


def _panel(measure: Measure, policies: Sequence[str], rows: Sequence[Row]) -> Panel:
    lines = {
        policy: sorted((row["speedup"], measure.value(row)) for row in rows if row["policy"] == policy)
        for policy in policies
    }
    return Panel(
        measure.title,
        "arrivals, speed-up of the trace",
        lines,
        x_scale="linear",
        y_scale=measure.scale,
        x_suffix="×",
    )

"""Draws what a trace showed, as SVG without any library."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

COLOURS = {
    "kv": "#0b6e4f",
    "least_loaded": "#c1666b",
    "power_of_two": "#d4a24e",
    "round_robin": "#48639c",
    "random": "#8a8a8a",
}
WIDTH, HEIGHT = 360, 260
LEFT, TOP, RIGHT, BOTTOM = 52, 34, 12, 40


class Panel(NamedTuple):
    """One diagram over the arrival rate."""

    title: str
    value: Callable[[Mapping[str, Any]], float]
    logarithmic: bool = False


PANELS = (
    Panel("mean time to first token, s", lambda row: row["ttft"]["mean"], logarithmic=True),
    Panel("p99 time to first token, s", lambda row: row["ttft"]["p99"], logarithmic=True),
    Panel("prompt tokens found in the cache, %", lambda row: 100 * row["hit"]),
    Panel("requests shed, %", lambda row: 100 * row["shed"]),
)


def plot(rows: Sequence[Mapping[str, Any]]) -> str:
    """An SVG document: four panels, a line for each policy, arrival speed-up across."""
    across, down = 2, -(-len(PANELS) // 2)
    legend = 26
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {across * WIDTH} {down * HEIGHT + legend}" '
        'font-family="sans-serif" font-size="11" fill="#333">',
        f'<rect width="{across * WIDTH}" height="{down * HEIGHT + legend}" fill="white"/>',
    ]
    for number, panel in enumerate(PANELS):
        x, y = number % across * WIDTH, number // across * HEIGHT
        parts += [f'<g transform="translate({x},{y})">', *_panel(panel, rows), "</g>"]
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    for number, policy in enumerate(policies):
        x, y = LEFT + number * 125, down * HEIGHT + 12
        parts.append(f'<line x1="{x}" x2="{x + 22}" y1="{y}" y2="{y}" stroke="{_colour(policy)}" stroke-width="2.5"/>')
        parts.append(f'<text x="{x + 27}" y="{y + 4}">{policy}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _colour(policy: str) -> str:
    return COLOURS.get(policy, "#000")


def _panel(panel: Panel, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    speeds = sorted({row["speedup"] for row in rows})
    values = [panel.value(row) for row in rows]
    low, high, ticks = _decades(values) if panel.logarithmic else _linear(values)

    def x_of(speed: float) -> float:
        span = (speeds[-1] - speeds[0]) or 1
        return float(LEFT + (WIDTH - LEFT - RIGHT) * (speed - speeds[0]) / span)

    def y_of(value: float) -> float:
        if panel.logarithmic:
            share = math.log(max(value, low) / low) / math.log(high / low)
        else:
            share = (value - low) / (high - low)
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share

    parts = [f'<text x="{LEFT}" y="18" font-weight="bold">{panel.title}</text>']
    for tick in ticks:
        y = y_of(tick)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e4e4e4"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    parts += [
        f'<text x="{x_of(speed):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{speed:g}×</text>'
        for speed in speeds
    ]
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 8}" text-anchor="end">arrivals, speed-up of the trace</text>')
    for policy in dict.fromkeys(row["policy"] for row in rows):
        line = sorted((row["speedup"], panel.value(row)) for row in rows if row["policy"] == policy)
        points = " ".join(f"{x_of(speed):.1f},{y_of(value):.1f}" for speed, value in line)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{_colour(policy)}" stroke-width="2.5"/>')
    return parts


def _linear(values: Sequence[float]) -> tuple[float, float, list[float]]:
    top = max(values) or 1.0
    step = 10 ** math.floor(math.log10(top))
    step = next(each for each in (step / 5, step / 2, step, 2 * step) if top / each <= 6)
    count = math.ceil(top / step)
    return 0.0, count * step, [number * step for number in range(count + 1)]


def _decades(values: Sequence[float]) -> tuple[float, float, list[float]]:
    first = math.floor(math.log10(max(min(values), 1e-3)))
    last = max(math.ceil(math.log10(max(values))), first + 1)
    ticks = [factor * 10.0**exponent for exponent in range(first, last) for factor in (1, 2, 5)]
    return 10.0**first, 10.0**last, [*ticks, 10.0**last]

"""Draws lines over logarithmic axes as SVG, without a library."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

WIDTH, HEIGHT = 360, 260
LEFT, TOP, RIGHT, BOTTOM = 56, 34, 14, 42
COLOURS = ("#c1666b", "#0b6e4f", "#48639c", "#d4a24e")


class Series(NamedTuple):
    """One diagram: a line of (x, y) points for each name; both are positive."""

    title: str
    across: str
    lines: Mapping[str, Sequence[tuple[float, float]]]


def plot(panels: Sequence[Series]) -> str:
    """Returns an SVG document with the diagrams beside each other and one legend."""
    names = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    colours = {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(names)}
    width, height = len(panels) * WIDTH, HEIGHT + 26
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="11" fill="#333">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for number, panel in enumerate(panels):
        parts += [f'<g transform="translate({number * WIDTH},0)">', *_panel(panel, colours), "</g>"]
    for number, name in enumerate(names):
        x, y = LEFT + number * 150, HEIGHT + 12
        parts.append(f'<line x1="{x}" x2="{x + 22}" y1="{y}" y2="{y}" stroke="{colours[name]}" stroke-width="2.5"/>')
        parts.append(f'<text x="{x + 27}" y="{y + 4}">{name}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _panel(panel: Series, colours: Mapping[str, str]) -> list[str]:
    points = [point for line in panel.lines.values() for point in line]
    xs, ys = sorted({x for x, _ in points}), [y for _, y in points]
    low, high = 10.0 ** math.floor(math.log10(min(ys))), 10.0 ** math.ceil(math.log10(max(ys)))
    high = high if high > low else low * 10

    def x_of(x: float) -> float:
        span = math.log(xs[-1] / xs[0]) or 1.0
        return LEFT + (WIDTH - LEFT - RIGHT) * math.log(x / xs[0]) / span

    def y_of(y: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * math.log(max(y, low) / low) / math.log(high / low)

    parts = [f'<text x="{LEFT}" y="18" font-weight="bold">{panel.title}</text>']
    tick = low
    while tick <= high:
        for factor in (1, 2, 5):
            if tick * factor <= high:
                y = y_of(tick * factor)
                parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e4e4e4"/>')
                parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick * factor:g}</text>')
        tick *= 10
    parts += [f'<text x="{x_of(x):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{x:g}</text>' for x in xs]
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 8}" text-anchor="end">{panel.across}</text>')
    for name, line in panel.lines.items():
        path = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in line)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colours[name]}" stroke-width="2.5"/>')
        parts += [f'<circle cx="{x_of(x):.1f}" cy="{y_of(y):.1f}" r="3" fill="{colours[name]}"/>' for x, y in line]
    return parts

"""Draws lines over linear or logarithmic axes as SVG, without a library."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

WIDTH, HEIGHT, LEGEND_HEIGHT = 360, 260, 26
LEFT, TOP, RIGHT, BOTTOM = 56, 34, 14, 42
LEGEND_STEP = 150
COLOURS = ("#c1666b", "#0b6e4f", "#48639c", "#d4a24e")
SMALLEST = 1e-3  # a logarithmic y axis starts no lower
MARKED = 20
"""Points of an axis that are marked and labelled each; with more, a line is thin and the axis has round numbers."""

Scale = Literal["linear", "logarithmic"]


class Panel(NamedTuple):
    """One diagram: a line of (x, y) points for each name.

    Attributes:
        across: title of the x axis.
        x_scale: with "logarithmic", every x is positive.
        x_suffix: of the numbers at the x axis.
    """

    title: str
    across: str
    lines: Mapping[str, Sequence[tuple[float, float]]]
    x_scale: Scale = "logarithmic"
    y_scale: Scale = "logarithmic"
    x_suffix: str = ""


class _Axis(NamedTuple):
    low: float
    high: float
    scale: Scale
    ticks: Sequence[float]

    def share(self, value: float) -> float:
        """Returns where a value is: 0 at the low end, 1 at the high end."""
        if self.scale == "linear":
            return (value - self.low) / ((self.high - self.low) or 1.0)
        return math.log(max(value, self.low) / self.low) / (math.log(self.high / self.low) or 1.0)


def plot(panels: Sequence[Panel], columns: int, colours: Mapping[str, str] | None = None) -> str:
    """Returns an SVG document with the diagrams in rows of `columns`, and one legend.

    Args:
        colours: of every name; None: `COLOURS` in turns.
    """
    names = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    colours = colours or {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(names)}
    width, height = columns * WIDTH, -(-len(panels) // columns) * HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height + LEGEND_HEIGHT}" '
        'font-family="sans-serif" font-size="11" fill="#333">',
        f'<rect width="{width}" height="{height + LEGEND_HEIGHT}" fill="white"/>',
    ]
    for number, panel in enumerate(panels):
        x, y = number % columns * WIDTH, number // columns * HEIGHT
        parts += [f'<g transform="translate({x},{y})">', *_panel(panel, colours), "</g>"]
    step = min(LEGEND_STEP, (width - LEFT) // max(len(names), 1))
    for number, name in enumerate(names):
        x, y = LEFT + number * step, height + 12
        parts.append(f'<line x1="{x}" x2="{x + 22}" y1="{y}" y2="{y}" stroke="{colours[name]}" stroke-width="2.5"/>')
        parts.append(f'<text x="{x + 27}" y="{y + 4}">{name}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _panel(panel: Panel, colours: Mapping[str, str]) -> list[str]:
    points = [point for line in panel.lines.values() for point in line]
    xs, ys = sorted({x for x, _ in points}), [y for _, y in points]
    marked = len(xs) <= MARKED
    across = _Axis(xs[0], xs[-1], panel.x_scale, xs) if marked else _linear(xs)
    up = _linear(ys) if panel.y_scale == "linear" else _logarithmic(ys)

    def x_of(x: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * across.share(x)

    def y_of(y: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * up.share(y)

    parts = [f'<text x="{LEFT}" y="18" font-weight="bold">{panel.title}</text>']
    for tick in up.ticks:
        y = y_of(tick)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e4e4e4"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for tick in across.ticks:
        label = f"{tick:g}{panel.x_suffix}"
        parts.append(f'<text x="{x_of(tick):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{label}</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 8}" text-anchor="end">{panel.across}</text>')
    for name, line in panel.lines.items():
        path = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in line)
        width = 2.5 if marked else 1.2
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colours[name]}" stroke-width="{width}"/>')
        for x, y in line if marked else ():
            parts.append(f'<circle cx="{x_of(x):.1f}" cy="{y_of(y):.1f}" r="3" fill="{colours[name]}"/>')
    return parts


def _linear(values: Sequence[float]) -> _Axis:
    top = max(values) or 1.0
    decade = 10.0 ** math.floor(math.log10(top))
    step = next(each for each in (decade / 5, decade / 2, decade, 2 * decade) if top / each <= 6)
    count = math.ceil(top / step)
    return _Axis(0.0, count * step, "linear", [number * step for number in range(count + 1)])


def _logarithmic(values: Sequence[float]) -> _Axis:
    shown = [max(value, SMALLEST) for value in values]
    first = math.floor(math.log10(min(shown)))
    last = max(math.ceil(math.log10(max(shown))), first + 1)
    ticks = [factor * 10.0**exponent for exponent in range(first, last) for factor in (1, 2, 5)]
    return _Axis(10.0**first, 10.0**last, "logarithmic", [*ticks, 10.0**last])

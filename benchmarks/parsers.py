"""How the time of parsers grows with the length of the output: white space, many calls, one long argument.

    python benchmarks/parsers.py [--mb 4] [--parser NAME ...]

Each output is parsed in pieces of one character and of a megabyte, at a quarter, half and all of the length. The time
is CPU of this process; linear parsers take four times as long for four times the length.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from services.postprocess.detokenize.vocabulary import ParserNames
from services.postprocess.parsers.base import ParserContext
from services.postprocess.parsers.registry import build
from tests.support.data.call_formats import FORMATS

MIB = 1 << 20
SUPERLINEAR = 8.0
"""Ratio of the times at all and at a quarter of the length from which on the exit code is 1."""
PIECES = {"1 char": 1, "1 MB": MIB}


def shapes(name: str) -> dict[str, Callable[[int], str]]:
    """Returns outputs of about a number of characters, by what they consist of."""
    write = FORMATS[name].render
    one = write([("f", {"a": "word"})]) + "\n"
    return {
        "white space": lambda size: " \n" * (size // 2) + one,
        "calls": lambda size: write([("f", {"a": "word"})] * max(size // len(one), 1)),
        "one argument": lambda size: write([("f", {"a": 'a "word" \n' * (size // 10)})]),
    }


def seconds(name: str, text: str, size: int) -> float:
    """Returns the CPU seconds for a text in pieces of `size` characters."""
    form = FORMATS[name]
    pieces = [text[at : at + size] for at in range(0, len(text), size)] if size > 1 else list(text)
    parser = build(
        ParserNames(form.parser, "harmony" if form.parser == "harmony" else ""), ParserContext((), identity="benchmark")
    )
    started = time.process_time()
    for piece in pieces:
        parser.feed(piece)
    parser.finish()
    return time.process_time() - started


def measure(names: Sequence[str], mb: float, console: Console) -> bool:
    """Prints the table; returns whether all parsers are linear."""
    table = Table(title=f"CPU seconds at a quarter, half and all of {mb:g} MB")
    for title in ("format", "output", "pieces", "¼", "½", "1", "ratio"):
        table.add_column(title, justify="left" if title in ("format", "output") else "right")
    linear = True
    for name in names:
        for shape, make in shapes(name).items():
            texts = [make(int(mb * MIB * part)) for part in (0.25, 0.5, 1)]
            for title, size in PIECES.items():
                times = [seconds(name, text, size) for text in texts]
                ratio = times[2] / max(times[0], 1e-3)
                linear = linear and ratio < SUPERLINEAR
                table.add_row(name, shape, title, *(f"{each:.2f}" for each in times), f"{ratio:.1f}")
        console.print(f"{name} is measured", style="dim")
    console.print(table)
    return linear


def main(
    mb: Annotated[float, typer.Option(min=0.1, help="length of the longest output, millions of characters")] = 1.0,
    parser: Annotated[list[str] | None, typer.Option(help="only these formats, repeated")] = None,
) -> None:
    """Measures the built-in parsers; the exit code is 1 if one takes more than linear time."""
    if unknown := sorted({*(parser or ())} - FORMATS.keys()):
        raise typer.BadParameter(f"{unknown[0]} is unknown; there are {', '.join(FORMATS)}.")
    if not measure(parser or list(FORMATS), mb, Console()):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)

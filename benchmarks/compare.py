"""Two versions of the suite, measured in turns: on a machine that does other work, only neighbours compare.

The other version is a checkout of its own (`git worktree add ../before COMMIT`) and uses this one's environment.
"""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer
from load import Load
from processes import own_suite, suite_of
from report import medians, show
from rich.console import Console
from serve import MAX_WARMUP, PRESETS, measure

HERE = Path(__file__).resolve().parent.parent

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def compare(
    before: Annotated[Path, typer.Option(help="checkout to compare this one with", exists=True, file_okay=False)],
    preset: Annotated[str, typer.Option(help="loads as in serve.py, separated by commas")] = "streams256",
    rounds: Annotated[int, typer.Option(min=1, help="of each version and load")] = 5,
    workers: Annotated[int, typer.Option(min=1, help="mock workers of each suite")] = 2,
    speedup: Annotated[float, typer.Option(help="how much faster the mock engine's clock runs")] = 1000.0,
) -> None:
    """Measure this version and another one in turns; what is shown are the medians over the rounds."""
    trees = {"before": before.resolve(), "now": HERE}
    rows = []
    with ExitStack() as suites:
        urls = {name: suites.enter_context(own_suite(workers, speedup, tree=tree)) for name, tree in trees.items()}
        for chosen in preset.split(","):
            seen: dict[str, list[dict[str, Any]]] = {name: [] for name in urls}
            for turn in range(rounds):
                for name in sorted(urls, reverse=turn % 2 == 1):
                    seen[name].append(_measured(f"{chosen}, {name}", urls[name], chosen))
            rows += [medians(each) for each in seen.values()]
    show(rows, Console(width=160))
    raise typer.Exit(1 if any(row["errors"] for row in rows) else 0)


def _measured(name: str, url: str, preset: str) -> dict[str, Any]:
    streams, requests, tokens, words = PRESETS[preset]
    port = urlsplit(url).port or 80
    warmup = min(max(streams, 10), MAX_WARMUP)
    load = Load("127.0.0.1", port, "tekken", streams, requests, tokens, words, warmup, seed=time.time_ns())
    return measure(name, load, 1, suite_of(port))


if __name__ == "__main__":
    try:
        app()
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        sys.exit(f"compare.py: {error}")

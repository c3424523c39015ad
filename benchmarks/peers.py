"""Measures Sluice and its peers in turns: the same model folder, the same client, the same machine.

The peers are NVIDIA Dynamo and SGLang's model gateway (SMG).

Figures of different runs do not compare, because a shared machine changes by a factor of two within an hour; ratios
within one run do.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from peer_processes import MODEL, Target, dynamo, install
from peer_smg import install_smg, smg
from processes import own_suite, suite_of
from report import machine, medians
from rich.console import Console

from sluice.cli.sizing.line_plot import Panel, plot

HERE = Path(__file__).resolve().parent
PEERS = {"dynamo": "Dynamo", "smg": "SMG", "smg-single": "SMG, a token a message"}

# (streams, requests, tokens, words)
LOADS = {
    "1": (1, 60, 64, 150),
    "32": (32, 640, 128, 150),
    "256": (256, 1024, 128, 150),
    "long": (256, 512, 512, 150),
    "1024": (1024, 2048, 128, 150),
    "prompts": (64, 256, 128, 2500),
}
CURVES: dict[str, list[tuple[int, tuple[int, int, int, int]]]] = {
    "streams": [(n, (n, max(2 * n, 40), 128, 150)) for n in (1, 4, 16, 64, 256, 1024, 4096)],
    "prompts": [(words, (16, 48, 32, words)) for words in (1, 100, 1_000, 10_000, 50_000)],
    "workers": [(n, (256, 768, 128, 150)) for n in (1, 2, 4, 8)],
}
CPU = "cpu_us_per_token_without_workers"
FIELDS = (  # of a row of serve.py
    "streams",
    "tokens_per_request",
    "words_per_prompt",
    "tokens_per_s",
    "events_per_token",
    "errors",
    "cpu_us_per_token",
    CPU,
)
ACROSS = {"streams": "concurrent streams", "prompts": "words of a prompt", "workers": "worker replicas"}
_PARSERS = {
    "SLUICE_POSTPROCESS_TOOL_PARSERS": f"{MODEL}=hermes",
    "SLUICE_POSTPROCESS_REASONING_PARSERS": f"{MODEL}=qwen3",
}

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
Row = dict[str, Any]
Starter = Callable[[Path, int, float], AbstractContextManager[Target]]  # of model folder, workers and speedup
Starters = Mapping[str, Starter]


@app.command()
def peers(
    folder: Annotated[Path, typer.Option(help="where the peers are installed")] = HERE.parent / "build/peers",
    beside: Annotated[
        str, typer.Option("--peers", help=f"separated by commas: {', '.join(PEERS)}; the first has the ratio 1")
    ] = "dynamo,smg",
    loads: Annotated[str, typer.Option(help=f"separated by commas: {', '.join(LOADS)}")] = ",".join(LOADS),
    rounds: Annotated[int, typer.Option(min=1, help="of each load, after one that is not counted")] = 4,
    workers: Annotated[int, typer.Option(min=1, help="mock workers of each system")] = 2,
    speedup: Annotated[float, typer.Option(help="of both mock engines; 1: the pace of an engine")] = 1000.0,
    parsers: Annotated[bool, typer.Option(help="also a Sluice with reasoning and tool parsers on")] = True,
    before: Annotated[Path | None, typer.Option(help="also another checkout of Sluice", exists=True)] = None,
    curve: Annotated[
        Literal["", "streams", "prompts", "workers"], typer.Option(help="how the cost grows, instead of `loads`")
    ] = "",
    svg: Annotated[Path | None, typer.Option(help="with --curve: draw it into this file")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of a table")] = False,
) -> None:
    """Measure Sluice beside its peers and print medians and ratios."""
    python, model = install(folder.resolve())
    starters = _starters(beside.split(","), folder.resolve(), python)
    if curve:
        rows = _curve(curve, starters, model, rounds, speedup, workers)
    else:
        with _systems(starters, model, workers, speedup, parsers, before) as targets:
            rows = [row for name in loads.split(",") for row in _turns(name, LOADS[name], targets, rounds)]
    if as_json:
        print(json.dumps({"machine": machine(), "rows": rows}, indent=2))
    else:
        for line in _table(rows):
            print(line)
    if curve and svg is not None:
        svg.write_text(_drawn(curve, rows))
    raise typer.Exit(1 if any(row["errors"] for row in rows) else 0)


def _starters(peers: Sequence[str], folder: Path, dynamo_python: Path) -> Starters:
    """Returns what starts each peer, by its name in the table; installs SMG if it is among them.

    Raises:
        RuntimeError: a package cannot be installed.
        ValueError: there is no such peer.
    """
    if unknown := set(peers) - PEERS.keys():
        raise ValueError(f"--peers: there is no {', '.join(unknown)}; choose from {', '.join(PEERS)}")
    starters: dict[str, Starter] = {}
    for peer in peers:
        if peer == "dynamo":
            starters[PEERS[peer]] = partial(dynamo, dynamo_python)
        else:
            starters[PEERS[peer]] = partial(smg, install_smg(folder), single=peer == "smg-single")
    return starters


@contextmanager
def _systems(
    starters: Starters, model: Path, workers: int, speedup: float, parsers: bool, before: Path | None
) -> Iterator[dict[str, Target]]:
    with ExitStack() as stack:
        targets = {name: stack.enter_context(start(model, workers, speedup)) for name, start in starters.items()}
        if before is not None:
            targets["Sluice before"] = stack.enter_context(_suite(model, workers, speedup, tree=before.resolve()))
        targets["Sluice"] = stack.enter_context(_suite(model, workers, speedup))
        if parsers:
            targets["Sluice, parsers on"] = stack.enter_context(_suite(model, workers, speedup, _PARSERS))
        yield targets


@contextmanager
def _suite(
    model: Path, workers: int, speedup: float, settings: Mapping[str, str] | None = None, tree: Path | None = None
) -> Iterator[Target]:
    kept = {name: os.environ.get(name) for name in settings or {}}
    os.environ.update(settings or {})
    with own_suite(workers, speedup, ["--model", str(model), "--model-name", MODEL], tree) as url:
        for name, value in kept.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        processes = suite_of(int(url.rpartition(":")[2]))
        yield Target(url, (), {name: process.pid for name, process in processes.items()})


def _turns(name: str, load: tuple[int, int, int, int], targets: Mapping[str, Target], rounds: int) -> list[Row]:
    """Returns the medians of a load, by system; the first round warms up and is not counted.

    A peer of which every request of a warm-up fails is left out, which is printed.
    """
    seen: dict[str, list[Row]] = {system: [] for system in targets}
    for turn in range(rounds + 1):
        for system in list(seen):
            print(f"{name}: {system}, round {turn}", file=sys.stderr)
            try:
                measured = _measure(load, targets[system])
            except RuntimeError as error:
                if system.startswith("Sluice"):
                    raise
                print(f"{name}: {system}, left out in round {turn}: {error}", file=sys.stderr)
                del seen[system]
                continue
            for message, count in measured["errors"].items():
                print(f"{name}: {system}, round {turn}: {count} × {message}", file=sys.stderr)
            if turn:
                seen[system].append(measured)
    summaries = {system: _summary(rows) for system, rows in seen.items()}
    base = next(iter(summaries.values()))[CPU]
    return [
        {"load": name, "system": system, **row, "ratio": row[CPU] / base if base else 0.0}
        for system, row in summaries.items()
    ]


def _measure(load: tuple[int, int, int, int], target: Target) -> Row:
    streams, requests, tokens, words = load
    command = [*target.prefix, sys.executable, str(HERE / "serve.py"), "--url", target.url, "--model", MODEL, "--json"]
    command.append("--fresh")  # the same for all: with kept connections, delayed acknowledgements slow Dynamo down
    command += ["--streams", str(streams), "--requests", str(requests), "--tokens", str(tokens), "--words", str(words)]
    command += [flag for name, pid in target.processes.items() for flag in ("--pid", f"{name}={pid}")]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if not done.stdout:
        raise RuntimeError(done.stderr.strip() or "the load generator printed nothing")
    row = json.loads(done.stdout)["loads"][0]
    first_text = row["first_text_ms"] or dict.fromkeys(("p50", "p90", "p99"), 0.0)  # empty: every request failed
    return {field: row[field] for field in FIELDS} | {"first_text_ms": first_text}


def _summary(rows: Sequence[Row]) -> Row:
    cpu_us = [row[CPU] for row in rows]
    errors = sum(sum(row["errors"].values()) for row in rows)
    return {**medians(rows), "cpu_us_range": [min(cpu_us), max(cpu_us)], "errors": errors}


def _curve(name: str, starters: Starters, model: Path, rounds: int, speedup: float, workers: int) -> list[Row]:
    points = CURVES[name]
    rows: list[Row] = []
    if name != "workers":
        with _systems(starters, model, workers, speedup, False, None) as targets:
            for at, load in points:
                rows += [{"at": at, **row} for row in _turns(f"{name} {at}", load, targets, rounds)]
        return rows
    for at, load in points:
        with _systems(starters, model, at, speedup, False, None) as targets:
            rows += [{"at": at, **row} for row in _turns(f"{name} {at}", load, targets, rounds)]
    return rows


def _drawn(name: str, rows: Sequence[Row]) -> str:
    values: dict[str, Callable[[Row], float]] = {
        "CPU, µs per token": lambda row: row[CPU],
        "tokens per second": lambda row: row["tokens_per_s"],
        "first text p50, ms": lambda row: row["first_text_ms"]["p50"],
    }
    panels = []
    for title, value in values.items():
        lines = {
            system: [(float(row["at"]), float(value(row))) for row in rows if row["system"] == system]
            for system in dict.fromkeys(row["system"] for row in rows)
        }
        panels.append(Panel(title, ACROSS[name], lines))
    return plot(panels, columns=len(panels))


def _table(rows: Sequence[Row]) -> Iterator[str]:
    yield "| load | system | CPU µs a token | ratio | tokens/s | first text p50 / p99 | events a token | errors |"
    yield "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    for row in rows:
        low, high = row["cpu_us_range"]
        first_text = row["first_text_ms"]
        shape = f"{row['streams']:.0f} × {row['tokens_per_request']:.0f}, {row['words_per_prompt']:,.0f} words"
        yield (
            f"| {shape} | {row['system']} | {row[CPU]:.1f} ({low:.1f}–{high:.1f}) | {row['ratio']:.2f} | "
            f"{row['tokens_per_s']:,.0f} | {first_text['p50']:.1f} / {first_text['p99']:.1f} ms | "
            f"{row['events_per_token']:.2f} | {row['errors']} |"
        )
    about = machine()
    yield ""
    yield f"{about['cores']} cores of {about['cpu']}, {about['memory_gib']} GiB, Python {about['python']}."


if __name__ == "__main__":
    try:
        app()
    except (OSError, RuntimeError, ValueError, KeyError, subprocess.CalledProcessError) as error:
        Console(stderr=True).print(f"peers.py: {error}", markup=False)
        sys.exit(1)

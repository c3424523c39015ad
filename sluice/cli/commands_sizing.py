"""The commands that say how large a suite should be: `size` and `advise`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sluice.cli.commands_live import AsJson, console
from sluice.cli.flags import made, with_flags
from sluice.cli.sizing.flags import AdviseFlags


def add_to(app: typer.Typer) -> None:
    """Registers the commands."""
    app.command("size")(size)
    app.command("advise")(advise)


def size(
    requests_per_s: Annotated[float, typer.Option(help="requests that arrive a second, at the peak")],
    prompt: Annotated[float, typer.Option(help="tokens of a prompt, on average")],
    output: Annotated[float, typer.Option(help="tokens of an answer, on average")],
    model: Annotated[str, typer.Option(help="name of a model whose costs were measured")] = "tekken",
    ttft_s: Annotated[float, typer.Option(help="seconds to the first token of an answer")] = 1.0,
    inter_token_ms: Annotated[float, typer.Option(help="milliseconds from one token of an answer to the next")] = 20.0,
    utilization: Annotated[
        float, typer.Option(help="share of a replica's core, and of a worker, that the load may use on average")
    ] = 0.7,
    worker_tokens_per_s: Annotated[
        float, typer.Option(help="output tokens a second that one worker generates, as measured; 0: unknown")
    ] = 0.0,
    costs: Annotated[
        Path | None, typer.Option(metavar="FILE", help="costs measured by benchmarks/costs.py; empty: those included")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say how many cores, how much memory and how many replicas of each tier a load needs, from measured costs."""
    from sluice.cli.sizing import size as command

    question = command.Question(
        requests_per_s, prompt, output, model, ttft_s, inter_token_ms, utilization, worker_tokens_per_s
    )
    raise typer.Exit(command.run(question, costs, as_json, console()))


@with_flags(AdviseFlags)
def advise(as_json: AsJson = False, **flags: Any) -> None:
    """Say how many workers each tier should have now and why; with --replay, what autoscalers make of a trace."""
    raise typer.Exit(made(AdviseFlags, flags).run(as_json, console()))

"""Another version of Sluice beside this one in every mixture of tiers, under load.

    python benchmarks/mixed_versions.py --other f7913b7a --seconds 6

Each tier runs this tree or the other one, two replicas of each over a Redis of their own, which makes 32 mixtures. In
each, streams and whole answers of the APIs run for a while; one worker, one router and one postprocess replica are
killed in between. No request may fail or lose a token. The exit code is 1 otherwise.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
import uvloop
from processes import checkout
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))  # the support of the tests starts the suite

from tests.support.data.tiny_models import build_tiny_model
from tests.support.servers.loose_suite import LooseSuite
from tests.support.servers.redis_server import RedisServer

TIERS = {
    "gateway": ("gateway",),
    "preprocess": ("preprocess", "preprocess-1"),
    "router": ("router", "router-1"),
    "postprocess": ("postprocess-0", "postprocess-1"),
    "worker": ("worker-0", "worker-1", "worker-2"),
}
KILLED = ("worker-0", "router", "postprocess-0", "preprocess")
STREAMS, TOKENS = 16, 60
ANSWER_WITHIN_S = 60.0
_RUN = (
    "import os, sys, runpy; sys.argv.pop(0); os.chdir({tree!r}); os.environ['PYTHONPATH'] = {tree!r};"
    "sys.path[:0] = [{tree!r}]; runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@dataclass
class Mixture:
    """One mixture and what became of its requests."""

    other: frozenset[str]
    requests: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The tiers of the other version."""
        return " ".join(tier for tier in TIERS if tier in self.other) or "none"


def requests_of(number: int) -> tuple[str, dict[str, Any]]:
    """Returns the path and the body of a request, of the APIs in turn."""
    text = f"Tell me of number {number}."
    chat = {"model": "tiny", "messages": [{"role": "user", "content": text}], "seed": number}
    fixed = {"max_tokens": TOKENS, "ignore_eos": True}
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {**chat, **fixed, "stream": True, "stream_options": {"include_usage": True}}),
        ("/v1/chat/completions", {**chat, **fixed}),
        ("/v1/completions", {"model": "tiny", "prompt": text, **fixed}),
        ("/v1/responses", {"model": "tiny", "input": text, "max_output_tokens": TOKENS}),
        ("/v1/messages", {"model": "tiny", "messages": chat["messages"], "max_tokens": TOKENS, "stream": True}),
    ]
    return kinds[number % len(kinds)]


async def ask(client: httpx.AsyncClient, number: int, mixture: Mixture) -> None:
    """Sends a request; an error, in the status or in the stream, is a problem, and so is another number of tokens."""
    path, body = requests_of(number)
    mixture.requests += 1
    try:
        response = await client.post(path, json=body)
    except httpx.HTTPError as error:
        mixture.problems.append(f"{path}: {type(error).__name__} {error}")
        return
    text = response.text
    counted = f'"completion_tokens":{TOKENS}' in text.replace(" ", "") or "ignore_eos" not in body
    if response.status_code != 200 or '"error":{' in text or '"type":"error"' in text or not counted:
        mixture.problems.append(f"{path}: {response.status_code} {text[-300:]}")


async def load(suite: LooseSuite, mixture: Mixture, seconds: float) -> None:
    """Runs requests for a time; kills and starts a process of each tier that has another meanwhile."""
    limits = httpx.Limits(max_connections=None)
    until_s = time.monotonic() + seconds
    async with httpx.AsyncClient(base_url=suite.url, timeout=ANSWER_WITHIN_S, limits=limits) as client:

        async def repeat(index: int) -> None:
            number = index
            while time.monotonic() < until_s:
                await ask(client, number, mixture)
                number += STREAMS

        asking = [asyncio.create_task(repeat(index)) for index in range(STREAMS)]
        for name in KILLED:
            await asyncio.sleep(seconds / (2 * len(KILLED)))
            suite.end(name)
            await asyncio.sleep(seconds / (2 * len(KILLED)))
            await asyncio.to_thread(suite.start, name)
        await asyncio.gather(*asking)


def run_mixture(mixture: Mixture, model: Path, tree: Path, seconds: float) -> None:
    """Runs the load on a suite of the mixture."""
    code = _RUN.format(tree=str(tree))
    redis = RedisServer(model.parent)
    redis.start()
    try:
        with LooseSuite(
            model,
            workers=len(TIERS["worker"]),
            preprocess=2,
            routers=2,
            worker_flags=("--drain-s", "1"),  # those of the mock engine differ
            flags_of=dict.fromkeys(TIERS["router"], ("--redis-url", redis.url)),
            code_of={name: code for tier in mixture.other for name in TIERS[tier]},
        ) as suite:
            uvloop.run(load(suite, mixture, seconds))
    except AssertionError as error:
        mixture.problems.append(f"the suite: {error}")
    finally:
        redis.stop()


def mixtures(tiers: Sequence[str]) -> list[Mixture]:
    """Returns all mixtures in which only `tiers` run the other version."""
    choices = product((False, True), repeat=len(tiers))
    return [Mixture(frozenset(tier for tier, other in zip(tiers, choice, strict=True) if other)) for choice in choices]


@app.command()
def main(
    other: Annotated[str, typer.Option(metavar="REV", help="the other version")],
    seconds: Annotated[float, typer.Option(min=1.0, help="time of the load of each mixture")] = 6.0,
    tier: Annotated[
        list[str] | None, typer.Option(help=f"tiers that run either; may be repeated: {', '.join(TIERS)}")
    ] = None,
) -> None:
    """Run another version beside this one in every mixture of tiers."""
    if unknown := set(tier or ()) - TIERS.keys():
        raise typer.BadParameter(f"unknown tier {', '.join(sorted(unknown))}", param_hint="--tier")
    runs = mixtures(tier or list(TIERS))
    table = Table(title=f"{other} beside this tree")
    for column in ("tiers of the other version", "requests", "failed"):
        table.add_column(column)
    with tempfile.TemporaryDirectory() as folder, checkout(other) as tree:
        model = build_tiny_model(Path(folder) / "tiny")
        for mixture in runs:
            run_mixture(mixture, model, tree, seconds)
            table.add_row(mixture.name, f"{mixture.requests:,}", f"{len(mixture.problems):,}")
            print(f"{mixture.name}: {mixture.requests} requests, {len(mixture.problems)} failed", flush=True)
            for problem in mixture.problems[:3]:
                print(f"  {problem}", flush=True)
    Console(width=100).print(table)
    raise typer.Exit(1 if any(mixture.problems for mixture in runs) else 0)


if __name__ == "__main__":
    app()

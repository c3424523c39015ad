"""What a salt per tenant costs: tenants that share a system prompt, with and without salts, on mock workers in virtual
time with the router's own code."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import count
from random import Random
from statistics import fmean
from typing import Annotated, NamedTuple

import typer
from rich.console import Console
from rich.table import Table
from trace_fleet import TOKENS_PER_ID, Arrival, Outcome, Shape, Simulation

from services.gateway.admission.tenants import salted

TENANTS = [2, 8, 32, 128]
TURN_BLOCKS = 1
OUTPUT_TOKENS = 128
THINKS_S = 20.0

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


class Load(NamedTuple):
    """Conversations of several turns; all begin with the same system prompt."""

    tenants: int
    requests: int
    turns: int
    system_tokens: int
    per_s: float
    seed: int


def arrivals(load: Load, salts: bool) -> list[Arrival]:
    """The same requests with and without salts, in the order of their arrival."""
    random, fresh = Random(load.seed), count(1_000_000)
    system = tuple(range(1, load.system_tokens // TOKENS_PER_ID + 1))
    made: list[Arrival] = []
    began_s = 0.0
    for _ in range(load.requests // load.turns):
        began_s += random.expovariate(load.per_s / load.turns)
        tenant = f"tenant-{random.randrange(load.tenants)}"
        salt = salted(tenant, "") if salts else ""
        made += _conversation(load.turns, began_s, system, salt, random, fresh)
    return sorted(made, key=lambda each: each.at_s)


def _conversation(
    turns: int, at_s: float, ids: tuple[int, ...], salt: str, random: Random, fresh: Iterator[int]
) -> Iterator[Arrival]:
    for _ in range(turns):
        ids += tuple(next(fresh) for _ in range(TURN_BLOCKS))
        yield Arrival(at_s, len(ids) * TOKENS_PER_ID, OUTPUT_TOKENS, ids, salt=salt)
        at_s += THINKS_S * (0.5 + random.random())


def simulate(load: Load, shape: Shape, salts: bool) -> Outcome:
    """One load to its end."""
    return asyncio.run(Simulation(arrivals(load, salts), "kv", 1.0, shape).run(lambda arrived: None))


@app.command()
def main(
    requests: Annotated[int, typer.Option(help="of all tenants together")] = 3000,
    turns: Annotated[int, typer.Option(help="requests of one conversation")] = 1,
    system_tokens: Annotated[int, typer.Option(help="system prompt that all tenants share")] = 8192,
    per_s: Annotated[float, typer.Option(help="requests a second, of all tenants together")] = 12.0,
    cache_tokens: Annotated[int, typer.Option(help="KV cache of each worker")] = 524_288,
    workers: Annotated[int, typer.Option(help="mock workers behind the router")] = 8,
    seed: Annotated[int, typer.Option(help="of arrivals and router")] = 1,
) -> None:
    """Prints hit rate and mean time to first token by number of tenants, without and with a salt for each."""
    shape = Shape(workers=workers, cache_tokens=cache_tokens, seed=seed)
    table = Table("tenants", "hit rate, shared", "hit rate, salted", "TTFT, shared", "TTFT, salted")
    for tenants in TENANTS:
        load = Load(tenants, requests, turns, system_tokens, per_s, seed)
        shared, apart = (simulate(load, shape, salts) for salts in (False, True))
        table.add_row(str(tenants), *map(_hit_rate, (shared, apart)), *map(_ttft, (shared, apart)))
    Console(highlight=False).print(table)


def _hit_rate(outcome: Outcome) -> str:
    return f"{100 * outcome.cached_tokens / outcome.prompt_tokens:.1f} %"


def _ttft(outcome: Outcome) -> str:
    return f"{1000 * fmean(outcome.ttft_s):.0f} ms"


if __name__ == "__main__":
    app()

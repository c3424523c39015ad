"""Runs the load in processes of its own, all measuring the same window."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection

import uvloop
from load import Client, Load, Outcome, build_requests

_READY_WITHIN_S = 300.0


def run_load(load: Load, processes: int, on_start: Callable[[], None], on_end: Callable[[], None]) -> Outcome:
    """Runs a load from `processes` processes.

    Args:
        load: all of it; streams and requests are divided.
        processes: how many client processes; 1 is enough for about 100k tokens/s.
        on_start: called when every connection is open and warm-up is over.
        on_end: called when the last answer is there.

    Raises:
        RuntimeError: the server cannot be reached or answers no request of the warm-up.
    """
    context = multiprocessing.get_context("spawn")
    parts = []
    for part in _split(load, processes):
        ours, theirs = context.Pipe()
        process = context.Process(target=_client, args=(part, theirs), daemon=True)
        process.start()
        theirs.close()
        parts.append((process, ours))
    try:
        for _, pipe in parts:
            _check_warmup(_receive(pipe, _READY_WITHIN_S))
        on_start()
        for _, pipe in parts:
            pipe.send("go")
        total = Outcome()
        for _, pipe in parts:
            total.merge(_receive(pipe, None))
        on_end()
        return total
    finally:
        for process, _ in parts:
            process.join(5)
            if process.is_alive():
                process.kill()


def _split(load: Load, processes: int) -> list[Load]:
    count = min(processes, load.streams)
    return [
        replace(
            load,
            streams=load.streams // count + (index < load.streams % count),
            requests=load.requests // count + (index < load.requests % count),
            warmup=-(-load.warmup // count),
            seed=load.seed + index,
        )
        for index in range(count)
    ]


def _receive(pipe: Connection, within_s: float | None) -> Outcome:
    if not pipe.poll(within_s):
        raise RuntimeError("a client process was not ready in time")
    try:
        received: Outcome | str = pipe.recv()
    except EOFError as error:
        raise RuntimeError("a client process ended early") from error
    if isinstance(received, str):
        raise RuntimeError(received)
    return received


def _check_warmup(outcome: Outcome) -> None:
    if outcome.errors and not outcome.answers:
        raise RuntimeError(f"warm-up failed: {next(iter(outcome.errors))}")


def _client(load: Load, pipe: Connection) -> None:
    try:
        uvloop.run(_measure(load, pipe))
    except OSError as error:
        pipe.send(f"{load.host}:{load.port}: {error.strerror or error}")


async def _measure(load: Load, pipe: Connection) -> None:
    warmup, requests = build_requests(load, load.warmup, "warm-up"), build_requests(load, load.requests, "measured")
    client = Client(load)
    await client.connect()
    warm = await client.run(warmup)
    pipe.send(warm)
    await asyncio.get_running_loop().run_in_executor(None, pipe.recv)
    pipe.send(await client.run(requests))
    client.close()

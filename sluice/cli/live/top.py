"""`sluice top`: shows the suite in a terminal, updated every second."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager, suppress
from typing import Any

from rich.console import Console
from rich.live import Live

from sluice.cli.live.client import NotReached, Running, reached
from sluice.cli.live.endpoint import Endpoint
from sluice.cli.live.render import frame, summary

RETRY_S = 2.0
REQUESTS = 40
SAMPLES = 120


class Picture:
    """Holds the current state: a full state with all deltas since."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}
        self.problem = "connecting"

    def take(self, kind: str, delta: dict[str, Any]) -> None:
        """Applies the next event of the stream."""
        self.problem = ""
        if kind == "whole":
            self.state = delta
            return
        workers = {row["id"]: row for row in (*self.state["workers"], *delta.get("workers", ()))}
        for removed in delta.get("left", ()):
            workers.pop(removed, None)
        requests = [*self.state["requests"], *delta.get("requests", ())][-REQUESTS:]
        history = {name: [*values, delta["rates"][name]][-SAMPLES:] for name, values in self.state["history"].items()}
        self.state |= {**delta, "workers": list(workers.values()), "requests": requests, "history": history}


def run(endpoint: Endpoint, once: bool, as_json: bool, console: Console) -> int:
    """Shows the suite until Ctrl-C or until the output is closed; returns exit code 0.

    Args:
        once: print one snapshot and return; raises NotReached if that fails.
        as_json: print one line of JSON per second instead of a screen.
    """
    with suppress(KeyboardInterrupt), _closed_pipe_ends():
        if once:
            asyncio.run(_once(endpoint, as_json, console))
        elif as_json or not console.is_terminal:
            asyncio.run(_lines(endpoint, as_json))
        else:
            asyncio.run(_screen(endpoint, console))
    return 0


@contextmanager
def _closed_pipe_ends() -> Iterator[None]:
    """Ignores a closed pipe, such as `| head`, without an error at interpreter exit."""
    try:
        yield
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


async def _once(endpoint: Endpoint, as_json: bool, console: Console) -> None:
    async with reached(endpoint) as running:
        state = await running.state()
    if as_json:
        print(json.dumps(state))
    else:
        console.print(frame(state, "", console.size.width, max(console.size.height, 60)))


async def _lines(endpoint: Endpoint, as_json: bool) -> None:
    async with reached(endpoint) as running, aclosing(_follow(running)) as pictures:
        async for picture in pictures:
            if as_json:
                line = json.dumps({"problem": picture.problem} if picture.problem else picture.state)
            else:
                line = picture.problem or summary(picture.state)
            print(line, flush=True)


async def _screen(endpoint: Endpoint, console: Console) -> None:
    async with reached(endpoint) as running, aclosing(_follow(running)) as pictures:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            async for picture in pictures:
                width, height = console.size
                live.update(frame(picture.state, picture.problem, width, height), refresh=True)


async def _follow(running: Running) -> AsyncGenerator[Picture, None]:
    """Yields the state after every event; reconnects after an interruption."""
    picture = Picture()
    while True:
        try:
            async with aclosing(running.deltas()) as deltas:
                async for kind, delta in deltas:
                    picture.take(kind, delta)
                    yield picture
            picture.problem = "The gateway ended the stream."
        except NotReached as error:
            picture.problem = str(error)
        yield picture
        await asyncio.sleep(RETRY_S)

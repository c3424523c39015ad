"""`sluice top`: the suite in a terminal, once a second."""

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

AGAIN_S = 2.0
REQUESTS = 40
SAMPLES = 120


class Picture:
    """What is known now: a whole state, and the deltas since."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}
        self.problem = "connecting"

    def take(self, kind: str, news: dict[str, Any]) -> None:
        """The next event of the stream."""
        self.problem = ""
        if kind == "whole":
            self.state = news
            return
        workers = {row["id"]: row for row in (*self.state["workers"], *news.get("workers", ()))}
        for gone in news.get("left", ()):
            workers.pop(gone, None)
        requests = [*self.state["requests"], *news.get("requests", ())][-REQUESTS:]
        history = {name: [*values, news["rates"][name]][-SAMPLES:] for name, values in self.state["history"].items()}
        self.state |= {**news, "workers": list(workers.values()), "requests": requests, "history": history}


def run(place: Endpoint, once: bool, as_json: bool, console: Console) -> int:
    """Shows until Ctrl-C, or until nobody reads any more; the exit code is 0.

    Args:
        once: one look, then it ends; NotReached when that fails.
        as_json: a line of JSON a second instead of a picture.
    """
    with suppress(KeyboardInterrupt), _read_no_more():
        if once:
            asyncio.run(_once(place, as_json, console))
        elif as_json or not console.is_terminal:
            asyncio.run(_lines(place, as_json))
        else:
            asyncio.run(_screen(place, console))
    return 0


@contextmanager
def _read_no_more() -> Iterator[None]:
    """The end of a pipe such as `| head`: no error, and nothing that Python could complain of when it ends."""
    try:
        yield
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


async def _once(place: Endpoint, as_json: bool, console: Console) -> None:
    async with reached(place) as running:
        state = await running.state()
    if as_json:
        print(json.dumps(state))
    else:
        console.print(frame(state, "", console.size.width, max(console.size.height, 60)))


async def _lines(place: Endpoint, as_json: bool) -> None:
    async with reached(place) as running, aclosing(_follow(running)) as pictures:
        async for picture in pictures:
            if as_json:
                line = json.dumps({"problem": picture.problem} if picture.problem else picture.state)
            else:
                line = picture.problem or summary(picture.state)
            print(line, flush=True)


async def _screen(place: Endpoint, console: Console) -> None:
    async with reached(place) as running, aclosing(_follow(running)) as pictures:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            async for picture in pictures:
                width, height = console.size
                live.update(frame(picture.state, picture.problem, width, height), refresh=True)


async def _follow(running: Running) -> AsyncGenerator[Picture, None]:
    """What is known, after every event; goes on after the gateway was away."""
    picture = Picture()
    while True:
        try:
            async with aclosing(running.deltas()) as deltas:
                async for kind, news in deltas:
                    picture.take(kind, news)
                    yield picture
            picture.problem = "The gateway ended the stream."
        except NotReached as error:
            picture.problem = str(error)
        yield picture
        await asyncio.sleep(AGAIN_S)

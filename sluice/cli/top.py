"""`sluice top`: the suite in a terminal, once a second."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

from rich.console import Console
from rich.live import Live

from sluice.cli.frame import frame, summary
from sluice.cli.running import NotReached, Place, Running, reached

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


def run(place: Place, once: bool, as_json: bool, console: Console) -> int:
    """Shows until Ctrl-C; the exit code is 0.

    Args:
        once: one look, then it ends; NotReached when that fails.
        as_json: a line of JSON a second instead of a picture.
    """
    with suppress(KeyboardInterrupt):
        if once:
            asyncio.run(_once(place, as_json, console))
        elif as_json or not console.is_terminal:
            asyncio.run(_lines(place, as_json, console))
        else:
            asyncio.run(_screen(place, console))
    return 0


async def _once(place: Place, as_json: bool, console: Console) -> None:
    async with reached(place) as running:
        state = await running.state()
    if as_json:
        print(json.dumps(state))
    else:
        console.print(frame(state, "", console.size.width, max(console.size.height, 60)))


async def _lines(place: Place, as_json: bool, console: Console) -> None:
    async with reached(place) as running:
        async for picture in _follow(running):
            if as_json:
                print(json.dumps({"problem": picture.problem} if picture.problem else picture.state), flush=True)
            else:
                console.print(picture.problem or summary(picture.state))


async def _screen(place: Place, console: Console) -> None:
    async with reached(place) as running:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            async for picture in _follow(running):
                width, height = console.size
                live.update(frame(picture.state, picture.problem, width, height), refresh=True)


async def _follow(running: Running) -> AsyncIterator[Picture]:
    """What is known, after every event; goes on after the gateway was away."""
    picture = Picture()
    while True:
        try:
            async for kind, news in running.deltas():
                picture.take(kind, news)
                yield picture
            picture.problem = "The gateway ended the stream."
        except NotReached as error:
            picture.problem = str(error)
        yield picture
        await asyncio.sleep(AGAIN_S)

"""Chromium for tests of the live view, and load for it to show."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

import httpx
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, Request, sync_playwright

SYSTEMS = ("You are a careful engineer. " * 20, "Rivers of the world, and how they run to the sea. " * 30, "Be brief.")


def chromium() -> str:
    """The browser to drive; fails when there is none, because skipping would hide every test of the page."""
    found = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if found is None:
        raise AssertionError("No chromium on PATH: install one (apt-get install chromium), or name it in CHROMIUM.")
    return found


@contextmanager
def browser() -> Iterator[Browser]:
    """A headless Chromium."""
    with sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        try:
            yield opened
        finally:
            opened.close()


@dataclass
class ObservedStream:
    """What a page complained about, and whom it asked."""

    errors: list[str] = field(default_factory=list)
    hosts: set[str] = field(default_factory=set)


def listen(context: BrowserContext) -> ObservedStream:
    """Takes note of all that the pages of a context say and ask from now on."""
    heard = ObservedStream()

    def console(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            heard.errors.append(message.text)

    def request(asked: Request) -> None:
        heard.hosts.add(urlsplit(asked.url).netloc)

    def opened(page: Page) -> None:
        page.on("console", console)
        page.on("pageerror", lambda error: heard.errors.append(str(error)))

    context.on("page", opened)
    context.on("request", request)
    return heard


class Load:
    """Clients that chat, as long as it is open."""

    def __init__(self, url: str, model: str, clients: int = 4, max_tokens: int = 60) -> None:
        self._url = url
        self._model = model
        self._max_tokens = max_tokens
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._chat, args=(number,)) for number in range(clients)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def _chat(self, number: int) -> None:
        turn = number
        with httpx.Client(base_url=self._url, timeout=60) as client:
            while not self._stop.is_set():
                turn += 1
                messages = [
                    {"role": "system", "content": SYSTEMS[turn % len(SYSTEMS)]},
                    {"role": "user", "content": f"Tell me about number {turn % 50}"},
                ]
                body = {"model": self._model, "messages": messages, "max_tokens": self._max_tokens}
                try:
                    client.post("/v1/chat/completions", json=body)
                except httpx.TransportError:
                    self._stop.wait(0.2)

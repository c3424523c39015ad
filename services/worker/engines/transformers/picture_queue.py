"""Bounds the pictures that are encoded ahead of the requests that run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class PictureQueue:
    """Encodes the pictures of one request after the other, in a thread of its own.

    Pictures are large, so only few requests hold encoded ones while they wait; the others wait for their turn with
    their files only.

    Args:
        most: Maximum number of requests with encoded pictures that do not run yet.
    """

    def __init__(self, most: int) -> None:
        self._free = asyncio.Semaphore(most)
        self._held: set[str] = set()
        self._thread = ThreadPoolExecutor(1, "transformers-pictures")

    async def encode(self, key: str, wanted: Callable[[], bool], work: Callable[[], T]) -> T | None:
        """Waits for the request's turn and runs `work`; its result counts until `release`.

        Args:
            key: Unique key of the request.
            wanted: Whether the request is still in flight; if not, its work is skipped, with None as result.

        Raises:
            SluiceError: As raised by `work`.
        """
        await self._free.acquire()
        if not wanted():
            self._free.release()
            return None
        self._held.add(key)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except BaseException:
            self.release(key)
            raise

    def release(self, key: str) -> None:
        """Makes room for the next request; ignores a request that holds none."""
        if key in self._held:
            self._held.remove(key)
            self._free.release()

    def close(self) -> None:
        """Skips queued work without waiting for running work."""
        self._thread.shutdown(wait=False, cancel_futures=True)

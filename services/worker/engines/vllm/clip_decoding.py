"""Reads audio and videos with vLLM's loaders in processes with limits: a file that ends one ends no other request."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import sys
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from services.common.base.errors import invalid, overloaded
from services.common.child_rpc.child import ChildLimits
from services.common.child_rpc.fork_server import ForkServer
from services.common.child_rpc.pool import ForkLane, ForkPool
from services.common.child_rpc.process import background_loop, bare_environment, engine_command
from services.common.types.media.spans import MediaKind
from services.worker.engines.vllm.clip_child import DECODED, EXHAUSTED, FAILED, HEADER, REFUSED, REQUEST
from services.worker.engines.vllm.media_files import DecodedBudget

log = logging.getLogger(__name__)

CHILD = "services.worker.engines.vllm.clip_child"
START_S = 120.0
LIMIT_S = 60.0
"""Maximum time of a file; of a long video, OpenCV decodes all frames up to the last one that is chosen."""
ALARM_S = 2.0
FILES = 64
NICENESS = 5
"""Added to that of the worker: the engine goes first while all processors are busy."""
PROCESSES = max(2, min(8, os.cpu_count() or 1))
COPIES = 4
"""How many times a file's decoded bytes are held by its process at most."""
SPARE_MB = 2048
"""Address space beside these copies: of the threads of decoders, most of all."""
_NO_SECRETS = ("KEY", "TOKEN", "SECRET", "PASSWORD")
_KEPT = ("HOME", "PATH", "LD_LIBRARY_PATH", "TMPDIR")

T = TypeVar("T")


class Unreadable(Exception):
    """A file that vLLM's loader cannot read, with the reason."""


class ClipDecoder:
    """The processes; they are served by a thread of their own, because decoded videos are large.

    Args:
        options: of vLLM's loader of each kind.
    """

    def __init__(self, options: Mapping[MediaKind, Mapping[str, Any]]) -> None:
        self._pool = _processes(options)
        self._loop = background_loop()

    async def start(self) -> None:
        """Starts the import of vLLM's loaders, so that the first file does not wait for it."""
        try:
            await self._run(self._pool.server.start())
        except OSError as error:
            log.warning("the process for audio and videos cannot be started: %s", error)

    async def decode(self, kind: MediaKind, data: bytes, budget: DecodedBudget) -> tuple[Any, Any]:
        """Returns a file's array, and the sampling rate of audio or the metadata of a video.

        Raises:
            Unreadable: vLLM's loader cannot read it.
            SluiceError: INVALID_ARGUMENT for one over the budget; OVERLOADED; INTERNAL if no process starts.
        """
        decoded = await self._run(self._decode(REQUEST.pack(kind.value, budget.most, budget.left) + data))
        if decoded.status == REFUSED:
            raise invalid(str(decoded.facts), param="media")
        if decoded.array is None:
            raise Unreadable(str(decoded.facts))
        budget.take(decoded.array.nbytes)
        return decoded.array, decoded.facts

    async def _decode(self, request: bytes) -> Decoded:
        future, give_up = self._pool.submit(request)
        try:
            async with asyncio.timeout(START_S + 2 * LIMIT_S):
                return await future
        except TimeoutError:
            raise overloaded("Too many audio files and videos are waiting to be decoded; retry shortly.") from None
        finally:
            give_up()

    async def close(self) -> None:
        """Ends the processes."""
        await self._run(self._pool.close())

    async def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))


def _processes(options: Mapping[MediaKind, Mapping[str, Any]]) -> ForkPool[Decoded]:
    most = DecodedBudget.full().most
    text = json.dumps({kind.value: given for kind, given in options.items()})
    memory_mb = 0 if most == sys.maxsize else SPARE_MB + COPIES * (most >> 20)
    limits = ChildLimits(LIMIT_S, memory_mb, alarm_s=LIMIT_S + ALARM_S, files=FILES, niceness=NICENESS, silent=True)
    server = ForkServer(
        lambda control: engine_command("", CHILD, control, text, limits),
        sys.maxsize if most == sys.maxsize else most + (1 << 20),
        START_S,
        environment=_environment(),
    )
    pool = ForkPool[Decoded](server, limits, "audio and videos")
    pool.lanes += [_ClipLane(pool) for _ in range(PROCESSES)]
    return pool


@dataclass(frozen=True)
class Decoded:
    """The result for one file.

    Attributes:
        facts: what vLLM's loader returns beside the array, or the reason without one.
    """

    status: bytes
    facts: Any
    array: Any = None


class _ClipLane(ForkLane[Decoded]):
    """The files of one process."""

    def read(self, reply: bytes) -> Decoded:
        return read_reply(reply)

    def failed(self, timed_out: bool) -> Decoded:
        return Decoded(FAILED, "it takes too long to decode" if timed_out else "it ended the process that decoded it")

    def is_last(self, reply: bytes) -> bool:
        return reply.startswith(EXHAUSTED)


def read_reply(reply: bytes) -> Decoded:
    """Returns the result of a reply; a process that was taken over by a file may send anything."""
    try:
        return _valid(reply)
    except (ValueError, KeyError, TypeError):
        return Decoded(FAILED, "its process sent an invalid reply")


def _valid(reply: bytes) -> Decoded:
    """Returns the result of a reply; raises ValueError, KeyError or TypeError unless it is valid."""
    status, start = reply[:1], 1 + HEADER.size
    (length,) = HEADER.unpack(reply[1:start].ljust(HEADER.size, b"\0"))
    header, data = json.loads(reply[start : start + length]), memoryview(reply)[start + length :]
    if status != DECODED:
        return Decoded(status, str(header)[:300])
    dtype, shape = np.dtype(str(header["type"])), tuple(int(size) for size in header["shape"])
    if dtype.kind not in "fiu" or min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError("the array does not have the size that its header declares")
    return Decoded(status, header["facts"], np.frombuffer(data, dtype).reshape(shape).copy())


def _environment() -> dict[str, str]:
    """Returns an environment with vLLM's variables that are not secret; quiet, since strangers choose the files."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in _KEPT or (name.startswith("VLLM_") and not any(word in name for word in _NO_SECRETS))
    }
    return {
        "VLLM_LOGGING_LEVEL": "ERROR",
        **kept,
        **bare_environment(),
        "OPENBLAS_NUM_THREADS": "1",  # threads do not survive a fork
    }

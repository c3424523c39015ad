"""Checks media files in processes with limits; files with known content are not checked again."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import astuple, dataclass
from time import perf_counter

import orjson

from services.common.base.errors import invalid, overloaded
from services.common.child_rpc.child import ChildLimits
from services.common.child_rpc.fork_server import ForkServer
from services.common.child_rpc.pool import ForkLane, ForkPool
from services.common.child_rpc.process import bare_environment, module_command
from services.common.types.media.facts import UNKNOWN_FORMAT, MediaFacts, formats_of, read_facts
from services.common.types.media.spans import MediaKind, content_hash
from services.preprocess.media.child import ENDS, IMAGES
from services.preprocess.media.limits import CheckLimits

START_S = 30.0
ALARM_S = 2.0
NICENESS = 5
"""Added to that of the service: text goes first while all processors are busy."""
FILES = 16
MAX_REPLY_BYTES = 4096
"""Bytes of a reply of the process that decodes files; a process that sends a longer one is replaced."""
MAX_KNOWN = 16_384
"""Checked files whose properties are remembered; the oldest is forgotten."""


@dataclass(frozen=True, slots=True)
class MediaVerdict:
    """The result for one file.

    Attributes:
        facts: None if the file is refused.
        reason: completes "The image …", or the sentence of another kind, if it is.
        fault: whether the process failed, rather than the file; such a verdict is not kept.
        peak_kb: peak memory of the process, KiB; 0 if unknown.
    """

    facts: MediaFacts | None
    reason: str = ""
    fault: bool = False
    peak_kb: int = 0


@dataclass(slots=True)
class _Check:
    """A file that is being checked, for all requests that wait for it."""

    future: asyncio.Future[MediaVerdict]
    give_up: Callable[[], None]
    waiters: int = 0


@dataclass(slots=True)
class CheckCounts:
    """Counts since the start: files checked, files whose content was known, and seconds of checking."""

    checked: int = 0
    known: int = 0
    seconds: float = 0.0


class MediaChecker:
    """The processes, started on first use and replaced when they fail; belongs to one event loop.

    Args:
        group: IMAGES, or CLIPS for audio and videos.
    """

    def __init__(self, limits: CheckLimits | None = None, group: str = IMAGES) -> None:
        self.limits = limits = limits or CheckLimits()
        bounds = astuple(limits.images if group == IMAGES else limits.clips)
        alarm_s = limits.limit_s + ALARM_S
        child = ChildLimits(limits.limit_s, limits.memory_mb, True, alarm_s, files=FILES, niceness=NICENESS)
        server = ForkServer(
            lambda control: module_command("services.preprocess.media.child", group, control, child, *bounds),
            MAX_REPLY_BYTES,
            START_S,
            quiet=True,
            environment=bare_environment() | {"OPENBLAS_NUM_THREADS": "1"},  # threads do not survive a fork
        )
        self._checks = ForkPool[MediaVerdict](server, child, "media files")
        self._checks.lanes += [_CheckLane(self._checks) for _ in range(limits.processes)]
        self._known: OrderedDict[bytes, MediaVerdict] = OrderedDict()
        self._running: dict[bytes, _Check] = {}
        self.counts = CheckCounts()

    async def check(self, data: bytes, part: str, digest: bytes = b"", kind: MediaKind = MediaKind.IMAGE) -> MediaFacts:
        """Returns the facts of a file.

        Args:
            part: its content part, for errors.
            kind: of the part.
            digest: its `content_hash` if known.

        Raises:
            SluiceError: INVALID_ARGUMENT for a file that is refused; OVERLOADED; INTERNAL if no process starts.
        """
        verdict = await self.verdict(data, digest or content_hash(data))
        facts = verdict.facts
        if facts is None or facts.kind is not kind:
            reason = verdict.reason if facts is None else f"is a file of the kind {facts.kind.capability}"
            if reason == UNKNOWN_FORMAT:
                reason += f" {formats_of(kind)}"
            raise invalid(f"The {kind.capability} of {part} {reason}.", param=part, code="invalid_media")
        return facts

    async def verdict(self, data: bytes, digest: bytes) -> MediaVerdict:
        """Returns the result for one file; raises SluiceError as `check` unless the file is at fault."""
        known = self._known.get(digest)
        if known is not None:
            self._known.move_to_end(digest)
            self.counts.known += 1
            return known
        check = self._running.get(digest)
        if check is None:
            if len(self._running) >= self.limits.waiting:
                raise overloaded("Too many media files are waiting to be checked; retry shortly.")
            check = self._running[digest] = self._begin(data, digest)
        check.waiters += 1
        try:
            async with asyncio.timeout(START_S + 2 * self.limits.limit_s):
                return await asyncio.shield(check.future)
        except TimeoutError:
            raise overloaded("Too many media files are waiting to be checked; retry shortly.") from None
        finally:
            check.waiters -= 1
            if not check.waiters and not check.future.done():
                del self._running[digest]
                check.give_up()

    def _begin(self, data: bytes, digest: bytes) -> _Check:
        started = perf_counter()
        future, give_up = self._checks.submit(data)
        future.add_done_callback(lambda done: self._on_done(digest, done, started))
        return _Check(future, give_up)

    def _on_done(self, digest: bytes, done: asyncio.Future[MediaVerdict], started: float) -> None:
        if done.cancelled():
            return
        del self._running[digest]
        self.counts.checked += 1
        self.counts.seconds += perf_counter() - started
        if done.exception() is not None or done.result().fault:
            return
        self._known[digest] = done.result()
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    async def close(self) -> None:
        """Ends the processes."""
        await self._checks.close()


class _CheckLane(ForkLane[MediaVerdict]):
    """The checks of one process."""

    def read(self, reply: bytes) -> MediaVerdict:
        """Returns the verdict of a reply; a process compromised by a file may send anything."""
        if self.is_last(reply):
            return self.failed(timed_out=False)
        form = orjson.loads(reply)
        if "error" in form:
            return MediaVerdict(None, str(form["error"])[:200])
        return MediaVerdict(read_facts(form["facts"]), peak_kb=int(form["peak_kb"]))

    def failed(self, timed_out: bool) -> MediaVerdict:
        reason = "takes too long to decode" if timed_out else "requires too much memory to decode, or cannot be decoded"
        return MediaVerdict(None, reason, fault=True)

    def is_last(self, reply: bytes) -> bool:
        return reply.startswith(ENDS)

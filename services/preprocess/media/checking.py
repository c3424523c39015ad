"""Checks media files in processes with limits; files with known content are not checked again."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import astuple, dataclass
from time import perf_counter

import orjson

from services.common.child_rpc.call_queue import Call, CallQueue
from services.common.child_rpc.fork_server import ForkServer
from services.common.child_rpc.process import bare_environment, module_command
from services.common.errors import ErrorKind, SluiceError, invalid, overloaded
from services.common.media.facts import UNKNOWN_FORMAT, MediaFacts, formats_of, read_facts
from services.common.media.spans import MediaKind, content_hash
from services.common.tasks import TaskOwner
from services.preprocess.media.child import ENDS, IMAGES
from services.preprocess.media.limits import CheckLimits

START_S = 30.0
WINDOW = 2
MAX_REPLY_BYTES = 4096
MOST_KNOWN = 16_384


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
        self.server = ForkServer(
            lambda control: module_command(
                "services.preprocess.media.child", group, control, limits.limit_s, limits.memory_mb, *bounds
            ),
            MAX_REPLY_BYTES,
            START_S,
            quiet=True,
            environment=bare_environment() | {"OPENBLAS_NUM_THREADS": "1"},  # threads do not survive a fork
        )
        self.tasks = TaskOwner()
        self._lanes = [_CheckLane(self) for _ in range(limits.processes)]
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
        future: asyncio.Future[MediaVerdict] = asyncio.get_running_loop().create_future()
        started = perf_counter()
        future.add_done_callback(lambda done: self._on_done(digest, done, started))
        call, lane = Call(data, future), min(self._lanes, key=lambda lane: lane.outstanding)
        lane.add(call)
        return _Check(future, lambda: lane.remove(call))

    def _on_done(self, digest: bytes, done: asyncio.Future[MediaVerdict], started: float) -> None:
        if done.cancelled():
            return
        del self._running[digest]
        self.counts.checked += 1
        self.counts.seconds += perf_counter() - started
        if done.exception() is not None or done.result().fault:
            return
        self._known[digest] = done.result()
        if len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)

    async def close(self) -> None:
        """Ends the processes."""
        await self.tasks.close()
        for lane in self._lanes:
            lane.close()
        await self.server.close()


class _CheckLane(CallQueue[MediaVerdict]):
    """The files of one process."""

    def __init__(self, home: MediaChecker) -> None:
        super().__init__(home.limits.limit_s, WINDOW)
        self._home = home
        self._opening: asyncio.Task[None] | None = None

    def add(self, call: Call[MediaVerdict]) -> None:
        self.waiting.append(call)
        self.send_ready()

    def remove(self, call: Call[MediaVerdict]) -> None:
        """Removes a file for which no request waits any more, unless a process has it already."""
        call.future.cancel()
        with suppress(ValueError):
            self.waiting.remove(call)

    def on_no_child(self) -> None:
        if self._opening is None:
            self._opening = self._home.tasks.spawn(self._open(), "media process")

    async def _open(self) -> None:
        try:
            child, _ = await self._home.server.fork()
            assert child is not None, "this service's greeting is never an error"
        except (OSError, EOFError, ValueError):
            await self._home.server.close()
            while self.waiting:
                self.waiting.popleft().resolve(
                    SluiceError(ErrorKind.INTERNAL, "No process for media files could be started; see the log.")
                )
            return
        finally:
            self._opening = None
        self.use(child)

    def on_reply(self, call: Call[MediaVerdict], reply: bytes) -> None:
        if reply.startswith(ENDS):
            call.resolve(_exhausted())
            self.drop()
        else:
            call.resolve(_read_reply(reply))

    def on_failure(self, timed_out: bool) -> None:
        """Refuses the file that was being checked, but tries it again once if others may have used up the memory."""
        head = self.take_head()
        tainted = self.replies > 0
        self.drop()
        if head is not None and not timed_out and tainted and not head.attempts:
            head.attempts += 1
            self.waiting.appendleft(head)
        elif head is not None:
            head.resolve(MediaVerdict(None, "takes too long to decode", fault=True) if timed_out else _exhausted())

    def close(self) -> None:
        self.drop()
        while self.waiting:
            self.waiting.popleft().resolve(SluiceError(ErrorKind.UNAVAILABLE, "The service is stopping."))


def _exhausted() -> MediaVerdict:
    return MediaVerdict(None, "requires too much memory to decode, or cannot be decoded", fault=True)


def _read_reply(reply: bytes) -> MediaVerdict:
    """Returns the verdict of a reply; a process compromised by a file may send anything."""
    try:
        form = orjson.loads(reply)
        if "error" in form:
            return MediaVerdict(None, str(form["error"])[:200])
        return MediaVerdict(read_facts(form["facts"]), peak_kb=int(form["peak_kb"]))
    except (ValueError, KeyError, TypeError):
        return _exhausted()

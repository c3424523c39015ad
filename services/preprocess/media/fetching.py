"""Fetches media files from hosts on an allow-list."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from math import inf
from time import monotonic
from urllib.parse import urljoin

from services.common.base.errors import ErrorKind, SluiceError, invalid, overloaded
from services.common.base.tasks import TaskOwner
from services.common.types.media.parts import MAX_URL, media_too_large
from services.preprocess.media.addresses import AllowedHosts
from services.preprocess.media.https_get import FetchFailed, FileOverLimit, HttpsGet, UrlRefused, read_target

HOSTS_SETTING = "--media-hosts"
FETCH_REFUSED, FETCH_FAILED, FETCH_TOO_LARGE = "media_fetch_refused", "media_fetch_failed", "media_too_large"
OVERLOADED = "overloaded"


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """Bounds on fetching.

    Attributes:
        max_bytes: most bytes of a file.
        total_s: maximum seconds of one file, with its redirects and its wait for others.
        at_once: files fetched at the same time.
        waiting: files that wait for those.
        redirects: redirects followed for one file.
    """

    max_bytes: int = 20 << 20
    total_s: float = 8.0
    at_once: int = 16
    waiting: int = 256
    redirects: int = 3


@dataclass(frozen=True, slots=True)
class _Failure:
    """Why a file is not fetched: the code of the error, empty if the service is at fault, and the reason."""

    code: str
    reason: str = ""


@dataclass(slots=True)
class _Flight:
    """A file that is being fetched, for all requests that wait for it."""

    task: asyncio.Task[bytes | _Failure]
    waiters: int = 0


@dataclass(slots=True)
class FetchCounts:
    """Counts since the start.

    Attributes:
        bytes: of files that were fetched.
        results: number of files by result: "fetched", the code of the error, or "overloaded".
    """

    bytes: int = 0
    results: dict[str, int] = field(default_factory=dict)

    def add(self, result: str) -> None:
        """Counts one file."""
        self.results[result] = self.results.get(result, 0) + 1


class MediaFetcher:
    """Fetches files; concurrent requests for one URL share one fetch, and nothing is kept afterwards.

    Args:
        hosts: the allow-list; empty: nothing is fetched.
        get: sends the requests.
    """

    def __init__(self, hosts: AllowedHosts, get: HttpsGet, limits: FetchLimits) -> None:
        self._hosts = hosts
        self._get = get
        self._limits = limits
        self._flights: dict[str, _Flight] = {}
        self._slots = asyncio.Semaphore(limits.at_once)
        self._tasks = TaskOwner()
        self.counts = FetchCounts()

    async def fetch(self, url: str, part: str) -> bytes:
        """Returns the file of a URL.

        Args:
            part: the content part with the URL, for errors.

        Raises:
            SluiceError: INVALID_ARGUMENT if it is not permitted or cannot be fetched; TOO_LARGE; OVERLOADED.
        """
        if not self._hosts:
            raise invalid(
                f"The URL of {part} is not fetched: this server fetches no media. Send a data URL, or have the host "
                f"added to the preprocess setting {HOSTS_SETTING}.",
                param=part,
                code=FETCH_REFUSED,
            )
        flight = self._flights.get(url)
        if flight is None:
            if len(self._flights) >= self._limits.at_once + self._limits.waiting:
                raise _too_many()
            flight = _Flight(self._tasks.spawn(self._count(url), "fetch media"))
            self._flights[url] = flight
            flight.task.add_done_callback(lambda task: self._forget(url, task))
        flight.waiters += 1
        try:
            result = await asyncio.shield(flight.task)
        finally:
            flight.waiters -= 1
            if not flight.waiters and not flight.task.done():
                self._flights.pop(url, None)
                flight.task.cancel()
        if isinstance(result, bytes):
            return result
        raise self._error(result, part)

    def _forget(self, url: str, task: asyncio.Task[bytes | _Failure]) -> None:
        """Removes a fetch that has ended, unless another of the same URL has taken its place."""
        flight = self._flights.get(url)
        if flight is not None and flight.task is task:
            del self._flights[url]

    def _error(self, failure: _Failure, part: str) -> SluiceError:
        if not failure.code:
            return _too_many()
        if failure.code == FETCH_TOO_LARGE:
            return media_too_large(part, self._limits.max_bytes)
        return SluiceError(
            ErrorKind.INVALID_ARGUMENT,
            f"The file of {part} is not fetched: its URL {failure.reason}.",
            param=part,
            code=failure.code,
        )

    async def _count(self, url: str) -> bytes | _Failure:
        result = await self._bounded(url)
        if isinstance(result, bytes):
            self.counts.bytes += len(result)
        self.counts.add("fetched" if isinstance(result, bytes) else result.code or OVERLOADED)
        return result

    async def _bounded(self, url: str) -> bytes | _Failure:
        queued_at = monotonic()
        begun_at = inf
        try:
            async with asyncio.timeout(self._limits.total_s), self._slots:
                begun_at = monotonic()
                return await self._follow(url)
        except TimeoutError:
            # Not the fault of the URL if most of the time passed before, in the wait for others.
            is_slow = monotonic() - begun_at > begun_at - queued_at
            return _Failure(FETCH_FAILED, "is not answered in time") if is_slow else _Failure("")
        except UrlRefused as error:
            return _Failure(FETCH_REFUSED, str(error))
        except FetchFailed as error:
            return _Failure(FETCH_FAILED, str(error))
        except FileOverLimit:
            return _Failure(FETCH_TOO_LARGE)

    async def _follow(self, url: str) -> bytes:
        for _ in range(self._limits.redirects + 1):
            target = read_target(url)
            if not self._hosts.permits(target.host, target.port):
                raise UrlRefused(f"leads to a host that the preprocess setting {HOSTS_SETTING} does not list")
            answer = await self._get.get(target)
            if not answer.location:
                return answer.data
            url = _joined(url, answer.location)
            if len(url) > MAX_URL:
                raise UrlRefused("is redirected to a URL that is too long")
        raise UrlRefused(f"is redirected more than {self._limits.redirects} times")

    async def close(self) -> None:
        """Ends all fetches."""
        await self._tasks.close()


def _joined(url: str, location: str) -> str:
    try:
        return urljoin(url, location)
    except ValueError:
        raise UrlRefused("is redirected to what is not a valid URL") from None


def _too_many() -> SluiceError:
    return overloaded("Too many media files are being fetched; retry shortly.")

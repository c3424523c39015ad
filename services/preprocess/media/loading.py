"""Loads the media items of a request: fetches them, checks them and names them by their content."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from services.common.base.errors import SluiceError, invalid, overloaded
from services.common.types.media.parts import MediaInput, MediaLimits, media_too_large, media_total_too_large
from services.common.types.media.spans import MediaFile, MediaKind, content_hash
from services.preprocess.contract.tokenizer import TokenizerProtocol, kinds_of
from services.preprocess.media.checking import MediaChecker
from services.preprocess.media.expansion import CountedItem
from services.preprocess.media.fetching import MediaFetcher

MAX_FETCHED_BYTES = 512 << 20
"""Bytes of fetched files of all requests that are being loaded; a request beyond it is refused as OVERLOADED."""
_INLINE_BYTES = 256 << 10
_ALIASES = {
    "image/jpg": "image/jpeg",
    "image/x-png": "image/png",
    "image/x-ms-bmp": "image/bmp",
    "audio/wave": "audio/wav",
    "audio/x-wav": "audio/wav",
    "audio/vnd.wave": "audio/wav",
    "audio/mp3": "audio/mpeg",
    "audio/x-flac": "audio/flac",
    "video/quicktime": "video/mp4",
    "video/x-matroska": "video/webm",
}


@dataclass(frozen=True, slots=True)
class LoadedMedia:
    """The media items of a request, checked.

    Attributes:
        files: the encoded file of each item.
        fetched: files of those items that the caller has only a URL of, each once.
    """

    items: tuple[CountedItem, ...] = ()
    files: tuple[bytes, ...] = ()
    fetched: tuple[MediaFile, ...] = ()


@dataclass(slots=True)
class _Total:
    """The bytes of a request's files; files that are fetched count once, because they are returned once.

    Attributes:
        held: bytes of the fetched files.
    """

    limit: int
    size: int = 0
    held: int = 0
    fetched: set[bytes] = field(default_factory=set)

    def add(self, size: int, part: str, digest: bytes = b"") -> None:
        """Adds a file; raises SluiceError(TOO_LARGE) beyond the limit, then and for every later one."""
        if digest not in self.fetched:
            self.size += size
        if digest:
            self.fetched.add(digest)
        if self.size > self.limit:
            raise media_total_too_large(part, self.limit)


class MediaLoader:
    """Loads media items.

    Args:
        checker: checks images.
        clip_checker: checks audio and videos; None: these are refused.
        limits: bounds on one request.
        limit_s: maximum seconds of one request, with its wait for others.
        no_clips: why audio and videos are refused, as a sentence.
    """

    def __init__(
        self,
        fetcher: MediaFetcher,
        checker: MediaChecker,
        clip_checker: MediaChecker | None,
        limits: MediaLimits,
        limit_s: float = 13.0,
        no_clips: str = "",
    ) -> None:
        self.fetcher = fetcher
        self.checker = checker
        self.clip_checker = clip_checker
        self._limits = limits
        self._limit_s = limit_s
        self._no_clips = no_clips
        self._fetched_bytes = 0

    async def load(self, inputs: Sequence[MediaInput]) -> LoadedMedia:
        """Returns the items of a request.

        Raises:
            SluiceError: as MediaFetcher.fetch and MediaChecker.check, for the first item that fails; INVALID_ARGUMENT
                for too many, and for a file of another type than declared; TOO_LARGE for too many bytes; OVERLOADED.
        """
        if len(inputs) > self._limits.items:
            where = inputs[self._limits.items].part
            raise invalid(
                f"{where} is one media item too many; send at most {self._limits.items}.",
                param=where,
                code="too_many_media",
            )
        total = _Total(self._limits.total_bytes)
        loads = (self._load(given, total) for given in inputs)
        try:
            async with asyncio.timeout(self._limit_s):
                results = await asyncio.gather(*loads, return_exceptions=True)
        except TimeoutError:
            raise overloaded("Too many media files are waiting to be fetched or checked; retry shortly.") from None
        finally:
            self._fetched_bytes -= total.held
        items, files, fetched = [], [], {}
        for given, result in zip(inputs, results, strict=True):
            if isinstance(result, BaseException):
                raise result
            item, data = result
            items.append(item)
            files.append(data)
            if given.url:
                fetched[item.hash] = MediaFile(item.hash, data, item.facts.media_type)
        return LoadedMedia(tuple(items), tuple(files), tuple(fetched.values()))

    async def _load(self, given: MediaInput, total: _Total) -> tuple[CountedItem, bytes]:
        checker = self.checker if given.kind is MediaKind.IMAGE else self.clip_checker
        if checker is None:
            kind = given.kind.capability
            raise invalid(
                f"{given.part} is of the kind {kind}, which this preprocess cannot read. {self._no_clips}",
                param=given.part,
                code="media_not_supported",
            )
        total.add(len(given.data), given.part)
        data = await self.fetcher.fetch(given.url, given.part) if given.url else given.data
        if not data:
            raise invalid(f"{given.part} is empty; send the bytes of a file.", param=given.part, code="invalid_media")
        if len(data) > self._limits.item_bytes:
            raise media_too_large(given.part, self._limits.item_bytes)
        digest = content_hash(data) if len(data) <= _INLINE_BYTES else await asyncio.to_thread(content_hash, data)
        if given.url:
            self._hold(len(data), digest, total)
            total.add(len(data), given.part, digest)
        facts = await checker.check(data, given.part, digest, given.kind)
        declared = given.media_type.lower()
        if declared and _ALIASES.get(declared, declared) != facts.media_type:
            raise invalid(
                f"The {given.kind.capability} of {given.part} is declared as {given.media_type[:100]}, but is "
                f"{facts.media_type}.",
                param=given.part,
                code="invalid_media",
            )
        return CountedItem(given.part, digest, facts), data

    def _hold(self, size: int, digest: bytes, total: _Total) -> None:
        """Counts a fetched file until its request has been loaded; raises SluiceError(OVERLOADED) beyond the limit."""
        if digest in total.fetched:
            return
        if self._fetched_bytes + size > MAX_FETCHED_BYTES:
            raise overloaded("Too many bytes of fetched media files are waiting to be checked; retry shortly.")
        self._fetched_bytes += size
        total.held += size

    async def close(self) -> None:
        """Ends fetches and processes."""
        await self.fetcher.close()
        await self.checker.close()
        if self.clip_checker is not None:
            await self.clip_checker.close()


def check_kinds(inputs: Sequence[MediaInput], tokenizer: TokenizerProtocol) -> None:
    """Raises the SluiceError of `not_supported` for the first item that a model's tokenizer does not take."""
    kinds = kinds_of(tokenizer)
    for item in inputs:
        if item.kind not in kinds:
            raise not_supported(item, tokenizer)


def not_supported(item: MediaInput, tokenizer: TokenizerProtocol) -> SluiceError:
    """Returns the error of a media item that a model's tokenizer does not take."""
    reason = tokenizer.no_images if item.kind is MediaKind.IMAGE else ""
    return invalid(
        f"{item.part} is of the kind {item.kind.capability}, which the {tokenizer.facts.processor} tokenizer of this "
        f"model does not take; leave it out, or choose a model with that modality.{reason and ' '}{reason}",
        param=item.part,
        code="media_not_supported",
    )

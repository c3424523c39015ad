"""Media files that come with their request, in one message."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from services.common.rpc.media import read_files
from services.common.types.media.spans import MediaFile, MediaSpan, content_hash
from services.worker.contract.generation import MediaItem
from services.worker.media.store import missing
from services.worker.media.uploads import mismatch
from sluice.v1 import common_pb2

HASHED_INLINE = 256 << 10  # bytes hashed on the event loop; hashing more would delay other requests


async def read_inline(messages: Sequence[common_pb2.MediaFile]) -> dict[bytes, MediaFile]:
    """Returns the files of messages by content hash.

    Raises:
        SluiceError: INVALID_ARGUMENT with the code "media_mismatch" for a file with another hash.
    """
    files = {file.hash: file for file in read_files(messages)}
    if sum(len(file.data) for file in files.values()) <= HASHED_INLINE:
        _check(files)
    else:
        await asyncio.to_thread(_check, files)
    return files


def items_of(spans: Sequence[MediaSpan], files: Mapping[bytes, MediaFile]) -> tuple[MediaItem, ...]:
    """Returns the items of a prompt; raises SluiceError with the code "media_missing" if a file is absent."""
    for span in spans:
        if span.hash not in files:
            raise missing(span.hash)
    return tuple(MediaItem(span, files[span.hash]) for span in spans)


def _check(files: Mapping[bytes, MediaFile]) -> None:
    for content, file in files.items():
        if content_hash(file.data) != content:
            raise mismatch(content)

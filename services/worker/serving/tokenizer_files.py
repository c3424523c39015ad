"""Reads the files of the model's tokenizer in pieces, for services without a copy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from services.common.base.errors import unavailable
from services.common.packages import model_files as models

PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class FilePiece:
    """A piece of one file; an empty file is one empty piece."""

    file_name: str
    file_size: int
    data: bytes


class TokenizerFiles:
    """Reads tokenizer files outside the event loop, with one piece in memory at a time.

    Args:
        source: source of the model, as in its spec.
    """

    def __init__(self, source: str) -> None:
        self._source = source

    async def pieces(self) -> AsyncIterator[FilePiece]:
        """Yields the pieces of all files, one file after another, in file order.

        Raises:
            SluiceError: UNAVAILABLE when a file cannot be read.
        """
        try:
            path = await asyncio.to_thread(models.resolve, self._source)
            for file in await asyncio.to_thread(models.tokenizer_files, path):
                size = (await asyncio.to_thread(file.stat)).st_size
                for offset in range(0, max(size, 1), PIECE_BYTES):
                    yield FilePiece(models.file_name(path, file), size, await asyncio.to_thread(_read, file, offset))
        except OSError as error:
            raise unavailable(f"The worker cannot read a tokenizer file: {error.strerror}.") from error


def _read(file: Path, offset: int) -> bytes:
    with file.open("rb") as opened:
        opened.seek(offset)
        return opened.read(PIECE_BYTES)

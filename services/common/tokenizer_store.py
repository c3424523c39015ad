"""Tokenizers on disk that came over the network: each complete under its fingerprint, or not there at all."""

from __future__ import annotations

import contextlib
import fnmatch
import os
import re
import shutil
import tempfile
import time
from pathlib import Path
from typing import BinaryIO

from services.common.errors import ErrorKind, SluiceError
from services.common.models import TOKENIZER_FILES, fingerprint

MAX_BYTES = 512 << 20
MAX_FILES = 64
ABANDONED_S = 3600.0
_FINGERPRINT = re.compile(r"[0-9a-f]{64}")
_FILE_NAME = re.compile(r"(additional_chat_templates/)?[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_INCOMING = ".incoming-"


def default_folder() -> Path:
    """Where tokenizers are kept when no setting says otherwise."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    base = Path(cache) if os.access(Path(cache).parent, os.W_OK) else Path(tempfile.gettempdir())
    return base / "sluice" / "tokenizers"


class TokenizerStore:
    """A folder of tokenizers by fingerprint; several processes may share it.

    Args:
        folder: made when needed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, wanted: str) -> Path | None:
        """The files of a tokenizer; None when they are not here, or not as they came."""
        return _intact(self._folder / wanted, wanted) if _FINGERPRINT.fullmatch(wanted) else None

    def receive(self, wanted: str) -> Incoming:
        """Begins to store a tokenizer; SluiceError(INVALID_ARGUMENT) when `wanted` is no fingerprint."""
        if not _FINGERPRINT.fullmatch(wanted):
            raise _bad("it has no fingerprint to check it by")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._sweep()
            return Incoming(self._folder / wanted, Path(tempfile.mkdtemp(prefix=_INCOMING, dir=self._folder)), wanted)
        except OSError as error:
            raise SluiceError(
                ErrorKind.FAILED_PRECONDITION, f"Tokenizers cannot be kept in {self._folder}: {error.strerror}."
            ) from error

    def _sweep(self) -> None:
        """Removes what processes that ended in the middle have left."""
        for left in self._folder.glob(f"{_INCOMING}*"):
            try:
                if time.time() - left.stat().st_mtime > ABANDONED_S:
                    shutil.rmtree(left, ignore_errors=True)
            except FileNotFoundError:
                continue


class Incoming:
    """A tokenizer on its way: `add` its pieces in order, then `keep` it or `drop` it."""

    def __init__(self, place: Path, folder: Path, wanted: str) -> None:
        self._place = place
        self._folder = folder
        self._wanted = wanted
        self._file: BinaryIO | None = None
        self._name = ""
        self._missing = 0
        self._taken = 0
        self._names: set[str] = set()

    def add(self, name: str, size: int, data: bytes) -> None:
        """The next piece of a file of `size` bytes.

        Raises:
            SluiceError: INVALID_ARGUMENT for a name that is not one of a tokenizer's files, a piece out of order, or
                more than the bounds allow.
        """
        if name != self._name:
            self._open(name, size)
        if len(data) > self._missing:
            raise _bad(f"{name} is longer than announced")
        assert self._file is not None
        self._file.write(data)
        self._missing -= len(data)

    def _open(self, name: str, size: int) -> None:
        self._close()
        if not _FILE_NAME.fullmatch(name) or name in self._names or len(self._names) >= MAX_FILES:
            raise _bad("a file's name is not allowed")
        self._taken += size
        if self._taken > MAX_BYTES:
            raise _bad(f"it is larger than {MAX_BYTES >> 20} MiB")
        self._names.add(name)
        self._name, self._missing = name, size
        place = self._folder / name
        place.parent.mkdir(exist_ok=True)
        self._file = place.open("xb")

    def _close(self) -> None:
        if self._missing:
            raise _bad(f"{self._name} is shorter than announced")
        if self._file is not None:
            self._file.close()
            self._file = None

    def keep(self) -> Path:
        """Checks the content and moves it to its place in one step; SluiceError(INVALID_ARGUMENT) when it is not it."""
        self._close()
        if not self._names or fingerprint(_source(self._folder)) != self._wanted:
            raise _bad("its content does not match its fingerprint")
        try:
            os.rename(self._folder, self._place)
        except OSError:  # another process was first, or what came once was damaged since
            if _intact(self._place, self._wanted) is None:
                shutil.rmtree(self._place, ignore_errors=True)
                os.rename(self._folder, self._place)
            self.drop()
        return _source(self._place)

    def drop(self) -> None:
        """Forgets what came so far."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # a full disk
                self._file.close()
            self._file = None
        shutil.rmtree(self._folder, ignore_errors=True)


def _intact(folder: Path, wanted: str) -> Path | None:
    """What to load, unless files were taken or changed, as by whoever clears caches or a disk that was full."""
    try:
        source = _source(folder)
        return source if fingerprint(source) == wanted else None
    except OSError:
        return None


def _source(folder: Path) -> Path:
    """What to load: the folder, or its file when that is a single one under a name of its own."""
    files = list(folder.iterdir())
    if len(files) == 1 and not any(fnmatch.fnmatch(files[0].name, pattern) for pattern in TOKENIZER_FILES):
        return files[0]
    return folder


def _bad(reason: str) -> SluiceError:
    return SluiceError(
        ErrorKind.INVALID_ARGUMENT, f"The worker's tokenizer is refused: {reason}.", code="bad_tokenizer"
    )

"""Tokenizers on disk that came over the network: each complete under its fingerprint, or not there at all."""

from __future__ import annotations

import contextlib
import fcntl
import fnmatch
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import BinaryIO

from services.common.errors import ErrorKind, SluiceError
from services.common.models import TOKENIZER_FILES, fingerprint

log = logging.getLogger(__name__)

MAX_BYTES = 64 << 20
MAX_FILES = 64
CACHE_BYTES = 4 << 30
ABANDONED_S = 3600.0
_FINGERPRINT = re.compile(r"[0-9a-f]{64}")
_FILE_NAME = re.compile(r"(additional_chat_templates/)?[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_OWN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\.(json|model(\.v[0-9][A-Za-z0-9]*)?)")
"""A tokenizer that is a single file may have any name, such as those that mistral-common ships; it is never code."""
_INCOMING, _REMOVED = ".incoming-", ".removed-"


def default_folder() -> Path:
    """Where tokenizers are kept when no setting says otherwise."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    base = Path(cache) if os.access(Path(cache).parent, os.W_OK) else Path(tempfile.gettempdir())
    return base / "sluice" / "tokenizers"


class TokenizerStore:
    """A folder of tokenizers by fingerprint; several processes may share it.

    Args:
        folder: made when needed.
        max_bytes: largest tokenizer that is taken.
        cache_bytes: most that all of them may take; those that are not held and were used least recently are removed.
        check: looks at the files of one that has come, before it is kept; SluiceError refuses it.
    """

    def __init__(
        self,
        folder: Path,
        max_bytes: int = MAX_BYTES,
        cache_bytes: int = CACHE_BYTES,
        check: Callable[[Path], None] = lambda path: None,
    ) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._cache_bytes = cache_bytes
        self._check = check
        self._held: dict[str, tuple[int, int]] = {}  # descriptor and number of holders in this process
        self._lock = Lock()

    def find(self, wanted: str) -> Path | None:
        """The files of a tokenizer; None when they are not here, or not as they came."""
        return _intact(self._folder / wanted, wanted) if _FINGERPRINT.fullmatch(wanted) else None

    def hold(self, wanted: str) -> bool:
        """Keeps a tokenizer from being removed, by any process, until `release`; False when it is not here."""
        with self._lock:
            held = self._held.get(wanted)
            if held is not None:
                self._held[wanted] = held[0], held[1] + 1
                return True
            place = self._folder / wanted
            try:
                descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except OSError:
                return False
            if not _shared(descriptor) or not place.is_dir():  # it is being removed
                os.close(descriptor)
                return False
            with contextlib.suppress(OSError):
                os.utime(place)
            self._held[wanted] = descriptor, 1
            return True

    def release(self, wanted: str, remove: bool = False) -> None:
        """Ends a `hold`; `remove` deletes the files as well, unless they are held elsewhere."""
        with self._lock:
            descriptor, holders = self._held[wanted]
            if holders > 1:
                self._held[wanted] = descriptor, holders - 1
                return
            del self._held[wanted]
            os.close(descriptor)
            if remove:
                self._remove(self._folder / wanted)

    def _remove(self, place: Path) -> bool:
        """Deletes a tokenizer that no process holds; whether it is gone."""
        try:
            descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            return True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            doomed = place.with_name(f"{_REMOVED}{place.name}-{os.getpid()}")
            os.rename(place, doomed)
        except OSError:
            return False
        finally:
            os.close(descriptor)
        shutil.rmtree(doomed, ignore_errors=True)
        return True

    def _make_room(self) -> None:
        """Removes what was used least recently, until one more tokenizer fits."""
        places = [place for place in self._folder.iterdir() if _FINGERPRINT.fullmatch(place.name)]
        sizes = {place: sum(file.stat().st_size for file in place.rglob("*") if file.is_file()) for place in places}
        taken = sum(sizes.values())
        for place in sorted(sizes, key=lambda one: one.stat().st_mtime):
            if taken + self._max_bytes <= self._cache_bytes:
                return
            if place.name not in self._held and self._remove(place):
                taken -= sizes[place]
                log.info("a tokenizer is removed to make room", extra={"fingerprint": place.name})
        if taken + self._max_bytes > self._cache_bytes:
            raise SluiceError(
                ErrorKind.FAILED_PRECONDITION,
                f"Tokenizers in use fill {self._folder}; raise --tokenizer-cache-mb.",
            )

    def receive(self, wanted: str) -> IncomingTokenizer:
        """Begins to store a tokenizer; SluiceError(INVALID_ARGUMENT) when `wanted` is no fingerprint."""
        if not _FINGERPRINT.fullmatch(wanted):
            raise _bad("it has no fingerprint to check it by")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._sweep()
            self._make_room()
            incoming = Path(tempfile.mkdtemp(prefix=_INCOMING, dir=self._folder))
            return IncomingTokenizer(self._folder / wanted, incoming, wanted, self._max_bytes, self._check)
        except OSError as error:
            raise SluiceError(
                ErrorKind.FAILED_PRECONDITION, f"Tokenizers cannot be kept in {self._folder}: {error.strerror}."
            ) from error

    def _sweep(self) -> None:
        """Removes what processes that ended in the middle have left."""
        for left in (*self._folder.glob(f"{_INCOMING}*"), *self._folder.glob(f"{_REMOVED}*")):
            try:
                if time.time() - left.stat().st_mtime > ABANDONED_S:
                    shutil.rmtree(left, ignore_errors=True)
            except FileNotFoundError:
                continue


def _shared(descriptor: int) -> bool:
    """Locks a folder together with others that use it; False while a process removes it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: what cannot be locked is never removed
        return True
    return True


class IncomingTokenizer:
    """A tokenizer on its way: `add` its pieces in order, then `keep` it or `drop` it."""

    def __init__(self, place: Path, folder: Path, wanted: str, max_bytes: int, check: Callable[[Path], None]) -> None:
        self._place = place
        self._folder = folder
        self._wanted = wanted
        self._max_bytes = max_bytes
        self._check = check
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
        if not _is_allowed(name) or name in self._names:
            raise _bad("a file's name is not allowed")
        if len(self._names) >= MAX_FILES:
            raise _bad(f"it has more than {MAX_FILES} files")
        self._taken += size
        if self._taken > self._max_bytes:
            raise _bad(f"it is larger than {self._max_bytes >> 20} MiB (the server's --max-tokenizer-mb)")
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
        """Checks the content and moves it to its place in one step.

        Raises:
            SluiceError: INVALID_ARGUMENT when it is not what its fingerprint says; what the store's check raises.
        """
        self._close()
        if len(self._names) > 1 and not all(map(_is_usual, self._names)):
            raise _bad("a file's name is not allowed")
        if not self._names or fingerprint(_source(self._folder)) != self._wanted:
            raise _bad("its content does not match its fingerprint")
        self._check(_source(self._folder))
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
    return files[0] if len(files) == 1 and not files[0].is_dir() and not _is_usual(files[0].name) else folder


def _is_usual(name: str) -> bool:
    """Whether this is the name of one of a tokenizer's files in a model's folder."""
    return bool(_FILE_NAME.fullmatch(name)) and any(fnmatch.fnmatchcase(name, pattern) for pattern in TOKENIZER_FILES)


def _is_allowed(name: str) -> bool:
    """Whether a worker may send a file of this name: none but those that a tokenizer is read from."""
    return _is_usual(name) or bool(_OWN_NAME.fullmatch(name))


def _bad(reason: str) -> SluiceError:
    return SluiceError(
        ErrorKind.INVALID_ARGUMENT, f"The worker's tokenizer is refused: {reason}.", code="bad_tokenizer"
    )

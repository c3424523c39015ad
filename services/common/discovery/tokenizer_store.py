"""Stores tokenizers received over the network; each is either complete under its fingerprint or absent."""

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

from services.common.base.errors import ErrorKind, SluiceError
from services.common.packages.model_files import TOKENIZER_FILES, fingerprint

log = logging.getLogger(__name__)

MAX_BYTES = 64 << 20
"""Bytes of the tokenizer files that one worker sends; a larger tokenizer is refused."""
MAX_FILES = 64
"""Files of a worker's tokenizer; a tokenizer with more is refused."""
CACHE_BYTES = 4 << 30
"""Size of the folder; the least recently used tokenizers are removed first."""
ABANDONED_S = 3600.0
_FINGERPRINT = re.compile(r"[0-9a-f]{64}")
_FILE_NAME = re.compile(r"(additional_chat_templates/)?[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_SINGLE_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\.(json|model(\.v[0-9][A-Za-z0-9]*)?)")
"""A single-file tokenizer may have any name, such as those shipped with mistral-common; it is never code."""
_INCOMING, _REMOVED = ".incoming-", ".removed-"


def default_folder() -> Path:
    """Returns the folder for tokenizers when no setting names one."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    base = Path(cache) if os.access(Path(cache).parent, os.W_OK) else Path(tempfile.gettempdir())
    return base / "sluice" / "tokenizers"


class TokenizerStore:
    """A folder of tokenizers by fingerprint; several processes may share it.

    Args:
        folder: created on demand.
        max_bytes: size limit of one tokenizer.
        cache_bytes: size limit of the folder; the least recently used tokenizers that are not held are removed.
        check: called with the files of a received tokenizer before it is stored; rejects it by raising SluiceError.
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
        self._held: dict[str, tuple[int, int]] = {}  # descriptor, and holders in this process
        self._lock = Lock()

    def find(self, digest: str) -> Path | None:
        """Returns the path of a tokenizer; None when it is absent or was modified."""
        return _intact(self._folder / digest, digest) if _FINGERPRINT.fullmatch(digest) else None

    def hold(self, digest: str) -> bool:
        """Prevents any process from removing a tokenizer until `release`; returns False when it is absent."""
        with self._lock:
            held = self._held.get(digest)
            if held is not None:
                self._held[digest] = held[0], held[1] + 1
                return True
            path = self._folder / digest
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except OSError:
                return False
            if not _lock_shared(descriptor) or not path.is_dir():  # being removed
                os.close(descriptor)
                return False
            with contextlib.suppress(OSError):
                os.utime(path)
            self._held[digest] = descriptor, 1
            return True

    def release(self, digest: str, remove: bool = False) -> None:
        """Ends a `hold`; `remove` also deletes the files unless they are held elsewhere."""
        with self._lock:
            descriptor, holders = self._held[digest]
            if holders > 1:
                self._held[digest] = descriptor, holders - 1
                return
            del self._held[digest]
            os.close(descriptor)
            if remove:
                self._remove(self._folder / digest)

    def _remove(self, path: Path) -> bool:
        """Deletes a tokenizer that no process holds; returns whether it is deleted."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            return True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            doomed = path.with_name(f"{_REMOVED}{path.name}-{os.getpid()}")
            os.rename(path, doomed)
        except OSError:
            return False
        finally:
            os.close(descriptor)
        shutil.rmtree(doomed, ignore_errors=True)
        return True

    def _make_room(self) -> None:
        """Removes least recently used tokenizers until one more fits."""
        paths = [path for path in self._folder.iterdir() if _FINGERPRINT.fullmatch(path.name)]
        sizes = {path: sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) for path in paths}
        total_bytes = sum(sizes.values())
        for path in sorted(sizes, key=lambda one: one.stat().st_mtime):
            if total_bytes + self._max_bytes <= self._cache_bytes:
                return
            if path.name not in self._held and self._remove(path):
                total_bytes -= sizes[path]
                log.info("removed a tokenizer to free space", extra={"fingerprint": path.name})
        if total_bytes + self._max_bytes > self._cache_bytes:
            raise SluiceError(
                ErrorKind.FAILED_PRECONDITION,
                f"Tokenizers in use fill {self._folder}; it holds {self._cache_bytes >> 20} MiB.",
            )

    def receive(self, digest: str) -> IncomingTokenizer:
        """Starts storing a tokenizer; raises SluiceError(INVALID_ARGUMENT) when `digest` is not a fingerprint."""
        if not _FINGERPRINT.fullmatch(digest):
            raise _bad("it has no valid fingerprint")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._sweep()
            self._make_room()
            incoming = Path(tempfile.mkdtemp(prefix=_INCOMING, dir=self._folder))
            return IncomingTokenizer(self._folder / digest, incoming, digest, self._max_bytes, self._check)
        except OSError as error:
            raise SluiceError(
                ErrorKind.FAILED_PRECONDITION, f"Tokenizers cannot be stored in {self._folder}: {error.strerror}."
            ) from error

    def _sweep(self) -> None:
        """Removes the leftovers of processes that ended prematurely."""
        for leftover in (*self._folder.glob(f"{_INCOMING}*"), *self._folder.glob(f"{_REMOVED}*")):
            try:
                if time.time() - leftover.stat().st_mtime > ABANDONED_S:
                    shutil.rmtree(leftover, ignore_errors=True)
            except FileNotFoundError:
                continue


def _lock_shared(descriptor: int) -> bool:
    """Acquires a shared lock on a folder; returns False while a process is removing it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # no lock support: an entry that cannot be locked is never removed
        return True
    return True


class IncomingTokenizer:
    """A tokenizer being received: `add` its pieces in order, then `keep` or `drop` it."""

    def __init__(self, path: Path, folder: Path, digest: str, max_bytes: int, check: Callable[[Path], None]) -> None:
        self._final_path = path
        self._folder = folder
        self._digest = digest
        self._max_bytes = max_bytes
        self._check = check
        self._file: BinaryIO | None = None
        self._name = ""
        self._missing_bytes = 0
        self._total_bytes = 0
        self._names: set[str] = set()

    def add(self, name: str, size: int, data: bytes) -> None:
        """Appends the next piece of a file of `size` bytes.

        Raises:
            SluiceError: INVALID_ARGUMENT for a name that is not a tokenizer file, a piece out of order, or a size over
                the limits.
        """
        if name != self._name:
            self._open(name, size)
        if len(data) > self._missing_bytes:
            raise _bad(f"{name} is longer than announced")
        assert self._file is not None
        self._file.write(data)
        self._missing_bytes -= len(data)

    def _open(self, name: str, size: int) -> None:
        self._close()
        if not _is_allowed_name(name) or name in self._names:
            raise _bad("a file name is not allowed")
        if len(self._names) >= MAX_FILES:
            raise _bad(f"it has more than {MAX_FILES} files")
        self._total_bytes += size
        if self._total_bytes > self._max_bytes:
            raise _bad(f"it is larger than {self._max_bytes >> 20} MiB")
        self._names.add(name)
        self._name, self._missing_bytes = name, size
        path = self._folder / name
        path.parent.mkdir(exist_ok=True)
        self._file = path.open("xb")

    def _close(self) -> None:
        if self._missing_bytes:
            raise _bad(f"{self._name} is shorter than announced")
        if self._file is not None:
            self._file.close()
            self._file = None

    def keep(self) -> Path:
        """Checks the content and moves it atomically to its final path, which is returned.

        Raises:
            SluiceError: INVALID_ARGUMENT when it does not match its fingerprint; any error of the store's check.
        """
        self._close()
        if len(self._names) > 1 and not all(map(_is_standard_name, self._names)):
            raise _bad("a file name is not allowed")
        if not self._names or fingerprint(_source(self._folder)) != self._digest:
            raise _bad("its content does not match its fingerprint")
        self._check(_source(self._folder))
        try:
            os.rename(self._folder, self._final_path)
        except OSError:  # another process stored it first, or an earlier copy is damaged
            if _intact(self._final_path, self._digest) is None:
                shutil.rmtree(self._final_path, ignore_errors=True)
                os.rename(self._folder, self._final_path)
            self.drop()
        return _source(self._final_path)

    def drop(self) -> None:
        """Deletes what was received so far."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # the disk may be full
                self._file.close()
            self._file = None
        shutil.rmtree(self._folder, ignore_errors=True)


def _intact(folder: Path, digest: str) -> Path | None:
    """Returns the path to load, or None when files were removed or modified, such as by a cache cleaner."""
    try:
        source = _source(folder)
        return source if fingerprint(source) == digest else None
    except OSError:
        return None


def _source(folder: Path) -> Path:
    """Returns the path to load: the folder, or its only file when that has a custom name."""
    files = list(folder.iterdir())
    return files[0] if len(files) == 1 and not files[0].is_dir() and not _is_standard_name(files[0].name) else folder


def _is_standard_name(name: str) -> bool:
    """Whether a name is that of a tokenizer file in a model folder."""
    return bool(_FILE_NAME.fullmatch(name)) and any(fnmatch.fnmatchcase(name, pattern) for pattern in TOKENIZER_FILES)


def _is_allowed_name(name: str) -> bool:
    """Whether a worker may send a file of this name."""
    return _is_standard_name(name) or bool(_SINGLE_FILE_NAME.fullmatch(name))


def _bad(reason: str) -> SluiceError:
    return SluiceError(
        ErrorKind.INVALID_ARGUMENT, f"The worker's tokenizer was rejected: {reason}.", code="bad_tokenizer"
    )

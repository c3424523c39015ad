"""Process of custom parsers: `… -m services.postprocess.parsers.isolated.child PROGRESS_FD MEMORY_MB NAME…`.

Reads batches of operations from standard input and writes one frame of results per batch. Output of parsers is
redirected to standard error. Exits at the end of the input.
"""

from __future__ import annotations

import mmap
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from services.postprocess.detokenize.vocabulary import ParserNames
from services.postprocess.parsers.base import Parser, ParserContext
from services.postprocess.parsers.engines.adapter import EngineParser
from services.postprocess.parsers.events import Content, Degraded, Event, merge
from services.postprocess.parsers.isolated.wire import HEADER, PROGRESS, checked, frame, pack_events, unframe
from services.postprocess.parsers.registry import build, own_class

FAILED = "parser_failed"


Build = Callable[[ParserNames, ParserContext], Parser]


class Streams:
    """Parsers of the open streams.

    Args:
        progress: shared memory that shows the current operation to the parent process.
        build: creates a stream's parser.
    """

    def __init__(self, progress: mmap.mmap, build: Build = build) -> None:
        self._parsers: dict[int, Parser] = {}
        self._progress = progress
        self._build = build
        self._begun = 0

    def run(self, operations: list[list[Any]]) -> list[list[Any]]:
        """Runs a batch; returns the results of the feed and end operations."""
        results = []
        for kind, stream, *rest in operations:
            self._begun += 1
            PROGRESS.pack_into(self._progress, 0, self._begun, stream)
            if kind == "close":
                self._parsers.pop(stream, None)
            elif kind == "open":
                self._open(stream, *rest)
            elif stream in self._parsers:
                results.append(self._feed(stream, rest[0], rest[1], kind == "end"))
        PROGRESS.pack_into(self._progress, 0, self._begun + 1, 0)
        return results

    def _open(
        self, stream: int, names: list[str], context: dict[str, Any], replayed: list[str], tokens: list[int] | None
    ) -> None:
        """Opens a stream, and replays the pieces that a previous process parsed."""
        try:
            parser = self._build(ParserNames(*names), ParserContext(**context))
            _parse(parser, replayed, tokens)
        except Exception:
            traceback.print_exc()
            parser = _FailedParser(ParserContext())
        self._parsers[stream] = parser

    def _feed(self, stream: int, pieces: list[str], tokens: list[int] | None, ends: bool) -> list[Any]:
        """Returns [stream, pieces parsed, events, held text, reasoning tokens, whether the parser failed]."""
        parser = self._parsers[stream]
        events: list[Event] = []
        progress = _Progress()
        try:
            _parse(parser, pieces[:-1] if ends else pieces, tokens, events, progress)
            if ends:
                events += checked(_ended(parser, pieces[-1], tokens[-1] if tokens else -1, progress))
        except Exception:
            traceback.print_exc()
            del self._parsers[stream]
            rest = progress.held + "".join(pieces[progress.taken :])
            packed = pack_events(merge([*events, Degraded(FAILED), *([Content(rest)] if rest else [])]))
            return [stream, len(pieces), packed, "", progress.reasoning, True]
        if ends:
            del self._parsers[stream]
        reasoning = progress.reasoning + (parser.reasoning_tokens if ends else 0)
        return [stream, len(pieces), pack_events(merge(events)), parser.held, reasoning, False]


class _Progress:
    """Progress of a parser: pieces parsed, text held before the current piece, reasoning tokens."""

    def __init__(self) -> None:
        self.taken, self.held, self.reasoning = 0, "", 0


def _parse(
    parser: Parser,
    pieces: list[str],
    tokens: list[int] | None,
    events: list[Event] | None = None,
    progress: _Progress | None = None,
) -> None:
    """Feeds pieces, with their tokens if the parser needs them."""
    events, progress = [] if events is None else events, progress or _Progress()
    for index, piece in enumerate(pieces):
        progress.held = parser.held
        if isinstance(parser, EngineParser):
            events += checked(parser.feed_token(piece, tokens[index] if tokens else None))
        elif piece:
            events += checked(parser.feed(piece))
        progress.taken += 1
        progress.reasoning += parser.reasoning


def _ended(parser: Parser, piece: str, token: int, progress: _Progress) -> list[Event]:
    progress.held = parser.held
    if isinstance(parser, EngineParser):
        return parser.finish_with(piece, None if token < 0 else token)
    events = parser.feed(piece) if piece else []
    progress.taken, progress.held = progress.taken + 1, parser.held
    return [*events, *parser.finish()]


class _FailedParser(Parser):
    """Replaces a parser that could not be created."""

    def feed(self, text: str) -> list[Event]:
        """See Parser."""
        raise RuntimeError("the parser could not be created")

    def finish(self) -> list[Event]:
        """See Parser."""
        raise RuntimeError("the parser could not be created")


def limit_memory(megabytes: int) -> None:
    """Limits how much more memory the process can allocate from now on; beyond it, allocations raise MemoryError."""
    if sys.platform == "linux":
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * os.sysconf("SC_PAGE_SIZE") + (megabytes << 20)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def read(source: BinaryIO) -> Any:
    """Returns the next message; None at the end."""
    head = source.read(HEADER.size)
    if len(head) < HEADER.size:
        return None
    return unframe(source.read(HEADER.unpack(head)[0]))


def main() -> None:
    """Runs until the end of the input."""
    progress = mmap.mmap(int(sys.argv[1]), PROGRESS.size)
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    sys.path.insert(0, os.getcwd())
    markers = {name: sorted(own_class(name).markers) for name in sys.argv[3:]}
    limit_memory(int(sys.argv[2]))
    streams = Streams(progress)
    output.write(frame(markers))
    output.flush()
    while (operations := read(sys.stdin.buffer)) is not None:
        output.write(frame(streams.run(operations)))
        output.flush()


if __name__ == "__main__":
    main()

"""Process of custom parsers: `… -m services.postprocess.parsers.isolated.child PROGRESS_FD LIMITS NAME`.

Reads batches of operations from standard input and writes one frame of results per batch. Exits at the end of the
input.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

from services.common.base.sendable_text import sendable
from services.common.base.shared_steps import shared_step
from services.common.child_rpc.child import Channel, ChildLimits, serve
from services.postprocess.detokenize.vocabulary import ParserNames
from services.postprocess.parsers.base import Parser, ParserContext
from services.postprocess.parsers.engines.adapter import EngineParser
from services.postprocess.parsers.events import Content, Degraded, Event, merge
from services.postprocess.parsers.isolated.wire import Progress, checked, decode, encode, pack_events
from services.postprocess.parsers.registry import build, own_class

FAILED = "parser_failed"


Build = Callable[[ParserNames, ParserContext], Parser]


class Streams:
    """Parsers of the open streams.

    Args:
        progress: shows the current operation to the parent process.
        build: creates a stream's parser.
    """

    def __init__(self, progress: Progress, build: Build = build) -> None:
        self._parsers: dict[int, Parser] = {}
        self._progress = progress
        self._build = build
        self._begun = 0

    def handle(self, request: bytes) -> bytes:
        """Returns the reply to a batch."""
        return encode(self.run(decode(request)))

    @shared_step("postprocess.parse_batch")
    def run(self, operations: list[list[Any]]) -> list[list[Any]]:
        """Runs a batch; returns the results of the feed and end operations."""
        results = []
        for kind, stream, *rest in operations:
            self._begun += 1
            self._progress.set(self._begun, stream)
            if kind == "close":
                self._parsers.pop(stream, None)
            elif kind == "open":
                self._open(stream, *rest)
            elif stream in self._parsers:
                results.append(self._feed(stream, rest[0], rest[1], kind == "end"))
        self._progress.set(self._begun + 1, 0)
        return results

    def _open(
        self, stream: int, names: list[str], context: dict[str, Any], replayed: list[str], tokens: list[int] | None
    ) -> None:
        """Opens a stream, and replays the pieces that a previous process parsed."""
        try:
            parser = self._build(ParserNames(*names), ParserContext(**context))
            _Feeding(parser).feed(replayed, tokens)
        except Exception:
            traceback.print_exc()
            parser = _FailedParser(ParserContext())
        self._parsers[stream] = parser

    def _feed(self, stream: int, pieces: list[str], tokens: list[int] | None, ends: bool) -> list[Any]:
        """Returns [stream, pieces parsed, events, held text, reasoning tokens, whether the parser failed]."""
        parser = self._parsers[stream]
        feeding = _Feeding(parser)
        try:
            feeding.feed(pieces[:-1] if ends else pieces, tokens)
            if ends:
                feeding.end(pieces[-1], tokens[-1] if tokens else -1)
            reasoning = int(feeding.reasoning + (parser.reasoning_tokens if ends else 0))
            result = [stream, len(pieces), pack_events(merge(feeding.events)), sendable(parser.held), reasoning, False]
        except Exception:
            traceback.print_exc()
            del self._parsers[stream]
            rest = feeding.held + "".join(pieces[feeding.taken :])
            events = [*feeding.events, Degraded(FAILED), *([Content(rest)] if rest else [])]
            return [stream, len(pieces), pack_events(merge(events)), "", feeding.reasoning, True]
        if ends:
            del self._parsers[stream]
        return result


class _Feeding:
    """Feeds pieces of one operation to a parser.

    Attributes:
        events: of the pieces parsed.
        taken: number of pieces parsed.
        held: text held before the current piece.
        reasoning: reasoning tokens.
    """

    def __init__(self, parser: Parser) -> None:
        self.events: list[Event] = []
        self.taken, self.held, self.reasoning = 0, "", 0
        self._parser = parser

    def feed(self, pieces: list[str], tokens: list[int] | None) -> None:
        """Feeds pieces, with their tokens if the parser needs them."""
        parser = self._parser
        for index, piece in enumerate(pieces):
            self.held = sendable(parser.held)
            if isinstance(parser, EngineParser):
                self.events += checked(parser.feed_token(piece, tokens[index] if tokens else None))
            elif piece:
                self.events += checked(parser.feed(piece))
            self.taken += 1
            self.reasoning += bool(parser.reasoning)

    def end(self, piece: str, token: int) -> None:
        """Ends the stream with its last piece."""
        parser = self._parser
        self.held = sendable(parser.held)
        if isinstance(parser, EngineParser):
            self.events += checked(parser.finish_with(piece, None if token < 0 else token))
            return
        events = parser.feed(piece) if piece else []
        self.taken, self.held = self.taken + 1, sendable(parser.held)
        self.events += checked([*events, *parser.finish()])


class _FailedParser(Parser):
    """Replaces a parser that could not be created."""

    def feed(self, text: str) -> list[Event]:
        raise RuntimeError("the parser could not be created")

    def finish(self) -> list[Event]:
        raise RuntimeError("the parser could not be created")


def main(progress_fd: str, limits: str, name: str) -> None:
    """Runs until the end of the input."""
    channel = Channel.of_stdio()
    sys.path.insert(0, os.getcwd())
    markers = sorted(own_class(name).markers)
    ChildLimits.read(limits).apply()
    channel.send_json({name: markers})
    serve(channel, Streams(Progress(int(progress_fd))).handle)


if __name__ == "__main__":
    main(*sys.argv[1:])

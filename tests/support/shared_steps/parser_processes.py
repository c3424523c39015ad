"""Rigs of the batches between postprocess and processes of own and engines' parsers."""

from __future__ import annotations

from typing import Any, cast
from unittest import mock

from services.common.base.errors import SluiceError, internal
from services.common.child_rpc.child import ChildLimits
from services.postprocess.detokenize.vocabulary import ParserNames
from services.postprocess.parsers.base import Parser, ParserContext
from services.postprocess.parsers.events import CallArguments, Content, Degraded, Event
from services.postprocess.parsers.isolated import host as isolated_host
from services.postprocess.parsers.isolated.child import Streams
from services.postprocess.parsers.isolated.host import ParserHost
from services.postprocess.parsers.isolated.wire import Progress, decode, encode, pack_context, unpack_events
from tests.support.shared_steps.rigs import ROWS, Fault, Outcome, rig

CONTEXT = pack_context(ParserContext((), identity="request"))


class _OwnParser(Parser):
    """Own code, which raises or returns what no message holds."""

    def __init__(self, fault: Fault, row: int) -> None:
        super().__init__(ParserContext((), identity="request"))
        self._fault, self._row = fault, row

    def feed(self, text: str) -> list[Event]:
        self._fault.at(self._row)
        if self._fault.due(self._row):
            return [Content(cast(str, 7))]
        if self._fault.due(self._row):
            return [CallArguments(-1, "x")]
        return [Content(text)]

    def finish(self) -> list[Event]:
        self._fault.at(self._row)
        return []

    @property
    def held(self) -> str:
        self._fault.at(self._row)
        return cast(str, object()) if self._fault.due(self._row) else ""


def _lost_parser() -> SluiceError:
    return internal("The stream has lost its parser and continues as plain text.")


@rig("postprocess.parse_batch")
def parse_batch(fault: Fault) -> Outcome:
    made = iter(range(ROWS + 1))

    def build(names: Any, context: Any) -> Parser:
        row = next(made)
        fault.at(row)
        return _OwnParser(fault, row)

    streams, outcome = Streams(Progress(), build), Outcome({row: [] for row in range(ROWS)})

    def run(rows: range, *operations: list[Any]) -> None:
        for number, _, events, _, _, failed in decode(streams.handle(encode(list(operations)))):
            found = unpack_events(events)
            if failed or any(isinstance(event, Degraded) for event in found):
                outcome.errors[number] = _lost_parser()
            outcome.outputs.setdefault(number, []).extend(found)

    for rows in (range(ROWS), range(ROWS, ROWS + 1)):
        run(rows, *(["open", row, ["own", ""], CONTEXT, [], None] for row in rows))
        run(rows, *(["feed", row, ["a", "b"], None] for row in rows))
        run(rows, *(["end", row, ["c"], None] for row in rows))
    outcome.alive = outcome.outputs.pop(ROWS) == [Content("ab"), Content("c")]
    return outcome


class _Stream:
    """A stream whose parser is in the process, as far as the host needs it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.results: list[Any] = []
        self.opened = False
        self.names = ParserNames("own", "")
        self.context = ParserContext((), identity="request")
        self.pieces = ["text"]
        self.parsed = self.sent = 0
        self.ending = None
        self.error: SluiceError | None = None

    def tokens_of(self, start: int, end: int | None = None) -> None:
        return None

    def add_result(self, *result: Any) -> None:
        self.results.append(result)

    def restart(self, drop_parser: bool, reason: str) -> None:
        assert drop_parser
        self.error = _lost_parser()


@rig("postprocess.parser_results")
async def parser_results(fault: Fault) -> Outcome:
    host = ParserHost("own:Parser", ChildLimits(1, 64))
    streams = {row: _Stream(row) for row in range(ROWS + 1)}
    host._streams = cast(Any, streams)

    async def reply(operations: Any) -> Any:
        def events(row: int) -> Any:
            if fault.due(row):
                return [["Unknown", "x"]]
            return [["Content"]] if fault.due(row) else [["Content", "x"]]

        return [[row, 1, events(row), "", 0, False] for row in operations]

    with mock.patch.object(host, "_call", reply):
        assert await host._run_batch(cast(Any, range(ROWS)), cast(Any, streams)) == ""
        alive = await host._run_batch(cast(Any, [ROWS]), cast(Any, streams)) == ""
    outcome = Outcome({row: streams[row].results for row in range(ROWS)})
    outcome.errors = {row: error for row in range(ROWS) if (error := streams[row].error) is not None}
    outcome.alive = alive and bool(streams[ROWS].results)
    host._progress.close()
    return outcome


@rig("postprocess.parser_batch")
def parser_batch(fault: Fault) -> Outcome:
    def encode_opening(message: Any) -> bytes:
        if fault.due(message[1]):
            raise RecursionError
        return encode(message)

    host = ParserHost("own:Parser", ChildLimits(1, 64))
    streams = {row: _Stream(row) for row in range(ROWS + 1)}
    for row, stream in streams.items():
        stream.opened = fault.row != row and row % 2 == 1
        host._changed[row] = cast(Any, stream)
    with mock.patch.object(isolated_host, "encode", encode_opening):
        operations, _ = host._batch()
    outcome = Outcome({row: [kind for kind, number, *_ in operations if number == row] for row in range(ROWS)})
    outcome.errors = {row: error for row in range(ROWS) if (error := streams[row].error) is not None}
    outcome.alive = any(number == ROWS for _, number, *_ in operations)
    host._progress.close()
    return outcome

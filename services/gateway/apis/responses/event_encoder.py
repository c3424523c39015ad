"""Encodes a response as the server-sent events of OpenAI's Responses API."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import orjson

from services.common.apis.responses.custom_tools import InputReader
from services.common.apis.responses.items import item_id
from services.common.base.errors import SluiceError
from services.gateway.apis.responses.resource import OutputItem, OutputOptions, Resource, last_status
from services.gateway.core.request import Finish, FinishReason
from services.gateway.operations.logprobs import TokenText
from services.gateway.operations.output import Counts
from services.gateway.operations.transcript import Block, BlockKind


class _EventNames(NamedTuple):
    """The names of an item's events: of its pieces and, unless empty, of its part, with the field of its index."""

    piece: str
    part: str = ""
    position: str = ""


_EVENT_NAMES = {
    BlockKind.CALL: _EventNames("function_call_arguments"),
    BlockKind.REASONING: _EventNames("reasoning_text", "content_part", "content_index"),
    BlockKind.TEXT: _EventNames("output_text", "content_part", "content_index"),
}
_CUSTOM_CALL = _EventNames("custom_tool_call_input")
_SUMMARY = _EventNames("reasoning_summary_text", "reasoning_summary_part", "summary_index")


class ResponseEventEncoder:
    """See EventEncoder.

    Args:
        make: returns the response object, once the generation has started.
        on_end: called once with the final response object.
    """

    def __init__(
        self, make: Callable[[], Resource], options: OutputOptions, on_end: Callable[[dict[str, Any]], None]
    ) -> None:
        self._make = make
        self._options = options
        self._on_end = on_end
        self._resource: Resource
        self._items: list[OutputItem] = []
        self._open = False  # whether the last item is incomplete
        self._sequence = 0
        self._delta = (b"", b"")  # bytes of the open item before the sequence number, and before the piece
        self._after = b""
        self._input: InputReader | None = None  # of the open call, if its tool is custom

    def opening(self, counts: Counts) -> bytes:
        """See EventEncoder."""
        self._resource = self._make()
        response = self._resource.in_progress()
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def text(self, piece: str, tokens: Sequence[TokenText]) -> bytes:
        """See EventEncoder."""
        events = self._block(BlockKind.TEXT)
        item = self._items[-1]
        item.block.pieces.append(piece)
        if not tokens:
            return events + self._piece(piece)
        item.block.tokens += tokens
        return events + self._event(
            "response.output_text.delta",
            item_id=item.id,
            output_index=len(self._items) - 1,
            content_index=0,
            delta=piece,
            logprobs=item.logprobs(tokens),
        )

    def reasoning(self, piece: str) -> bytes:
        """See EventEncoder."""
        events = self._block(BlockKind.REASONING)
        self._items[-1].block.pieces.append(piece)
        return events + self._piece(piece)

    def call(self, call: int, call_id: str, name: str, arguments: str) -> bytes:
        """See EventEncoder."""
        events = b""
        if name:
            events = self._begin(Block(BlockKind.CALL, call, call_id, name))
            self._input = InputReader() if self._items[-1].custom else None
        self._items[-1].block.pieces.append(arguments)
        piece = arguments if self._input is None else self._input.feed(arguments)
        return events + self._piece(piece) if piece else events

    def closing(self, finish: Finish, counts: Counts) -> bytes:
        """See EventEncoder."""
        events = b"" if self._items else self._begin(Block(BlockKind.TEXT))
        events += self._end(last_status(finish))
        response = self._resource.completed(self._items, finish, counts)
        self._on_end(response)
        return events + self._event(f"response.{response['status']}", response=response)

    def failure(self, error: SluiceError, counts: Counts) -> bytes:
        """See EventEncoder."""
        response = self._resource.failed(self._items, error, counts)
        self._on_end(response)
        return self._event("response.failed", response=response)

    def silence(self) -> bytes:
        """See EventEncoder."""
        return self._event("response.in_progress", response=self._resource.in_progress())

    def cancelled(self) -> dict[str, Any]:
        """Returns the response object of a generation that was cancelled, with its output so far."""
        return self._make().cancelled(self._items, Counts())

    def without_output(self) -> bytes:
        """Returns all events of a response that generates nothing."""
        events = self.opening(Counts())
        response = self._resource.completed([], Finish(FinishReason.STOP), Counts())
        self._on_end(response)
        return events + self._event("response.completed", response=response)

    def _block(self, kind: BlockKind) -> bytes:
        if self._open and self._items[-1].block.kind is kind:
            return b""
        return self._begin(Block(kind))

    def _begin(self, block: Block) -> bytes:
        events = self._end("completed") if self._open else b""
        item = OutputItem(block, self._options, item_id(self._resource.id, len(self._items)))
        self._items.append(item)
        self._open = True
        index = len(self._items) - 1
        events += self._event("response.output_item.added", output_index=index, item=item.in_progress())
        names, location = self._names(item), self._location(item)
        self._prepare(
            f"response.{names.piece}.delta", location, {"logprobs": []} if block.kind is BlockKind.TEXT else {}
        )
        if names.part:
            events += self._event(f"response.{names.part}.added", **location, part=item.part(""))
        return events

    def _end(self, status: str) -> bytes:
        item = self._items[-1]
        self._open = False
        block, text = item.block, item.block.text
        names, location = self._names(item), self._location(item)
        events = b""
        if self._input is not None:
            rest, self._input = self._input.finish(), None
            events = self._piece(rest) if rest else b""
        content: dict[str, Any] = {"text": text}
        if block.kind is BlockKind.CALL:
            content = self._call_content(item)
        elif block.kind is BlockKind.TEXT:
            content["logprobs"] = item.logprobs(block.tokens)
        events += self._event(f"response.{names.piece}.done", **location, **content)
        if names.part:
            events += self._event(f"response.{names.part}.done", **location, part=item.part(text))
        index = len(self._items) - 1
        return events + self._event("response.output_item.done", output_index=index, item=item.completed(status))

    def _call_content(self, item: OutputItem) -> dict[str, Any]:
        call = item.completed("completed")
        return {"input": call["input"]} if item.custom else {"name": call["name"], "arguments": call["arguments"]}

    def _names(self, item: OutputItem) -> _EventNames:
        if item.custom:
            return _CUSTOM_CALL
        summary = item.block.kind is BlockKind.REASONING and self._options.summary
        return _SUMMARY if summary else _EVENT_NAMES[item.block.kind]

    def _location(self, item: OutputItem) -> dict[str, Any]:
        """Returns the fields of an event about the last item."""
        location: dict[str, Any] = {"item_id": item.id, "output_index": len(self._items) - 1}
        if position := self._names(item).position:
            location[position] = 0
        return location

    def _prepare(self, kind: str, location: dict[str, Any], more: dict[str, Any]) -> None:
        """Encodes everything of a delta event except its number and piece once per item, as most events are deltas."""
        head = f'event: {kind}\ndata: {{"type":"{kind}","sequence_number":'.encode()
        self._delta = (head, b"," + orjson.dumps(location)[1:-1] + b',"delta":')
        self._after = (b"," + orjson.dumps(more)[1:] if more else b"}") + b"\n\n"

    def _piece(self, piece: str) -> bytes:
        sequence = self._sequence
        self._sequence += 1
        head, location = self._delta
        return b"%b%d%b%b%b" % (head, sequence, location, orjson.dumps(piece), self._after)

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = orjson.dumps({"type": kind, "sequence_number": self._sequence, **fields})
        self._sequence += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)

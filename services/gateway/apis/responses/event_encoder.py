"""Encodes a response as the server-sent events of OpenAI's Responses API."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import orjson

from services.common.errors import SluiceError
from services.gateway.apis.common.transcript import Block, Kind
from services.gateway.apis.common.usage import Counts
from services.gateway.apis.openai.logprobs import ShownToken
from services.gateway.apis.responses.resource import OutputItem, OutputOptions, Resource, last_status
from services.gateway.core.request import Finish


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

    def opening(self, counts: Counts) -> bytes:
        """See EventEncoder."""
        self._resource = self._make()
        response = self._resource.in_progress()
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def text(self, piece: str, tokens: Sequence[ShownToken]) -> bytes:
        """See EventEncoder."""
        events = self._block(Kind.TEXT)
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
        events = self._block(Kind.REASONING)
        self._items[-1].block.pieces.append(piece)
        return events + self._piece(piece)

    def call(self, call: int, call_id: str, name: str, arguments: str) -> bytes:
        """See EventEncoder."""
        events = b""
        if name:
            events = self._begin(Block(Kind.CALL, call, call_id, name))
        self._items[-1].block.pieces.append(arguments)
        return events + self._piece(arguments) if arguments else events

    def closing(self, finish: Finish, counts: Counts) -> bytes:
        """See EventEncoder."""
        events = b"" if self._items else self._begin(Block(Kind.TEXT))
        events += self._end(last_status(finish))
        response = self._resource.completed(self._items, finish, counts)
        self._on_end(response)
        return events + self._event(f"response.{response['status']}", response=response)

    def failure(self, error: SluiceError, counts: Counts) -> bytes:
        """See EventEncoder."""
        response = self._resource.failed(self._items, error, counts)
        self._on_end(response)
        return self._event("response.failed", response=response)

    def _block(self, kind: Kind) -> bytes:
        if self._open and self._items[-1].block.kind is kind:
            return b""
        return self._begin(Block(kind))

    def _begin(self, block: Block) -> bytes:
        events = self._end("completed") if self._open else b""
        item = OutputItem(block, self._options)
        self._items.append(item)
        self._open = True
        index = len(self._items) - 1
        events += self._event("response.output_item.added", output_index=index, item=item.in_progress())
        location: dict[str, Any] = {"item_id": item.id, "output_index": index}
        if block.kind is Kind.CALL:
            self._prepare("response.function_call_arguments.delta", location, {})
            return events
        if block.kind is Kind.REASONING and self._options.summary:
            location["summary_index"] = 0
            self._prepare("response.reasoning_summary_text.delta", location, {})
            return events + self._event("response.reasoning_summary_part.added", **location, part=item.part(""))
        location["content_index"] = 0
        if block.kind is Kind.REASONING:
            self._prepare("response.reasoning_text.delta", location, {})
        else:
            self._prepare("response.output_text.delta", location, {"logprobs": []})
        return events + self._event("response.content_part.added", **location, part=item.part(""))

    def _end(self, status: str) -> bytes:
        item, index = self._items[-1], len(self._items) - 1
        self._open = False
        block = item.block
        location: dict[str, Any] = {"item_id": item.id, "output_index": index}
        text = block.text
        if block.kind is Kind.CALL:
            events = self._event("response.function_call_arguments.done", **location, name=block.name, arguments=text)
        elif block.kind is Kind.REASONING and self._options.summary:
            location["summary_index"] = 0
            events = self._event("response.reasoning_summary_text.done", **location, text=text)
            events += self._event("response.reasoning_summary_part.done", **location, part=item.part(text))
        else:
            location["content_index"] = 0
            if block.kind is Kind.REASONING:
                events = self._event("response.reasoning_text.done", **location, text=text)
            else:
                logprobs = item.logprobs(block.tokens)
                events = self._event("response.output_text.done", **location, text=text, logprobs=logprobs)
            events += self._event("response.content_part.done", **location, part=item.part(text))
        return events + self._event("response.output_item.done", output_index=index, item=item.completed(status))

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

"""A response as server-sent events, in the order and with the fields of OpenAI's API."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import orjson

from services.common.errors import SluiceError
from services.gateway.apis.common.transcript import Block, Counts, Kind
from services.gateway.apis.openai.logprobs import ShownToken
from services.gateway.apis.responses.resource import OutputItem, Resource, Shown, last_status
from services.gateway.core.request import Finish


class ResponseEventEncoder:
    """See Teller.

    Args:
        make: makes the response object, once the generation runs.
        ended: hears of the whole response object, once.
    """

    def __init__(self, make: Callable[[], Resource], shown: Shown, ended: Callable[[dict[str, Any]], None]) -> None:
        self._make = make
        self._shown = shown
        self._ended = ended
        self._resource: Resource
        self._items: list[OutputItem] = []
        self._open = False  # the last item is not done yet
        self._sequence = 0
        self._delta = (b"", b"")  # of the open item: before the sequence number, and before the piece
        self._after = b""

    def opening(self, counts: Counts) -> bytes:
        """See Teller."""
        self._resource = self._make()
        begun = self._resource.in_progress()
        return self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)

    def text(self, piece: str, tokens: Sequence[ShownToken]) -> bytes:
        """See Teller."""
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
        """See Teller."""
        events = self._block(Kind.REASONING)
        self._items[-1].block.pieces.append(piece)
        return events + self._piece(piece)

    def call(self, call: int, call_id: str, name: str, arguments: str) -> bytes:
        """See Teller."""
        events = b""
        if name:
            events = self._begin(Block(Kind.CALL, call, call_id, name))
        self._items[-1].block.pieces.append(arguments)
        return events + self._piece(arguments) if arguments else events

    def closing(self, finish: Finish, counts: Counts) -> bytes:
        """See Teller."""
        events = b"" if self._items else self._begin(Block(Kind.TEXT))
        events += self._end(last_status(finish))
        response = self._resource.ended(self._items, finish, counts)
        self._ended(response)
        return events + self._event(f"response.{response['status']}", response=response)

    def failure(self, error: SluiceError, counts: Counts) -> bytes:
        """See Teller."""
        response = self._resource.failed(self._items, error, counts)
        self._ended(response)
        return self._event("response.failed", response=response)

    def _block(self, kind: Kind) -> bytes:
        if self._open and self._items[-1].block.kind is kind:
            return b""
        return self._begin(Block(kind))

    def _begin(self, block: Block) -> bytes:
        events = self._end("completed") if self._open else b""
        item = OutputItem(block, self._shown)
        self._items.append(item)
        self._open = True
        index = len(self._items) - 1
        events += self._event("response.output_item.added", output_index=index, item=item.begun())
        where: dict[str, Any] = {"item_id": item.id, "output_index": index}
        if block.kind is Kind.CALL:
            self._prepare("response.function_call_arguments.delta", where, {})
            return events
        if block.kind is Kind.REASONING and self._shown.summary:
            where["summary_index"] = 0
            self._prepare("response.reasoning_summary_text.delta", where, {})
            return events + self._event("response.reasoning_summary_part.added", **where, part=item.part(""))
        where["content_index"] = 0
        if block.kind is Kind.REASONING:
            self._prepare("response.reasoning_text.delta", where, {})
        else:
            self._prepare("response.output_text.delta", where, {"logprobs": []})
        return events + self._event("response.content_part.added", **where, part=item.part(""))

    def _end(self, status: str) -> bytes:
        item, index = self._items[-1], len(self._items) - 1
        self._open = False
        block = item.block
        where: dict[str, Any] = {"item_id": item.id, "output_index": index}
        whole = block.said
        if block.kind is Kind.CALL:
            events = self._event("response.function_call_arguments.done", **where, name=block.name, arguments=whole)
        elif block.kind is Kind.REASONING and self._shown.summary:
            where["summary_index"] = 0
            events = self._event("response.reasoning_summary_text.done", **where, text=whole)
            events += self._event("response.reasoning_summary_part.done", **where, part=item.part(whole))
        else:
            where["content_index"] = 0
            if block.kind is Kind.REASONING:
                events = self._event("response.reasoning_text.done", **where, text=whole)
            else:
                logprobs = item.logprobs(block.tokens)
                events = self._event("response.output_text.done", **where, text=whole, logprobs=logprobs)
            events += self._event("response.content_part.done", **where, part=item.part(whole))
        return events + self._event("response.output_item.done", output_index=index, item=item.whole(status))

    def _prepare(self, kind: str, where: dict[str, Any], more: dict[str, Any]) -> None:
        """Deltas are most of a stream: all of one but its number and its piece is made once."""
        head = f'event: {kind}\ndata: {{"type":"{kind}","sequence_number":'.encode()
        self._delta = (head, b"," + orjson.dumps(where)[1:-1] + b',"delta":')
        self._after = (b"," + orjson.dumps(more)[1:] if more else b"}") + b"\n\n"

    def _piece(self, piece: str) -> bytes:
        sequence = self._sequence
        self._sequence += 1
        head, where = self._delta
        return b"%b%d%b%b%b" % (head, sequence, where, orjson.dumps(piece), self._after)

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = orjson.dumps({"type": kind, "sequence_number": self._sequence, **fields})
        self._sequence += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)

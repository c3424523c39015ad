"""Which calls of a generation are calls: the rule for their names, the request's choice, and their ids."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import NamedTuple

from services.postprocess.parsers.base import ParserContext
from services.postprocess.parsers.events import CallStart, Degraded, Event

MAX_NAME = 256
"""Characters of the name of a call; a longer one shows that the call is damaged, which becomes text."""
NOT_CHOSEN = "tool_choice_not_honoured"

_IS_PLAIN = re.compile(rf"[A-Za-z0-9_.:\-]{{1,{MAX_NAME}}}").fullmatch


class Named(NamedTuple):
    """A call whose arguments begin; `id` is empty if the model wrote none, `arguments` were parsed already."""

    name: str
    id: str = ""
    arguments: str = ""


def is_plain_name(name: str) -> bool:
    """Returns whether a name needs no tool of the request to be one: letters, digits and `_.:-`."""
    return _IS_PLAIN(name) is not None


class Calls:
    """Numbers the calls of one generation and checks which are allowed.

    Args:
        context: of the stream.
        prefix, length: of the ids.
        markers: of the family, none of which is part of a name.

    Attributes:
        count: number of calls.
        known: names that are allowed; empty for any.
    """

    def __init__(
        self, context: ParserContext, prefix: str = "call_", length: int = 24, markers: Collection[str] = ()
    ) -> None:
        self._context = context
        self._prefix = prefix
        self._length = length
        self._markers = markers
        self._ids: set[str] = set()
        self.known: Collection[str] = ()
        self.count = 0

    def is_name(self, name: str) -> bool:
        """Returns whether a text is the name of a call, the one rule of all parsers.

        It is the name of a tool of the request or a plain one, has at most MAX_NAME characters, and no marker of
        the family: that of another call shows that this call is damaged.
        """
        if name not in self._context.names:
            return is_plain_name(name)
        return len(name) <= MAX_NAME and not any(marker in name for marker in self._markers)

    def allows(self, name: str) -> bool:
        """Returns whether the request's tool_choice and parallel_tool_calls allow this call."""
        if self.known and name not in self.known:
            return False
        return not (self._context.only and name != self._context.only) and not (self._context.single and self.count)

    def start(self, call: Named) -> CallStart:
        """Returns the start of the next call; replaces a repeated id."""
        generated = self._prefix + self._context.token(self.count, self._length)
        call_id = call.id if call.id and call.id not in self._ids else generated
        self._ids.add(call_id)
        self.count += 1
        return CallStart(self.count - 1, call_id, call.name)

    def end(self) -> list[Event]:
        """Returns a Degraded event at the end of the text if a required call is missing."""
        wanted = self._context.required or self._context.only
        return [Degraded(NOT_CHOSEN)] if wanted and not self.count else []

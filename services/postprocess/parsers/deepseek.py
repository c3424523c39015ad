"""DeepSeek R1, V3 and V3.1. The first two write `function<｜tool▁sep｜>name`, then the arguments in a fenced block;
V3.1 writes `name<｜tool▁sep｜>` and the arguments."""

from __future__ import annotations

import re

from services.postprocess.parsers.calls import Body, CallParser, Named
from services.postprocess.parsers.json_scan import Malformed, skip_spaces
from services.postprocess.parsers.markers import Markers
from services.postprocess.parsers.objects import Arguments, is_name, read_head

SEPARATOR, END = "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
FENCE = "```"

_EDGES = Markers("{", END)
_HEAD = re.compile(rf"\s*(.*?)\s*{re.escape(SEPARATOR)}\s*(?:(\S.*?)\s*{FENCE}(?:json)?\s*)?", re.DOTALL).fullmatch


class DeepSeekBody(Body):
    """One call."""

    def __init__(self) -> None:
        self._head = ""
        self._fenced = False
        self._fence = ""
        self._arguments: Arguments | None = None

    def push(self, text: str, at: int) -> tuple[int, Named | str | None]:
        """See Body."""
        if self._arguments is None:
            return self._read_head(text, at)
        if not self._arguments.done:
            at, news = self._arguments.push(text, at)
            self.calling = self._arguments.calling
            self.done = self._arguments.done and not self._fenced
            return at, news
        return self._read_fence(text, at), None

    def _read_head(self, text: str, at: int) -> tuple[int, Named | None]:
        at, self._head, edge = read_head(self._head, text, at, _EDGES)
        if not edge:
            return at, None
        found = _HEAD(self._head if edge != END else self._head.rstrip().removesuffix(FENCE))
        name = (found[2] or found[1]) if found else ""
        if found is None or not is_name(name) or SEPARATOR in name or (found[2] and found[1] != "function"):
            raise Malformed(at)
        if edge == END:
            self.done = True
            return at, Named(name, arguments="{}")
        self._fenced = bool(found[2])
        self._arguments = Arguments()
        self.calling = True
        return at, Named(name)

    def _read_fence(self, text: str, at: int) -> int:
        if not self._fence:
            at = skip_spaces(text, at)
        while at < len(text) and self._fence != FENCE:
            if text[at] != "`":
                raise Malformed(at)
            self._fence += "`"
            at += 1
        self.done = self._fence == FENCE
        return at


class DeepSeekParser(CallParser):
    """Calls of DeepSeek's models."""

    starts = ("<｜tool▁call▁begin｜>",)
    ends = (END,)
    swallowed = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    markers = frozenset((*starts, *ends, *swallowed, SEPARATOR))

    def body(self) -> Body:
        """See CallParser."""
        return DeepSeekBody()

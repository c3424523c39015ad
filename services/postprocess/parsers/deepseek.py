"""Parser of DeepSeek R1, V3 and V3.1.

R1 and V3 write `function<｜tool▁sep｜>name` and the arguments in a fenced block; V3.1 writes `name<｜tool▁sep｜>` and
the arguments.
"""

from __future__ import annotations

from services.postprocess.parsers.calls import Body, CallParser, Named
from services.postprocess.parsers.json_scan import Malformed, skip_spaces
from services.postprocess.parsers.markers import Markers
from services.postprocess.parsers.objects import Arguments, is_name, read_head

SEPARATOR, END = "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
FENCE = "```"

_EDGES = Markers("{", END)


class DeepSeekBody(Body):
    """Body of one call."""

    def __init__(self) -> None:
        self._head = ""
        self._fenced = False
        self._fence = ""
        self._arguments: Arguments | None = None

    def push(self, text: str, at: int) -> tuple[int, Named | str | None]:
        if self._arguments is None:
            return self._read_head(text, at)
        if not self._arguments.done:
            at, arguments = self._arguments.push(text, at)
            self.calling = self._arguments.calling
            self.done = self._arguments.done and not self._fenced
            return at, arguments
        return self._read_fence(text, at), None

    def _read_head(self, text: str, at: int) -> tuple[int, Named | None]:
        at, self._head, edge = read_head(self._head, text, at, _EDGES)
        if not edge:
            return at, None
        name, fenced = _named(self._head if edge != END else self._head.rstrip().removesuffix(FENCE))
        if not is_name(name) or SEPARATOR in name:
            raise Malformed(at)
        if edge == END:
            self.done = True
            return at, Named(name, arguments="{}")
        self._fenced = fenced
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


def _named(head: str) -> tuple[str, bool]:
    """Returns the name in a call's head, empty for none, and whether its arguments are in a fenced block.

    A single regular expression would take cubic time for adjacent runs of white space.
    """
    before, separator, after = (part.strip() for part in head.partition(SEPARATOR))
    if not separator or not after:
        return (before if separator else ""), False
    opening = FENCE + "json" if after.endswith(FENCE + "json") else FENCE
    if before != "function" or not after.endswith(opening):
        return "", False
    return after.removesuffix(opening).rstrip(), True


class DeepSeekParser(CallParser):
    """Parses calls of DeepSeek models."""

    starts = ("<｜tool▁call▁begin｜>",)
    ends = (END,)
    swallowed = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    markers = frozenset((*starts, *ends, *swallowed, SEPARATOR))
    body = DeepSeekBody

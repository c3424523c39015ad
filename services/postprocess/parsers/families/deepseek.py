"""Parser of DeepSeek R1, V3 and V3.1.

R1 and V3 write `function<｜tool▁sep｜>name` and the arguments in a fenced block; V3.1 writes `name<｜tool▁sep｜>` and
the arguments.
"""

from __future__ import annotations

from services.postprocess.parsers.calls.call_names import Named
from services.postprocess.parsers.calls.objects import HeadedBody
from services.postprocess.parsers.calls.parser import CallParser
from services.postprocess.parsers.families.family import EngineNames, Family
from services.postprocess.parsers.scanning.json_scan import Malformed, skip_spaces
from services.postprocess.parsers.scanning.markers import Markers

SEPARATOR, END = "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
FENCE = "```"


class DeepSeekBody(HeadedBody):
    """Body of one call."""

    edges = Markers("{", END)

    def __init__(self) -> None:
        super().__init__()
        self._fenced = False
        self._fence = ""

    def named(self, head: str, edge: str) -> Named | None:
        if edge == END:
            head = head.rstrip().removesuffix(FENCE)
            kind, _, bare = (part.strip() for part in head.partition(SEPARATOR))
            if kind == "function" and bare and FENCE not in bare and SEPARATOR not in bare:
                return Named(bare)
        name, fenced = _named(head)
        self._fenced = fenced and edge != END
        return Named(name) if SEPARATOR not in name else None

    def push(self, text: str, at: int) -> tuple[int, Named | str | None]:
        inner = self._inner
        if inner is None:
            return self.read_head(text, at)
        if inner.done:
            return self._read_fence(text, at), None
        at, found = self.push_inner(inner, text, at)
        self.done = inner.done and not self._fenced
        return at, found

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


FAMILY = Family(
    name="deepseek_v3",
    tool=DeepSeekParser,
    aliases=("deepseek_r1", "deepseek_v31"),
    hints=DeepSeekParser.starts,
    special=DeepSeekParser.starts,
    engine_tools=(
        EngineNames(sglang="deepseekv3", mark=f"{FENCE}json"),
        EngineNames(vllm="deepseek_v31", sglang="deepseekv31"),
    ),
)

"""Parser of Granite 3: `<|tool_call|>[{"name": …, "arguments": {…}}, …]`."""

from __future__ import annotations

from services.postprocess.parsers.calls import Body, CallParser
from services.postprocess.parsers.objects import CallArray


class GraniteParser(CallParser):
    """Parses calls of Granite 3; Granite 4 uses the format of Hermes."""

    starts = ("<|tool_call|>",)
    markers = frozenset(starts)

    def body(self) -> Body:
        """See CallParser."""
        return CallArray()

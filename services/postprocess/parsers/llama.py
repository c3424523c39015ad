"""Parser of Llama 3: `{"name": …, "parameters": {…}}`, separated by semicolons, optionally after `<|python_tag|>`."""

from __future__ import annotations

from services.postprocess.parsers.calls import Body
from services.postprocess.parsers.objects import CallObject
from services.postprocess.parsers.unmarked import UnmarkedCallParser


class LlamaJsonParser(UnmarkedCallParser):
    """Parses calls of Llama 3.1 to 3.3. JSON output that names none of the tools is content."""

    starts = ("<|python_tag|>",)
    markers = frozenset(starts)
    opening = "{"

    def body(self) -> Body:
        """See CallParser."""
        return CallObject()

    def bare_body(self) -> Body:
        """See UnmarkedCallParser."""
        return CallObject(self.context.names or None, bare=True)

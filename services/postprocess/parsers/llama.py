"""Llama 3: `{"name": …, "parameters": {…}}`, several separated by semicolons; some begin with `<|python_tag|>`."""

from __future__ import annotations

from services.postprocess.parsers.calls import Body
from services.postprocess.parsers.objects import CallObject
from services.postprocess.parsers.unmarked import UnmarkedCallParser


class LlamaJsonParser(UnmarkedCallParser):
    """Calls of Llama 3.1 to 3.3. An answer in JSON that names none of the tools is an answer."""

    starts = ("<|python_tag|>",)
    markers = frozenset(starts)
    opening = "{"

    def body(self) -> Body:
        """See CallParser."""
        return CallObject()

    def bare_body(self) -> Body:
        """See BareCallParser."""
        return CallObject(self.context.names or None, bare=True)

"""Names fields in errors as the client's API does."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from services.common.base.errors import SluiceError, with_field

_ITEM = re.compile(r"(messages|tools)\[(\d+)\](?:\.(.+))?")
_PART = re.compile(r"messages\[\d+\]\.content\[\d+\]")


class FieldNameMap:
    """Maps field names of the gateway's own requests to those of the client's request.

    Args:
        names: the client's names, by the gateway's; a name also stands for the fields below it.
        messages: the client's path of each chat message.
        tools: the client's path of each chat tool.
        of_tool: the client's names of a tool's fields, by their chat names.
        default: the client's name of every other field; empty: the same name.
        parts: the client's paths of content parts, by the chat's; a path also stands for the fields of its part.
    """

    def __init__(
        self,
        names: Mapping[str, str],
        messages: Sequence[str] = (),
        tools: Sequence[str] = (),
        of_tool: Mapping[str, str] | None = None,
        default: str = "",
        parts: Mapping[str, str] | None = None,
    ) -> None:
        self._names = names
        self._messages = messages
        self._tools = tools
        self._of_tool = of_tool or {}
        self._default = default
        self._parts = parts or {}

    def param(self, param: str) -> str:
        """Returns the client's name of a field."""
        if (found := _PART.match(param)) and (path := self._parts.get(found[0])):
            return path
        if found := _ITEM.fullmatch(param):
            kind, index, rest = found[1], int(found[2]), found[3]
            paths = self._messages if kind == "messages" else self._tools
            if index < len(paths):
                field = self._of_tool.get(rest or "", "") if kind == "tools" else ""
                return f"{paths[index]}.{field}" if field else paths[index]
        for name in (param, param.partition(".")[0]):
            if name in self._names:
                return self._names[name]
        return self._default or param

    def rename(self, error: SluiceError) -> SluiceError:
        """Returns the error with its field renamed in `param` and message."""
        if not error.param or (name := self.param(error.param)) == error.param:
            return error
        message = re.sub(rf"\b{re.escape(error.param)}(?![\w\[.]*\w)", lambda _: name, error.message)
        return with_field(error, name, message)

"""Values in a request's body and where they stand, so that every refusal names its field."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from services.common.budgets import Budget
from services.common.errors import SluiceError, invalid

PathStyle = Literal["[]", "."]
"""How clients of an API write the third of something: `input[2]` or `messages.2`."""


class FieldReader:
    """A JSON value and its path in the body.

    Args:
        list_items: longest list that `items` goes through.
    """

    __slots__ = ("_list_items", "_style", "path", "value")

    def __init__(self, value: Any, path: str, style: PathStyle, list_items: Budget) -> None:
        self.value = value
        self.path = path
        self._style = style
        self._list_items = list_items

    def wrong(self, what: str) -> SluiceError:
        """INVALID_ARGUMENT; `what` completes a sentence that begins with the path."""
        return self._refusal(f"{what}.", "invalid_value")

    def unsupported(self, why: str) -> SluiceError:
        """INVALID_ARGUMENT for what the API knows and nobody here can do."""
        return self._refusal(f"is not supported: {why}.", "unsupported_parameter")

    def _refusal(self, said: str, code: str) -> SluiceError:
        colon = ":" if self._style == "." else ""
        return invalid(f"{self.path}{colon} {said}", param=self.path, code=code)

    def under(self, name: str) -> FieldReader:
        """A field of this object; its value is None when it is not there."""
        return self._at(self.value.get(name), f"{self.path}.{name}" if self.path else name)

    def instead(self, value: Any) -> FieldReader:
        """Another value at the same place: what is written there, in its long form."""
        return self._at(value, self.path)

    def _at(self, value: Any, path: str) -> FieldReader:
        return FieldReader(value, path, self._style, self._list_items)

    def fields(self, *known: str) -> FieldReader:
        """Itself, after a check that it is an object with no other fields than these."""
        if not isinstance(self.value, dict):
            raise self.wrong("must be an object")
        for name in self.value:
            if name not in known:
                place = self.under(str(name)[:64])
                said = "Extra inputs are not permitted" if self._style == "." else "is an unknown parameter"
                raise place._refusal(f"{said}.", "unknown_parameter")
        return self

    def kind(self, *kinds: str) -> str:
        """Its `type`, which must be one of these; SluiceError names it otherwise."""
        if not isinstance(self.value, dict):
            raise self.wrong("must be an object with a type")
        place = self.under("type")
        if not isinstance(place.value, str):
            raise place.wrong("is missing" if place.value is None else "must be a string")
        if place.value not in kinds:
            raise place.wrong(f"is {place.value[:64]!r}; choose from {', '.join(kinds)}")
        return place.value

    def items(self) -> Iterator[FieldReader]:
        """The places of a list's members; SluiceError(INVALID_ARGUMENT) for one that is too long."""
        if not isinstance(self.value, list):
            raise self.wrong("must be a list")
        most = self._list_items.limit
        if len(self.value) > most:
            colon = ":" if self._style == "." else ""
            said = f"{self.path}{colon} has {len(self.value)} items, more than {most}"
            raise self._list_items.refuse(said, param=self.path)
        form = "{}[{}]" if self._style == "[]" else "{}.{}"
        return (self._at(member, form.format(self.path, index)) for index, member in enumerate(self.value))

    def text(self, *, empty: bool = True, most: int | None = None) -> str:
        """A string that has to be there."""
        if self.value is None:
            raise self.wrong("is missing")
        if not isinstance(self.value, str):
            raise self.wrong("must be a string")
        if not empty and not self.value:
            raise self.wrong("must not be empty")
        if most is not None and len(self.value) > most:
            raise self.wrong(f"has {len(self.value)} characters, more than {most}")
        return self.value

    def choice(self, *values: str) -> str:
        """One of these strings; it has to be there."""
        if self.text() not in values:
            raise self.wrong(f"must be one of {', '.join(values)}")
        return str(self.value)

    def optional(self, kind: type) -> Any:
        """None or a value of this type; true is no number."""
        fits = isinstance(self.value, kind) and (kind is bool or not isinstance(self.value, bool))
        if self.value is not None and not fits:
            names = {str: "a string", bool: "a boolean", int: "an integer", dict: "an object", list: "a list"}
            raise self.wrong(f"must be {names[kind]}")
        return self.value

    def ignored(self, *neutral: Any, why: str) -> None:
        """Refuses what cannot be honoured, unless it is null or one of these."""
        if self.value is not None and not any(type(self.value) is type(one) and self.value == one for one in neutral):
            raise self.unsupported(why)


class FieldNameMap:
    """What the parts of a chat are called in the API that the client speaks.

    Args:
        messages: where each of the chat's messages comes from.
        tools: where each of its tools comes from.
        of_tool: a tool's fields by their names in the chat.
        names: other fields by their names in the chat.
    """

    _PART = re.compile(r"(messages|tools)\[(\d+)\](?:\.(.+))?")

    def __init__(
        self,
        messages: Sequence[str],
        tools: Sequence[str],
        of_tool: dict[str, str],
        names: dict[str, str],
    ) -> None:
        self._messages = messages
        self._tools = tools
        self._of_tool = of_tool
        self._names = names

    def param(self, param: str) -> str:
        """The client's name of a field of the chat."""
        if found := self._PART.fullmatch(param):
            kind, index, rest = found[1], int(found[2]), found[3]
            places = self._messages if kind == "messages" else self._tools
            if index < len(places):
                inside = self._of_tool.get(rest or "", "") if kind == "tools" else ""
                return f"{places[index]}.{inside}" if inside else places[index]
        first, _, rest = param.partition(".")
        for name in (param, first):
            if name in self._names:
                return self._names[name]
        return param

    def of(self, error: SluiceError) -> SluiceError:
        """The same error in the client's words."""
        if not error.param or (name := self.param(error.param)) == error.param:
            return error
        return SluiceError(
            error.kind,
            re.sub(rf"\b{re.escape(error.param)}(?![\w\[.]*\w)", lambda _: name, error.message),
            param=name,
            code=error.code,
            retry_after_ms=error.retry_after_ms,
            retryable=error.retryable,
        )

"""Readers for JSON values in a request body that name the offending field in every error."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from typing import Any, Literal

from services.common.base.budgets import Budget
from services.common.base.errors import SluiceError, invalid

PathStyle = Literal["[]", "."]
"""The API's notation for list items in error messages: `input[2]` or `messages.2`."""


class FieldReader:
    """A JSON value together with its path in the body.

    Args:
        list_items: the longest list that `items` accepts.
    """

    __slots__ = ("_list_items", "_style", "path", "value")

    def __init__(self, value: Any, path: str, style: PathStyle, list_items: Budget) -> None:
        self.value = value
        self.path = path
        self._style = style
        self._list_items = list_items

    def invalid(self, problem: str) -> SluiceError:
        """Returns an INVALID_ARGUMENT error; `problem` completes a sentence that begins with the path."""
        return self._error(f"{problem}.", "invalid_value")

    def unsupported(self, reason: str) -> SluiceError:
        """Returns an INVALID_ARGUMENT error for a value that the API defines but Sluice does not support."""
        return self._error(f"is not supported: {reason}.", "unsupported_parameter")

    def _error(self, message: str, code: str) -> SluiceError:
        colon = ":" if self._style == "." else ""
        return invalid(f"{self.path}{colon} {message}", param=self.path, code=code)

    def under(self, name: str) -> FieldReader:
        """Returns the reader of a field of this object; its value is None if the field is missing."""
        return self._at(self.value.get(name), f"{self.path}.{name}" if self.path else name)

    def with_value(self, value: Any) -> FieldReader:
        """Returns a reader of another value at the same path, such as the long form of a shorthand."""
        return self._at(value, self.path)

    def _at(self, value: Any, path: str) -> FieldReader:
        return FieldReader(value, path, self._style, self._list_items)

    def fields(self, *names: str) -> FieldReader:
        """Returns itself; raises unless the value is an object with only these fields."""
        if not isinstance(self.value, dict):
            raise self.invalid("must be an object")
        for name in self.value:
            if name not in names:
                message = "Extra inputs are not permitted" if self._style == "." else "is an unknown parameter"
                raise self.under(str(name)[:64])._error(f"{message}.", "unknown_parameter")
        return self

    def kind(self, *kinds: str) -> str:
        """Returns the object's `type`; raises unless it is one of these."""
        if not isinstance(self.value, dict):
            raise self.invalid("must be an object with a type")
        field = self.under("type")
        if not isinstance(field.value, str):
            raise field.invalid("is missing" if field.value is None else "must be a string")
        if field.value not in kinds:
            raise field.invalid(f"is {field.value[:64]!r}; choose from {', '.join(kinds)}")
        return field.value

    def reject_other_kinds(self, kinds: Container[str], problem: Callable[[str], str]) -> None:
        """Raises the `unsupported` error if this is an object of another type.

        Args:
            problem: returns the end of a sentence that begins with the type.
        """
        kind = self.value.get("type") if isinstance(self.value, dict) else None
        if isinstance(kind, str) and kind not in kinds:
            raise self.under("type").unsupported(f"{kind[:64]!r} {problem(kind)}")

    def items(self) -> Iterator[FieldReader]:
        """Returns readers of the list's items; raises SluiceError(INVALID_ARGUMENT) if the list is too long."""
        if not isinstance(self.value, list):
            raise self.invalid("must be a list")
        limit = self._list_items.limit
        if len(self.value) > limit:
            colon = ":" if self._style == "." else ""
            message = f"{self.path}{colon} has {len(self.value)} items, more than {limit}"
            raise self._list_items.refuse(message, param=self.path)
        form = "{}[{}]" if self._style == "[]" else "{}.{}"
        return (self._at(item, form.format(self.path, index)) for index, item in enumerate(self.value))

    def text(self, *, empty: bool = True, max_length: int | None = None) -> str:
        """Returns a required string."""
        if self.value is None:
            raise self.invalid("is missing")
        if not isinstance(self.value, str):
            raise self.invalid("must be a string")
        if not empty and not self.value:
            raise self.invalid("must not be empty")
        if max_length is not None and len(self.value) > max_length:
            raise self.invalid(f"has {len(self.value)} characters, more than {max_length}")
        return self.value

    def choice(self, *values: str) -> str:
        """Returns a required string that is one of `values`."""
        if self.text() not in values:
            raise self.invalid(f"must be one of {', '.join(values)}")
        return str(self.value)

    def optional(self, kind: type) -> Any:
        """Returns None or a value of this type; booleans do not count as numbers."""
        fits = isinstance(self.value, kind) and (kind is bool or not isinstance(self.value, bool))
        if self.value is not None and not fits:
            names = {str: "a string", bool: "a boolean", int: "an integer", dict: "an object", list: "a list"}
            raise self.invalid(f"must be {names[kind]}")
        return self.value

    def reject_unless(self, *neutral: Any, reason: str) -> None:
        """Raises the `unsupported` error unless the value is null or one of `neutral`, which need no support."""
        if self.value is not None and not any(
            type(self.value) is type(value) and self.value == value for value in neutral
        ):
            raise self.unsupported(reason)

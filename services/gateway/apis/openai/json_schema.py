"""Validates the structure of JSON schemas, without compiling patterns or resolving remote references.

Engines compile schemas to grammars; malformed schemas are rejected here first, with the name of the field.
`SchemaMeter` bounds their size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from services.common.base.errors import SluiceError, invalid

MAX_DEPTH = 64
"""Levels of a JSON schema; a deeper one is refused with INVALID_ARGUMENT."""
_SHOWN_NAME = 60
_SHOWN_PATH = 200

Link = tuple["Link | None", str | int]
"""A location in a schema: its parent location, and its name or index there. Formatted only for errors."""

_TYPES = frozenset({"null", "boolean", "object", "array", "number", "integer", "string"})
_SCHEMAS = frozenset({"additionalProperties", "items", "contains", "propertyNames", "not", "if", "then", "else"})
_LISTS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minContains")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


def check_schema(schema: Any, param: str) -> None:
    """Raises SluiceError(INVALID_ARGUMENT) with the location of an invalid value; `param` is the client's field."""
    pending: list[tuple[Any, Link | None, int]] = [(schema, None, 0)]
    while pending:
        node, link, depth = pending.pop()
        if depth > MAX_DEPTH:
            raise _error(param, None, f"is nested more than {MAX_DEPTH} deep")
        if isinstance(node, bool) and link is not None:
            continue
        if not isinstance(node, dict):
            raise _error(param, link, "is not a schema: it must be an object")
        for keyword, value in node.items():
            check = _CHECKS.get(keyword)
            if check is not None and (problem := check(value)):
                raise _error(param, (link, keyword), problem)
            if keyword == "$ref":
                _check_reference(value, (link, keyword), param, schema)
            pending += [(child, location, depth + 1) for child, location in _children(keyword, value, (link, keyword))]


def _children(keyword: str, value: Any, location: Link) -> Iterator[tuple[Any, Link]]:
    """Returns the schemas below a keyword whose value has been checked."""
    if isinstance(value, list) and (keyword in _LISTS or keyword == "items"):
        return ((item, (location, index)) for index, item in enumerate(value))
    if keyword in _MAPS:
        return ((item, (location, name)) for name, item in value.items())
    return iter([(value, location)] if keyword in _SCHEMAS else [])


def _type_problem(value: Any) -> str:
    kinds = [value] if isinstance(value, str) else value
    fits = isinstance(kinds, list) and all(isinstance(kind, str) and kind in _TYPES for kind in kinds)
    return "" if fits else f"must be of {', '.join(sorted(_TYPES))}"


def _enum_problem(value: Any) -> str:
    return "" if isinstance(value, list) and value else "must be a list of at least one value"


def _required_problem(value: Any) -> str:
    fits = isinstance(value, list) and all(isinstance(name, str) for name in value)
    return "" if fits else "must be a list of names"


def _count_problem(value: Any) -> str:
    return "" if _is_number(value) and value >= 0 and value % 1 == 0 else "must be a whole number of at least 0"


def _number_problem(value: Any) -> str:
    return "" if _is_number(value) else "must be a number"


def _pattern_problem(value: Any) -> str:
    return "" if isinstance(value, str) else "must be a string"


def _list_problem(value: Any) -> str:
    return "" if isinstance(value, list) and value else "must be a list of at least one schema"


def _map_problem(value: Any) -> str:
    return "" if isinstance(value, dict) else "must be an object of schemas"


_CHECKS: dict[str, Callable[[Any], str]] = {
    "type": _type_problem,
    "enum": _enum_problem,
    "required": _required_problem,
    "pattern": _pattern_problem,
    **dict.fromkeys(_COUNTS, _count_problem),
    **dict.fromkeys(_NUMBERS, _number_problem),
    **dict.fromkeys(_LISTS, _list_problem),
    **dict.fromkeys(_MAPS, _map_problem),
}
"""Returns the problem of a keyword's value, or an empty string."""


def _check_reference(reference: Any, location: Link, param: str, root: Any) -> None:
    if not isinstance(reference, str) or not reference.startswith("#"):
        raise _error(param, location, "must point into the schema itself, as in #/$defs/name")
    found = root
    for part in reference[1:].split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isascii() and name.isdigit() and len(name) < 9 and int(name) < len(found):
            found = found[int(name)]
        elif isinstance(found, dict) and name in found:
            found = found[name]
        else:
            raise _error(param, location, f"points to {reference[:80]}, which does not exist")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _error(param: str, location: Link | None, problem: str) -> SluiceError:
    subject = f"the schema at {_path(location)}" if location is not None else "it"
    return invalid(f"Invalid value for {param}: {subject} {problem}.", param=param, code="invalid_value")


def _path(location: Link | None) -> str:
    parts: list[str] = []
    while location is not None:
        location, name = location
        parts.append(f"/{str(name)[:_SHOWN_NAME]}")
    return "".join(reversed(parts))[:_SHOWN_PATH]

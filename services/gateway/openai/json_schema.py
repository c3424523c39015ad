"""Whether a JSON schema is one, in bounded time and without fetching anything.

Engines compile schemas to grammars; what they would choke on for being no schema at all is said here, with the field.
"""

from __future__ import annotations

import re
from typing import Any

from services.common.errors import SluiceError, invalid

MAX_NODES = 20_000
MAX_DEPTH = 64
MAX_PATTERN = 4_096

_TYPES = frozenset({"null", "boolean", "object", "array", "number", "integer", "string"})
_SCHEMAS = ("additionalProperties", "items", "contains", "propertyNames", "not", "if", "then", "else")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minContains")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_UNICODE_CLASS = re.compile(r"\\[pP](?:\{\^?[\w=]{1,40}\}|[A-Z])")


def check_schema(schema: Any, param: str) -> None:
    """Raises SluiceError(INVALID_ARGUMENT) with the place of the first mistake; the param is the client's field."""
    waiting: list[tuple[Any, str, int]] = [(schema, "", 0)]
    seen = 0
    while waiting:
        node, where, depth = waiting.pop()
        seen += 1
        if seen > MAX_NODES:
            raise _wrong(param, "", f"has more than {MAX_NODES} parts")
        if depth > MAX_DEPTH:
            raise _wrong(param, "", f"is nested more than {MAX_DEPTH} deep")
        if isinstance(node, bool) and where:
            continue
        if not isinstance(node, dict):
            raise _wrong(param, where, "is no schema: it must be an object")
        _check_node(node, where, param, schema)
        waiting += [(child, name, depth + 1) for child, name in _children(node, where, param)]


def check_regex(pattern: Any, param: str, where: str = "") -> None:
    """Raises SluiceError(INVALID_ARGUMENT) when this is no regular expression in any of the engines' dialects."""
    if not isinstance(pattern, str):
        raise _wrong(param, where, "must be a string")
    if len(pattern) > MAX_PATTERN:
        raise _wrong(param, where, f"is longer than {MAX_PATTERN} characters")
    try:
        re.compile(_UNICODE_CLASS.sub(r"\\w", pattern))
    except (re.error, OverflowError, RecursionError) as error:
        raise _wrong(param, where, f"is no regular expression: {error}") from None


def _children(node: dict[str, Any], where: str, param: str) -> list[tuple[Any, str]]:
    found = [
        (node[keyword], f"{where}/{keyword}")
        for keyword in _SCHEMAS
        if keyword in node and not (keyword == "items" and isinstance(node[keyword], list))
    ]
    for keyword in (*_LISTS, *(["items"] if isinstance(node.get("items"), list) else [])):
        if keyword in node:
            members = node[keyword]
            if not isinstance(members, list) or (not members and keyword != "items"):
                raise _wrong(param, f"{where}/{keyword}", "must be a list of at least one schema")
            found += [(member, f"{where}/{keyword}/{place}") for place, member in enumerate(members)]
    for keyword in _MAPS:
        if keyword in node:
            if not isinstance(node[keyword], dict):
                raise _wrong(param, f"{where}/{keyword}", "must be an object of schemas")
            found += [(member, f"{where}/{keyword}/{name}") for name, member in node[keyword].items()]
    return found


def _check_node(node: dict[str, Any], where: str, param: str, root: Any) -> None:
    kinds = node.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not isinstance(kinds, list) or not all(isinstance(kind, str) and kind in _TYPES for kind in kinds):
        raise _wrong(param, f"{where}/type", f"must be of {', '.join(sorted(_TYPES))}")
    if "enum" in node and (not isinstance(node["enum"], list) or not node["enum"]):
        raise _wrong(param, f"{where}/enum", "must be a list of at least one value")
    names = node.get("required", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise _wrong(param, f"{where}/required", "must be a list of names")
    for keyword in _COUNTS:
        if keyword in node and not (_is_number(node[keyword]) and node[keyword] >= 0 and node[keyword] % 1 == 0):
            raise _wrong(param, f"{where}/{keyword}", "must be a whole number of at least 0")
    for keyword in _NUMBERS:
        if keyword in node and not _is_number(node[keyword]):
            raise _wrong(param, f"{where}/{keyword}", "must be a number")
    if "pattern" in node:
        check_regex(node["pattern"], param, f"{where}/pattern")
    for pattern in node["patternProperties"] if isinstance(node.get("patternProperties"), dict) else ():
        check_regex(pattern, param, f"{where}/patternProperties")
    if "$ref" in node:
        _check_reference(node["$ref"], where, param, root)


def _check_reference(reference: Any, where: str, param: str, root: Any) -> None:
    if not isinstance(reference, str) or not reference.startswith("#"):
        raise _wrong(param, f"{where}/$ref", "must point into the schema itself, such as #/$defs/name")
    found = root
    for part in reference[1:].split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isascii() and name.isdigit() and len(name) < 9 and int(name) < len(found):
            found = found[int(name)]
        elif isinstance(found, dict) and name in found:
            found = found[name]
        else:
            raise _wrong(param, f"{where}/$ref", f"points to {reference[:80]}, which is not there")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _wrong(param: str, where: str, what: str) -> SluiceError:
    subject = f"the schema at {where[:200]}" if where else "it"
    return invalid(f"Invalid value for {param}: {subject} {what}.", param=param, code="invalid_value")

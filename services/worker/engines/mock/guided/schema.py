"""Generates an example of a JSON schema.

Supported keywords: type, enum, const, properties, required, additionalProperties, items, prefixItems, minItems,
maxItems, minimum, maximum, exclusiveMinimum, exclusiveMaximum, minLength, maxLength, pattern, format, anyOf, oneOf,
allOf and $ref within the document.
Annotation keywords are ignored; every other keyword is rejected.
"""

from __future__ import annotations

import math
from random import Random
from typing import Any

from services.worker.engines.mock.guided.effort import Effort, SchemaTooComplex, UnsupportedSchema
from services.worker.engines.mock.guided.regex import matching

MAX_DEPTH = 32
MAX_OPTIONAL_DEPTH = 3
MAX_VALUES = 10_000
MAX_STRING_CHARACTERS = 4_096

_ANNOTATIONS = frozenset(
    {"$schema", "$id", "$anchor", "$comment", "$defs", "definitions", "title", "description", "default", "examples"}
    | {"deprecated", "readOnly", "writeOnly", "strict", "name", "contentEncoding", "contentMediaType"}
)
_KEYWORDS = {
    "object": frozenset({"properties", "required", "additionalProperties"}),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
}
_GENERAL_KEYWORDS = frozenset({"type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "nullable"})
_SUPPORTED = _ANNOTATIONS.union(_GENERAL_KEYWORDS, *_KEYWORDS.values())
_FORMATS = {
    "date": "2026-03-14",
    "time": "12:30:00Z",
    "date-time": "2026-03-14T12:30:00Z",
    "duration": "PT5M",
    "email": "keeper@example.com",
    "hostname": "example.com",
    "ipv4": "192.0.2.1",
    "ipv6": "2001:db8::1",
    "uri": "https://example.com/river",
    "uuid": "0e4a1b9c-6f5d-4c3b-8a29-1f0e2d3c4b5a",
}
_WORDS = ("river", "gate", "bridge", "lamp", "harbour", "meadow", "stone", "window")


class Examples:
    """Generates values of a schema.

    Args:
        root: The document to which references are relative.
        effort: Budget; every loop over a part of the document, and every text, is counted in advance.
    """

    def __init__(self, root: Any, random: Random, effort: Effort) -> None:
        self._root = root
        self._random = random
        self._effort = effort
        self._value_count = 0

    def of(self, schema: Any, depth: int = 0) -> Any:
        """Returns a value that satisfies the schema; raises UnsupportedSchema when none can be generated."""
        self._value_count += 1
        if self._value_count > MAX_VALUES:
            raise SchemaTooComplex("it requires too many values")
        if depth > MAX_DEPTH:
            raise UnsupportedSchema("it is nested too deeply")
        if schema is True:
            return self._random.choice(_WORDS)
        if not isinstance(schema, dict):
            raise UnsupportedSchema("a part of it allows no value or is not a schema")
        schema = self._merged(schema, depth)
        if unknown := sorted(schema.keys() - _SUPPORTED):
            raise UnsupportedSchema(f"the keyword {unknown[0][:60]!r} is not supported")
        if "const" in schema:
            return self._count_value(schema["const"])
        if "enum" in schema:
            return self._count_value(self._random.choice(_non_empty_list(schema["enum"], "enum")))
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                return self._any(schema, keyword, depth)
        return self._typed(schema, depth)

    def _count_value(self, value: Any) -> Any:
        """Counts the cost of a literal value of the document, which may be large and referenced many times."""
        waiting = [value]
        while waiting:
            node = waiting.pop()
            self._effort.spend()
            if isinstance(node, dict | list):
                self._effort.spend(len(node))
                waiting += node.values() if isinstance(node, dict) else node
                self._effort.write(sum(map(len, node)) if isinstance(node, dict) else 2 * len(node))
            else:
                self._effort.write(len(node) if isinstance(node, str) else 8)
        return value

    def _merged(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        """Returns the schema merged with its reference and the members of `allOf`."""
        self._effort.spend(1 + len(schema))
        if "$ref" not in schema and "allOf" not in schema:
            return schema
        if depth > MAX_DEPTH:
            raise UnsupportedSchema("references are circular")
        merged = {key: value for key, value in schema.items() if key not in ("$ref", "allOf")}
        subschemas = [self._resolve(schema["$ref"])] if "$ref" in schema else []
        for subschema in (*subschemas, *schema.get("allOf", ())):
            if not isinstance(subschema, dict):
                raise UnsupportedSchema("allOf and $ref require schemas that are objects")
            for key, value in self._merged(subschema, depth + 1).items():
                merged[key] = self._intersection(key, merged[key], value) if key in merged else value
        return merged

    def _intersection(self, key: str, one: Any, other: Any) -> Any:
        """Returns a value of a keyword that satisfies both values."""
        self._count_value([one, other])
        if one == other or key in _ANNOTATIONS:
            return one
        if key == "properties":
            shared = {name: {"allOf": [one[name], other[name]]} for name in one.keys() & other.keys()}
            return {**one, **other, **shared}
        if key == "required":
            return list(dict.fromkeys([*one, *other]))
        raise UnsupportedSchema(f"two values of {key!r} cannot be combined")

    def _resolve(self, reference: Any) -> Any:
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise UnsupportedSchema("references outside the document are not supported")
        target = self._root
        segments = reference[1:].split("/")
        self._effort.spend(len(segments))
        for segment in filter(None, segments):
            name = segment.replace("~1", "/").replace("~0", "~")
            if not isinstance(target, dict) or name not in target:
                raise UnsupportedSchema(f"the reference {reference[:80]} has no target")
            target = target[name]
        return target

    def _any(self, schema: dict[str, Any], keyword: str, depth: int) -> Any:
        rest = {key: value for key, value in schema.items() if key != keyword}
        branches = list(_non_empty_list(schema[keyword], keyword))
        self._effort.spend(len(branches))
        self._random.shuffle(branches)
        if depth > MAX_OPTIONAL_DEPTH:  # plain values first, so that a recursive schema terminates
            branches.sort(key=_is_nested)
        problem = UnsupportedSchema(f"{keyword} has no supported branch")
        for branch in branches:
            try:
                return self.of({**rest, "allOf": [branch]} if rest else branch, depth + 1)
            except SchemaTooComplex:
                raise
            except UnsupportedSchema as error:
                problem = error
        raise problem

    def _typed(self, schema: dict[str, Any], depth: int) -> Any:
        kind = schema.get("type") or _implied_type(schema)
        if isinstance(kind, list):
            kind = self._random.choice([name for name in kind if name != "null"] or ["null"])
        match kind:
            case "object":
                return self._object(schema, depth)
            case "array":
                return self._array(schema, depth)
            case "string":
                return self._string(schema)
            case "integer" | "number":
                return self._number(schema, kind)
            case "boolean":
                return self._random.random() < 0.5
            case "null":
                return None
        raise UnsupportedSchema(f"the type {str(kind)[:60]!r} is not a JSON type")

    def _object(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        properties, required = schema.get("properties", {}), dict.fromkeys(schema.get("required", []))
        self._effort.spend(len(properties) + len(required))
        members: dict[str, Any] = {}
        for name, subschema in properties.items():
            if name in required:
                members[name] = self.of(subschema, depth + 1)
            elif depth < MAX_OPTIONAL_DEPTH:
                try:
                    members[name] = self.of(subschema, depth + 1)
                except SchemaTooComplex:
                    raise
                except UnsupportedSchema:
                    continue  # an optional property
        for name in required:
            if name not in members:
                members[name] = self.of(schema.get("additionalProperties", True), depth + 1)
        self._effort.write(sum(map(len, members)))
        return members

    def _array(self, schema: dict[str, Any], depth: int) -> list[Any]:
        prefix = schema.get("prefixItems", [])
        self._effort.spend(len(prefix))
        minimum, maximum = schema.get("minItems", 0), schema.get("maxItems", math.inf)
        length = min(max(minimum, len(prefix), 1 if depth < MAX_OPTIONAL_DEPTH else 0), maximum)
        items: list[Any] = [self.of(subschema, depth + 1) for subschema in prefix[: int(length)]]
        while len(items) < length:
            items.append(self.of(schema.get("items", True), depth + 1))
        return items

    def _string(self, schema: dict[str, Any]) -> str:
        text = self._text(schema)
        self._effort.write(len(text))
        return text

    def _text(self, schema: dict[str, Any]) -> str:
        minimum, maximum = schema.get("minLength", 0), schema.get("maxLength", MAX_STRING_CHARACTERS)
        if minimum > MAX_STRING_CHARACTERS or minimum > maximum:
            raise UnsupportedSchema(f"a string would be longer than {min(maximum, MAX_STRING_CHARACTERS)} characters")
        if "pattern" in schema:
            pattern = schema["pattern"]
            for _ in range(16):  # a pattern may match anywhere, but a text that matches entirely is enough
                if minimum <= len(text := matching(pattern, self._random, self._effort)) <= maximum:
                    return text
            raise UnsupportedSchema("no text was found with the required pattern and length")
        if "format" in schema:
            text = _FORMATS.get(schema["format"], "")
            if not text or not minimum <= len(text) <= maximum:
                raise UnsupportedSchema(f"the format {schema['format'][:60]!r} is not supported")
            return text
        words = self._random.choice(_WORDS)
        while len(words) < minimum:
            words += " " + self._random.choice(_WORDS)
        return words[: min(maximum, max(minimum, len(words)))]

    def _number(self, schema: dict[str, Any], kind: str) -> float:
        low = max(schema.get("minimum", -math.inf), schema.get("exclusiveMinimum", -math.inf))
        high = min(schema.get("maximum", math.inf), schema.get("exclusiveMaximum", math.inf))
        first = math.ceil(low) if low > -math.inf else math.floor(min(0, high)) - 8
        candidates: list[float] = list(range(first, first + 10))
        if kind == "number" and math.isfinite(low + high):
            candidates += (low, high, (low + high) / 2)
        above, below = schema.get("exclusiveMinimum", -math.inf), schema.get("exclusiveMaximum", math.inf)
        allowed = [value for value in candidates if low <= value <= high and above < value < below]
        if not allowed:
            raise UnsupportedSchema("no number was found within its bounds")
        chosen = self._random.choice(allowed)
        return int(chosen) if float(chosen).is_integer() else chosen


def _non_empty_list(value: Any, keyword: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise UnsupportedSchema(f"{keyword} is not a list, or is empty")
    return value


def _is_nested(schema: Any) -> bool:
    scalars = ("string", "integer", "number", "boolean", "null")
    return not isinstance(schema, dict) or not ("const" in schema or "enum" in schema or schema.get("type") in scalars)


def _implied_type(schema: dict[str, Any]) -> str:
    return next((kind for kind, keywords in _KEYWORDS.items() if keywords & schema.keys()), "string")

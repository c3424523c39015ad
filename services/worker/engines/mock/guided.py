"""Texts that satisfy a structured output constraint: a choice, a JSON object, or an example of a JSON schema.

Supported keywords of schemas: type, enum, const, properties, required, additionalProperties, items, prefixItems,
minItems, maxItems, minimum, maximum, exclusiveMinimum, exclusiveMaximum, minLength, maxLength, format, anyOf, oneOf,
allOf and $ref within the document. Annotations are ignored; a schema with another keyword is refused. The work is
bounded to about 20 ms, so that it can be done in the event loop.
"""

from __future__ import annotations

import json
import math
from random import Random
from typing import Any

from services.common.base.errors import invalid
from services.worker.contract.generation import StructuredOutput

MAX_CHARACTERS = 262_144
"""Characters of a schema and of its example; one that takes more is refused with INVALID_ARGUMENT."""
MAX_WORK = 131_072
"""Members and characters of schemas visited for one example, 32 for each value; refused with INVALID_ARGUMENT."""
MAX_DEPTH = 32
"""Levels of an example of a JSON schema; a schema that takes more is refused with INVALID_ARGUMENT."""
MAX_OPTIONAL_DEPTH = 3
"""Levels of an example that have optional members and nested alternatives; deeper ones have the required ones only."""

_VALUE_WORK = 32
_ANNOTATIONS = frozenset(
    {"$schema", "$id", "$anchor", "$comment", "$defs", "definitions", "title", "description", "default", "examples"}
    | {"deprecated", "readOnly", "writeOnly", "strict", "name", "contentEncoding", "contentMediaType"}
)
_KEYWORDS = {
    "object": frozenset({"properties", "required", "additionalProperties"}),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "string": frozenset({"minLength", "maxLength", "format"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
}
_SUPPORTED = _ANNOTATIONS.union(
    {"type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "nullable"}, *_KEYWORDS.values()
)
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


class _Unsupported(Exception):
    """No example can be generated; the message is a reason without a full stop."""


class _TooMuchWork(_Unsupported):
    """The bound on the work is reached, so that trying another branch is useless."""


def guided_text(guided: StructuredOutput, random: Random) -> str:
    """Returns a text that satisfies the constraint, determined by the state of `random`.

    Raises:
        SluiceError: INVALID_ARGUMENT for an invalid or unsupported constraint.
    """
    try:
        if guided.kind == "choice":
            return str(random.choice(tuple(guided.grammar)))
        if guided.kind == "json_object":
            return json.dumps({"answer": random.choice(_WORDS)})
        if guided.kind == "json_schema":
            return _example_of(str(guided.grammar), random)
        raise _Unsupported("this kind of constraint is not supported")
    except _Unsupported as error:
        problem = f"The mock engine does not support this {guided.kind}: {error}."
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError):
        problem = f"This {guided.kind} has a keyword with a value of the wrong type."
    except RecursionError:
        problem = f"This {guided.kind} is nested too deeply; simplify it."
    raise invalid(problem, param="response_format", code="invalid_value")


def _example_of(document: str, random: Random) -> str:
    if len(document) > MAX_CHARACTERS:
        raise _Unsupported(f"it is longer than {MAX_CHARACTERS} characters")
    schema = json.loads(document)
    text = json.dumps(_Example(schema, random).of(schema), ensure_ascii=False)
    text.encode()  # raises ValueError for half a surrogate pair
    if len(text) > MAX_CHARACTERS:
        raise _TooMuchWork(f"an example is longer than {MAX_CHARACTERS} characters")
    return text


class _Example:
    """Generates a value of a schema; references are relative to `root`."""

    def __init__(self, root: Any, random: Random) -> None:
        self._root = root
        self._random = random
        self._work = MAX_WORK

    def of(self, schema: Any, depth: int = 0) -> Any:
        """Returns a value that satisfies the schema; raises _Unsupported when none can be generated."""
        self._spend(_VALUE_WORK)
        if depth > MAX_DEPTH:
            raise _Unsupported("it is nested too deeply")
        if schema is True:
            return self._random.choice(_WORDS)
        if not isinstance(schema, dict):
            raise _Unsupported("a part of it allows no value or is not a schema")
        schema = self._merged(schema, depth)
        if unknown := sorted(schema.keys() - _SUPPORTED):
            raise _Unsupported(f"the keyword {unknown[0][:60]!r} is not supported")
        if "const" in schema:
            return self._constant(schema["const"])
        if "enum" in schema:
            return self._constant(self._random.choice(schema["enum"]))
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                return self._alternative(schema, keyword, depth)
        return self._typed(schema, depth)

    def _spend(self, work: int) -> None:
        """Counts work before it is done."""
        self._work -= work
        if self._work < 0:
            raise _TooMuchWork("generating an example takes too much work")

    def _constant(self, value: Any) -> Any:
        """Counts a value of the document, which may be large and referenced many times."""
        self._spend(len(json.dumps(value)))
        return value

    def _merged(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        """Returns the schema merged with its reference and the members of `allOf`."""
        self._spend(_VALUE_WORK + len(schema))
        if "$ref" not in schema and "allOf" not in schema:
            return schema
        if depth > MAX_DEPTH:
            raise _Unsupported("references are circular")
        merged = {key: value for key, value in schema.items() if key not in ("$ref", "allOf")}
        parts = [self._resolved(schema["$ref"])] if "$ref" in schema else []
        for part in (*parts, *schema.get("allOf", ())):
            if not isinstance(part, dict):
                raise _Unsupported("allOf and $ref require schemas that are objects")
            for key, value in self._merged(part, depth + 1).items():
                merged[key] = self._both(key, merged[key], value) if key in merged else value
        return merged

    def _both(self, key: str, one: Any, other: Any) -> Any:
        """Returns a value of a keyword that satisfies both values."""
        if key in _ANNOTATIONS or one is other or (not isinstance(one, list | dict) and one == other):
            return one
        if key == "properties":
            self._spend(len(one) + len(other))
            return {**one, **other, **{name: {"allOf": [one[name], other[name]]} for name in one.keys() & other.keys()}}
        if key == "required":
            self._spend(len(one) + len(other))
            return [*one, *other]
        raise _Unsupported(f"two values of {key!r} cannot be combined")

    def _resolved(self, reference: Any) -> Any:
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise _Unsupported("references outside the document are not supported")
        self._spend(len(reference))
        target = self._root
        for segment in filter(None, reference[1:].split("/")):
            name = segment.replace("~1", "/").replace("~0", "~")
            if not isinstance(target, dict) or name not in target:
                raise _Unsupported(f"the reference {reference[:80]} has no target")
            target = target[name]
        return target

    def _alternative(self, schema: dict[str, Any], keyword: str, depth: int) -> Any:
        rest = {key: value for key, value in schema.items() if key != keyword}
        branches = list(schema[keyword])
        self._spend(len(branches))
        self._random.shuffle(branches)
        if depth > MAX_OPTIONAL_DEPTH:  # plain values first, so that a recursive schema terminates
            branches.sort(key=_is_nested)
        problem = _Unsupported(f"{keyword} has no supported branch")
        for branch in branches:
            try:
                return self.of({**rest, "allOf": [branch]} if rest else branch, depth + 1)
            except _TooMuchWork:
                raise
            except _Unsupported as error:
                problem = error
        raise problem

    def _typed(self, schema: dict[str, Any], depth: int) -> Any:
        kind = schema.get("type") or next((kind for kind, own in _KEYWORDS.items() if own & schema.keys()), "string")
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
                return _number(schema, kind)
            case "boolean":
                return self._random.random() < 0.5
            case "null":
                return None
        raise _Unsupported(f"the type {str(kind)[:60]!r} is not a JSON type")

    def _object(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        properties, required = schema.get("properties", {}), dict.fromkeys(schema.get("required", []))
        self._spend(len(properties) + sum(map(len, required)))
        members: dict[str, Any] = {}
        for name in (*properties, *(name for name in required if name not in properties)):
            if name not in required and depth >= MAX_OPTIONAL_DEPTH:
                continue
            try:
                members[name] = self.of(properties.get(name, schema.get("additionalProperties", True)), depth + 1)
            except _TooMuchWork:
                raise
            except _Unsupported:
                if name in required:
                    raise
        return members

    def _array(self, schema: dict[str, Any], depth: int) -> list[Any]:
        prefix = schema.get("prefixItems", [])
        fewest = max(schema.get("minItems", 0), len(prefix), 1 if depth < MAX_OPTIONAL_DEPTH else 0)
        length = int(min(fewest, schema.get("maxItems", math.inf)))
        self._spend(_VALUE_WORK * length)
        return [
            self.of(prefix[index] if index < len(prefix) else schema.get("items", True), depth + 1)
            for index in range(length)
        ]

    def _string(self, schema: dict[str, Any]) -> str:
        minimum, maximum = schema.get("minLength", 0), schema.get("maxLength", MAX_CHARACTERS)
        self._spend(minimum)
        if minimum > maximum:
            raise _Unsupported("no string has the required length")
        if "format" not in schema:
            return self._random.choice(_WORDS).ljust(minimum, ".")[:maximum]
        text = _FORMATS.get(schema["format"], "")
        if not text or not minimum <= len(text) <= maximum:
            raise _Unsupported(f"the format {str(schema['format'])[:60]!r} is not supported")
        return text


def _number(schema: dict[str, Any], kind: str) -> float:
    low, above = schema.get("minimum", -math.inf), schema.get("exclusiveMinimum", -math.inf)
    high, below = schema.get("maximum", math.inf), schema.get("exclusiveMaximum", math.inf)
    lowest, highest = max(low, above), min(high, below)
    first = math.ceil(lowest) if lowest > -math.inf else math.floor(min(1, highest))
    candidates: list[float] = [first, first + 1, first - 1]
    if kind == "number" and math.isfinite(lowest + highest):
        candidates += (lowest, (lowest + highest) / 2)
    for value in candidates:
        if lowest <= value <= highest and above < value < below:
            return int(value) if float(value).is_integer() else value
    raise _Unsupported("no number was found within its bounds")


def _is_nested(schema: Any) -> bool:
    scalars = ("string", "integer", "number", "boolean", "null")
    return not isinstance(schema, dict) or not ("const" in schema or "enum" in schema or schema.get("type") in scalars)

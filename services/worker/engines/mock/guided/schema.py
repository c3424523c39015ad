"""An example of a JSON schema.

Understood: type, enum, const, properties, required, additionalProperties, items, prefixItems, minItems, maxItems,
uniqueItems, minProperties, maxProperties, minimum, maximum, exclusiveMinimum, exclusiveMaximum, multipleOf, minLength,
maxLength, pattern, format, anyOf, oneOf, allOf and $ref within the document.

Keywords that only describe are skipped; every other keyword is out of reach.
"""

from __future__ import annotations

import math
from random import Random
from typing import Any

from services.worker.engines.mock.guided.effort import Effort, SchemaTooComplex, UnsupportedSchema
from services.worker.engines.mock.guided.regex import matching

DEEPEST = 32
OPTIONAL_UNTIL = 3
MOST_VALUES = 10_000
LONGEST = 4_096

_DESCRIBE = frozenset(
    {"$schema", "$id", "$anchor", "$comment", "$defs", "definitions", "title", "description", "default", "examples"}
    | {"deprecated", "readOnly", "writeOnly", "strict", "name", "contentEncoding", "contentMediaType"}
)
_KEYWORDS = {
    "object": frozenset({"properties", "required", "additionalProperties", "minProperties", "maxProperties"}),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems", "uniqueItems"}),
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
}
_EVERYWHERE = frozenset({"type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "nullable"})
_KNOWN = _DESCRIBE.union(_EVERYWHERE, *_KEYWORDS.values())
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
    """Makes values.

    Args:
        root: the document that references point into.
        effort: what all of it may cost: every loop over a part of the document, and every text, is counted before it.
    """

    def __init__(self, root: Any, random: Random, effort: Effort) -> None:
        self._root = root
        self._random = random
        self._effort = effort
        self._made = 0

    def of(self, schema: Any, depth: int = 0) -> Any:
        """A value that satisfies the schema; OutOfReach when none can be made."""
        self._made += 1
        if self._made > MOST_VALUES:
            raise SchemaTooComplex("it demands too many values")
        if depth > DEEPEST:
            raise UnsupportedSchema("it is nested too deeply")
        if schema is True:
            return self._random.choice(_WORDS)
        if not isinstance(schema, dict):
            raise UnsupportedSchema("a part of it allows nothing or is no schema")
        schema = self._merged(schema, depth)
        if unknown := sorted(schema.keys() - _KNOWN):
            raise UnsupportedSchema(f"the keyword {unknown[0][:60]!r} is not supported")
        if "const" in schema:
            return self._given(schema["const"])
        if "enum" in schema:
            return self._given(self._random.choice(_filled(schema["enum"], "enum")))
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                return self._any(schema, keyword, depth)
        return self._typed(schema, depth)

    def _given(self, value: Any) -> Any:
        """A value that the document spells out; it may be large, and referred to many times."""
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
        """The schema with its references and the parts of `allOf` folded in."""
        self._effort.spend(1 + len(schema))
        if "$ref" not in schema and "allOf" not in schema:
            return schema
        if depth > DEEPEST:
            raise UnsupportedSchema("references run in a circle")
        merged = {key: value for key, value in schema.items() if key not in ("$ref", "allOf")}
        parts = [self._referred(schema["$ref"])] if "$ref" in schema else []
        for part in (*parts, *schema.get("allOf", ())):
            if not isinstance(part, dict):
                raise UnsupportedSchema("allOf and $ref need schemas that are objects")
            for key, value in self._merged(part, depth + 1).items():
                merged[key] = self._both(key, merged[key], value) if key in merged else value
        return merged

    def _both(self, key: str, one: Any, other: Any) -> Any:
        """What satisfies both values of a keyword."""
        self._effort.spend(self._size(one) + self._size(other))
        if one == other or key in _DESCRIBE:
            return one
        if key == "properties":
            return {
                **one,
                **{name: {"allOf": [one[name], part]} if name in one else part for name, part in other.items()},
            }
        if key == "required":
            return list(dict.fromkeys([*one, *other]))
        if key == "enum":
            self._effort.spend(len(one) * len(other))
            return [value for value in one if value in other]
        if key == "type":
            return _common_type(one, other)
        if key.startswith(("min", "exclusiveMin")):
            return max(one, other)
        if key.startswith(("max", "exclusiveMax")):
            return min(one, other)
        raise UnsupportedSchema(f"two demands on {key!r} cannot be put together")

    def _size(self, schema: Any) -> int:
        """How much a branch demands, roughly; looked at as far as the effort lasts."""
        waiting, size = [schema], 0
        while waiting:
            node = waiting.pop()
            size += 1
            self._effort.spend()
            if isinstance(node, dict | list):
                waiting += node.values() if isinstance(node, dict) else node
        return size

    def _referred(self, reference: Any) -> Any:
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise UnsupportedSchema("a reference leads out of the document")
        found = self._root
        parts = reference[1:].split("/")
        self._effort.spend(len(parts))
        for part in filter(None, parts):
            name = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, dict) or name not in found:
                raise UnsupportedSchema(f"the reference {reference[:80]} leads nowhere")
            found = found[name]
        return found

    def _any(self, schema: dict[str, Any], keyword: str, depth: int) -> Any:
        rest = {key: value for key, value in schema.items() if key != keyword}
        branches = list(_filled(schema[keyword], keyword))
        self._effort.spend(len(branches))
        self._random.shuffle(branches)
        # A recursive schema ends where a branch does: the flat ones come first once it is deep.
        if depth > OPTIONAL_UNTIL:
            branches.sort(key=self._size)
        problem = UnsupportedSchema(f"{keyword} has no branch that can be followed")
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
            kind = self._random.choice([one for one in kind if one != "null"] or ["null"])
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
        raise UnsupportedSchema(f"the type {str(kind)[:60]!r} is not one of JSON's")

    def _object(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        properties, required = schema.get("properties", {}), dict.fromkeys(schema.get("required", []))
        self._effort.spend(len(properties) + len(required))
        made: dict[str, Any] = {}
        for name, part in properties.items():
            if name in required:
                made[name] = self.of(part, depth + 1)
            elif depth < OPTIONAL_UNTIL:
                try:
                    made[name] = self.of(part, depth + 1)
                except SchemaTooComplex:
                    raise
                except UnsupportedSchema:
                    continue  # it may be left out
        for name in required:
            if name not in made:
                made[name] = self.of(schema.get("additionalProperties", True), depth + 1)
        while len(made) < schema.get("minProperties", 0):
            made[f"more{len(made)}"] = self.of(schema.get("additionalProperties", True), depth + 1)
        if len(made) > schema.get("maxProperties", math.inf):
            made = {name: value for name, value in made.items() if name in required}
        self._effort.write(sum(map(len, made)))
        return made

    def _array(self, schema: dict[str, Any], depth: int) -> list[Any]:
        first = schema.get("prefixItems", [])
        self._effort.spend(len(first))
        least, most = schema.get("minItems", 0), schema.get("maxItems", math.inf)
        wanted = min(max(least, len(first), 1 if depth < OPTIONAL_UNTIL else 0), most)
        made: list[Any] = [self.of(part, depth + 1) for part in first[: int(wanted)]]
        for _ in range(16 * (1 + int(min(wanted, MOST_VALUES)))):
            if len(made) >= wanted:
                return made
            value = self.of(schema.get("items", True), depth + 1)
            self._effort.spend(len(made) if schema.get("uniqueItems") else 1)
            if not (schema.get("uniqueItems") and value in made):
                made.append(value)
        if len(made) < wanted:
            raise UnsupportedSchema("an array demands more different items than were found")
        return made

    def _string(self, schema: dict[str, Any]) -> str:
        text = self._text(schema)
        self._effort.write(len(text))
        return text

    def _text(self, schema: dict[str, Any]) -> str:
        least, most = schema.get("minLength", 0), schema.get("maxLength", LONGEST)
        if least > LONGEST or least > most:
            raise UnsupportedSchema(f"a string would be longer than {min(most, LONGEST)} characters")
        if "pattern" in schema:
            pattern = schema["pattern"]
            for _ in range(16):  # a pattern may match anywhere in the text; one that matches all of it will do
                if least <= len(text := matching(pattern, self._random, self._effort)) <= most:
                    return text
            raise UnsupportedSchema("a pattern and the length of its string do not go together")
        if "format" in schema:
            text = _FORMATS.get(schema["format"], "")
            if not text or not least <= len(text) <= most:
                raise UnsupportedSchema(f"the format {schema['format'][:60]!r} is not supported")
            return text
        words = self._random.choice(_WORDS)
        while len(words) < least:
            words += " " + self._random.choice(_WORDS)
        return words[: min(most, max(least, len(words)))]

    def _number(self, schema: dict[str, Any], kind: str) -> float:
        step = schema.get("multipleOf", 1)
        low, high = schema.get("minimum", -math.inf), schema.get("maximum", math.inf)
        above, below = schema.get("exclusiveMinimum", -math.inf), schema.get("exclusiveMaximum", math.inf)
        if kind == "integer" and step != int(step):
            step = 1 if (1 / step).is_integer() else step * 10
        start = max(low, above)
        if math.isinf(start):
            start = min(0, high, below)
        first = math.ceil(start / step) if low > -math.inf or above > -math.inf else math.floor(start / step) - 8
        candidates = [number * step for number in range(first, first + 10)]
        if kind == "number" and "multipleOf" not in schema:
            candidates.append((max(low, above) + min(high, below)) / 2)
        fitting = [value for value in candidates if low <= value <= high and above < value < below]
        if not fitting:
            raise UnsupportedSchema("no number fits its bounds")
        chosen: float = self._random.choice(fitting)
        return int(chosen) if float(chosen).is_integer() else chosen


def _filled(value: Any, keyword: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise UnsupportedSchema(f"{keyword} is no list or an empty one")
    return value


def _common_type(one: Any, other: Any) -> Any:
    left, right = ([kind] if isinstance(kind, str) else list(kind) for kind in (one, other))
    common = [kind for kind in left if kind in right]
    if not common:
        raise UnsupportedSchema("allOf demands two types at once")
    return common


def _implied_type(schema: dict[str, Any]) -> str:
    return next((kind for kind, keywords in _KEYWORDS.items() if keywords & schema.keys()), "string")

"""Every documented field of a request body, with values that its JSON schema does not allow.

The schemas are those of the OpenAPI document; a validator of its own decides what is wrong, so that no list is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jsonschema import Draft202012Validator

Path = tuple[str | int, ...]
JSON: list[Any] = [None, True, -1, 2**70, 1.5, 1e300, "", "x", [], [None], ["x", 1], {}, {"x": None}, {"type": "x"}]
"""At least one value of every type, and some that are out of most ranges."""


@dataclass(frozen=True, slots=True)
class Wrong:
    """A body in which one thing is wrong.

    Attributes:
        path: of the field at fault.
        what: `value`, `missing` or `unknown`.
        among: of the innermost thing on the way that is one of several kinds: what is wrong with it may be its kind.
    """

    path: Path
    what: str
    value: Any
    body: dict[str, Any]
    among: Path = ()


Part = tuple[Path, str, Any, Any, Path]
"""Path, what is wrong, the value, the whole top-level field and `among`."""


class Document:
    """An OpenAPI document."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._document = document

    def bodies(self) -> dict[str, dict[str, Any]]:
        """The schema of the JSON body of every POST that has one, by path."""
        found = {}
        for path, methods in self._document["paths"].items():
            if body := methods.get("post", {}).get("requestBody"):
                found[path] = self._resolved(body["content"]["application/json"]["schema"])
        return found

    def wrong(self, schema: dict[str, Any], base: dict[str, Any]) -> Iterator[Wrong]:
        """Bodies made from a valid one, each with one thing wrong."""
        for name in schema.get("required", ()):
            yield Wrong((name,), "missing", None, {key: value for key, value in base.items() if key != name})
        yield Wrong(("no_such_field",), "unknown", 1, {**base, "no_such_field": 1})
        for name, field in schema["properties"].items():
            valid = Draft202012Validator({**field, "components": self._document["components"]})
            for path, what, value, whole, among in self._within(field, (name,), ()):
                if not valid.is_valid(whole):
                    yield Wrong(path, what, value, {**base, name: whole}, among)

    def _within(self, schema: dict[str, Any], path: Path, among: Path) -> Iterator[Part]:
        """Values of a field and of whatever lies in it."""
        schema = self._resolved(schema)
        branches = self._branches(schema)
        for value in [*JSON, *_beyond(schema)]:
            yield path, "value", value, value, among
        if sum("properties" in branch for branch in branches) > 1:
            among = path
        for branch in branches:
            if "properties" in branch:
                yield from self._within_object(branch, path, among)
            elif "items" in branch:
                for part, what, value, whole, kind in self._within(branch["items"], (*path, 0), among):
                    yield part, what, value, [whole], kind

    def _within_object(self, branch: dict[str, Any], path: Path, among: Path) -> Iterator[Part]:
        example = self._example(branch)
        for name in branch.get("required", ()):
            rest = {key: value for key, value in example.items() if key != name}
            yield (*path, name), "missing", None, rest, among
        if branch.get("additionalProperties") is False:
            yield (*path, "no_such_field"), "unknown", 1, {**example, "no_such_field": 1}, among
        for name, field in branch["properties"].items():
            for part, what, value, whole, kind in self._within(field, (*path, name), among):
                yield part, what, value, {**example, name: whole}, kind

    def _example(self, schema: dict[str, Any]) -> Any:
        """A small value that the schema allows."""
        schema = self._branches(self._resolved(schema))[0]
        for key in ("const", "enum"):
            if key in schema:
                return schema[key][0] if key == "enum" else schema[key]
        kind = schema.get("type")
        kind = kind[0] if isinstance(kind, list) else kind
        if kind == "object":
            fields = schema.get("properties", {})
            return {name: self._example(fields[name]) for name in schema.get("required", ())}
        if kind == "array":
            return [self._example(schema["items"])] * schema.get("minItems", 0) if "items" in schema else []
        simple = {"string": "a", "integer": 1, "number": 1, "boolean": True}
        return simple.get(str(kind))

    def _branches(self, schema: dict[str, Any]) -> list[dict[str, Any]]:
        branches = schema.get("anyOf") or schema.get("oneOf")
        return [self._resolved(each) for each in branches] if branches else [schema]

    def _resolved(self, schema: dict[str, Any]) -> dict[str, Any]:
        while "$ref" in schema:
            schema = self._document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        return schema


def _beyond(schema: dict[str, Any]) -> Iterator[Any]:
    """Values just outside the bounds of a schema and of its branches."""
    for branch in [schema, *schema.get("anyOf", ())]:
        for bound, step in (("minimum", -1), ("exclusiveMinimum", 0), ("maximum", 1), ("exclusiveMaximum", 0)):
            if bound in branch:
                yield branch[bound] + step
        if "maxLength" in branch:
            yield "x" * (branch["maxLength"] + 1)
        if branch.get("maxItems", 2**20) < 2**12:
            yield [1] * (branch["maxItems"] + 1)
            yield ["x"] * (branch["maxItems"] + 1)
        if "maxProperties" in branch:
            yield {str(number): 0 for number in range(branch["maxProperties"] + 1)}

"""Schemas that cost a naive engine minutes, gigabytes or its life."""

from __future__ import annotations

import json
from typing import Any

from services.worker.contract.generation import StructuredOutput


def schema(document: Any) -> StructuredOutput:
    """A JSON schema as an engine gets it."""
    return StructuredOutput("json_schema", json.dumps(document))


def regex(pattern: str) -> StructuredOutput:
    """A regular expression as an engine gets it."""
    return StructuredOutput("regex", pattern)


def tree(keyword: str, leaf: Any, branches: int = 10, depth: int = 12) -> StructuredOutput:
    """A schema of a dozen definitions that is `branches` to the power of `depth` when it is written out."""
    definitions = {f"d{i}": {keyword: [{"$ref": f"#/$defs/d{i + 1}"}] * branches} for i in range(depth)}
    return schema({"$defs": {**definitions, f"d{depth}": leaf}, "$ref": "#/$defs/d0"})


def repeated_constant(constant: Any) -> StructuredOutput:
    """An array that holds a large value thousands of times."""
    return schema(
        {"$defs": {"c": {"const": constant}}, "type": "array", "items": {"$ref": "#/$defs/c"}, "minItems": 9_000}
    )


_MANY = [f"q{index}" for index in range(8_000)]

GRAMMARS = {
    "a surrogate": schema({"const": "\ud800"}),
    "allOf of allOf": tree("allOf", {}),
    "anyOf of anyOf": tree("anyOf", {"not": {}}),
    "a long constant, often": repeated_constant("x" * 100_000),
    "a wide constant, often": repeated_constant(["x"] * 20_000),
    "many required": schema({"properties": {f"p{index}": {} for index in range(8_000)}, "required": _MANY}),
    "two enumerations": schema({"allOf": [{"enum": list(range(10_000))}, {"enum": list(range(10_000, 20_000))}]}),
    "long strings": schema({"type": "array", "items": {"minLength": 4_000}, "minItems": 9_000}),
    "different booleans": schema(
        {"type": "array", "items": {"type": "boolean"}, "minItems": 9_000, "uniqueItems": True}
    ),
    "a long name": schema({"required": ["x" * 200_000]}),
}
"""None of them can be followed within bounds."""

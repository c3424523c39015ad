"""A tool_choice that demands a call, as a schema for engines that can follow one.

The answer is then one object `{"name": …, "parameters": {…}}` of a function that may be called, whatever form the
model itself would have written calls in. Engines without schemas are left to the model, and postprocess says when it
does not do what was demanded.
"""

from __future__ import annotations

from typing import Any

import orjson

from services.gateway.apis.openai.json_schema import check_schema
from services.gateway.core.request import StructuredOutput

CALL_PARSER = "llama3_json"
"""Postprocess' name for the parser of such an object."""


def forced_call(tools: list[dict[str, Any]], tool_choice: Any) -> StructuredOutput | None:
    """The schema of a demanded call; None when none is demanded, or when the tools' schemas cannot live in one.

    Args:
        tools: of a chat; `SchemaMeter` has counted their parameters.

    Raises:
        SluiceError: INVALID_ARGUMENT naming the tool whose parameters are no schema.
    """
    if tool_choice in (None, "none", "auto"):
        return None
    definitions: dict[str, Any] = {}
    calls = []
    for index, tool in enumerate(tools):
        function = tool["function"]
        if tool_choice != "required" and function.get("name") != tool_choice["function"]["name"]:
            continue
        parameters = function.get("parameters") or {"type": "object", "properties": {}}
        check_schema(parameters, f"tools[{index}].function.parameters")
        parameters = dict(parameters)
        for name, definition in (parameters.pop("$defs", None) or {}).items():
            if definitions.setdefault(name, definition) != definition:
                return None
        if _points_elsewhere(parameters):
            return None
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": function.get("name")}, "parameters": parameters},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    if not calls:
        return None
    schema = calls[0] if len(calls) == 1 else {"anyOf": calls}
    return StructuredOutput(
        "json_schema", orjson.dumps({**schema, **({"$defs": definitions} if definitions else {})}).decode()
    )


def _points_elsewhere(schema: Any) -> bool:
    """Whether a reference would not be found any more once the schema is a part of another."""
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            reference = node.get("$ref")
            if isinstance(reference, str) and not reference.startswith("#/$defs/"):
                return True
            waiting += node.values()
        elif isinstance(node, list):
            waiting += node
    return False

"""Enforces a tool_choice that requires a call, with a JSON schema for engines with structured output.

The output is then one object `{"name": …, "parameters": {…}}`, whatever the model's own format of calls. Without
structured output the model may ignore the tool_choice; postprocess reports that.
"""

from __future__ import annotations

from typing import Any

import orjson

from services.common.base.errors import invalid, quoted
from services.gateway.apis.openai.json_schema import check_schema
from services.gateway.core.request import StructuredOutput

CALL_PARSER = "llama3_json"
"""Postprocess' parser of such an object."""


def forced_call(tools: list[dict[str, Any]], tool_choice: Any) -> StructuredOutput | None:
    """Returns the schema of a required call; None if no call is required, or the tools' schemas cannot be combined.

    Args:
        tools: the chat's tools, already measured by `SchemaMeter`.

    Raises:
        SluiceError: INVALID_ARGUMENT naming the tool whose parameters are not a valid schema, or define a name of
            `$defs` differently than an earlier tool.
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
                raise invalid(
                    f"tools[{index}].function.parameters.$defs has another definition of {quoted(name)} than an "
                    "earlier tool; with a tool_choice that requires a call, use different names.",
                    param=f"tools[{index}].function.parameters",
                    code="invalid_value",
                )
        if _has_unresolvable_reference(parameters):
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


def _has_unresolvable_reference(schema: Any) -> bool:
    """Returns whether a reference would not resolve once the schema is embedded in another."""
    pending = [schema]
    while pending:
        node = pending.pop()
        if isinstance(node, dict):
            reference = node.get("$ref")
            if isinstance(reference, str) and not reference.startswith("#/$defs/"):
                return True
            pending += node.values()
        elif isinstance(node, list):
            pending += node
    return False

"""Types of arguments according to the tools' schemas, and values written as text converted to JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from services.postprocess.parsers.calls.call_names import is_plain_name
from services.postprocess.parsers.scanning.json_scan import Malformed
from services.postprocess.parsers.scanning.py_literal import PyLiteral

NULLS = ("null", "None")
MAX_SCHEMAS = 64
"""Maximum schemas that are read for the type of one argument."""

_KINDS = {'"': "string", "{": "object", "[": "array", "t": "boolean", "f": "boolean"}


class ArgumentType(NamedTuple):
    """Type of an argument.

    Attributes:
        kinds: JSON types other than null, in the order of the schema; empty for any.
        nullable: null is allowed.
    """

    kinds: tuple[str, ...] = ()
    nullable: bool = False

    @property
    def text(self) -> bool:
        """Whether the first type is a string, so that a value is the text as written."""
        return self.kinds[:1] == ("string",)


ANY = ArgumentType()
TEXT = ArgumentType(("string",))
UNDECLARED = TEXT
"""Type of an argument that the tool does not declare."""


class ArgumentTypes:
    """Types of the arguments of a request's tools.

    Args:
        tools: of the request, in OpenAI format.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}

    def __call__(self, function: str, argument: str) -> ArgumentType:
        """Returns the type of an argument."""
        parameters = self._schemas.get(function)
        schema = self._declared(function, argument)
        if schema is None and isinstance(parameters, dict):
            schema = parameters.get("additionalProperties")
        return type_of(schema, parameters)

    def parameters(self, function: str) -> Any:
        """Returns the schema of a tool's arguments; None for none."""
        return self._schemas.get(function)

    def requires(self, function: str, argument: str) -> bool:
        """Returns whether a tool cannot be called without this argument."""
        schema = self._schemas.get(function)
        required = schema.get("required") if isinstance(schema, dict) else None
        return isinstance(required, list) and argument in required

    def declares(self, function: str, argument: str) -> bool:
        """Returns whether a tool has this argument."""
        return self._declared(function, argument) is not None

    def has(self, function: str) -> bool:
        """Returns whether the request has this tool, or no tools, so that it may be any with a plain name."""
        return function in self._schemas if self._schemas else is_plain_name(function)

    def _declared(self, function: str, argument: str) -> Any:
        schema = self._schemas.get(function)
        properties = schema.get("properties") if isinstance(schema, dict) else None
        return properties.get(argument) if isinstance(properties, dict) else None


def type_of(schema: Any, root: Any) -> ArgumentType:
    """Returns the type of a schema; that of undeclared arguments if it is none.

    Args:
        root: the schema in which references are found.
    """
    if not isinstance(schema, dict):
        return UNDECLARED
    kinds = list(dict.fromkeys(_kinds(schema, root)))
    return ArgumentType(tuple(kind for kind in kinds if kind != "null"), "null" in kinds)


def member_of(schema: Any, name: str, root: Any) -> Any:
    """Returns the schema of a member of an object; None for none."""
    schema = _followed(schema, root)
    properties = schema.get("properties")
    declared = properties.get(name) if isinstance(properties, dict) else None
    return declared if declared is not None else schema.get("additionalProperties")


def item_of(schema: Any, root: Any) -> Any:
    """Returns the schema of the items of an array; None for none."""
    return _followed(schema, root).get("items")


def _followed(schema: Any, root: Any) -> dict[str, Any]:
    """Returns the schema that a reference names, or the schema itself; empty for none."""
    if isinstance(schema, dict) and "$ref" in schema:
        schema = _resolved(schema["$ref"], root)
    return schema if isinstance(schema, dict) else {}


def _kinds(schema: Any, root: Any) -> Iterator[str]:
    """Yields the types that a schema allows, with repetitions."""
    waiting, left = [schema], MAX_SCHEMAS
    while waiting and left:
        left -= 1
        found = waiting.pop()
        if not isinstance(found, dict):
            continue
        kind = found.get("type")
        if isinstance(kind, str | list):
            yield from (one for one in ([kind] if isinstance(kind, str) else kind) if isinstance(one, str))
        if "default" in found and found["default"] is None:
            yield "null"
        inner = [_resolved(found.get("$ref"), root)]
        for word in ("anyOf", "oneOf", "allOf"):
            inner += found[word] if isinstance(found.get(word), list) else []
        if not kind:
            values = found.get("enum", [found["const"]] if "const" in found else [])
            values = values[:MAX_SCHEMAS] if isinstance(values, list) else []
            inner.append({"type": [_kind_of(value) for value in values]})
        waiting += reversed(inner)


def _resolved(reference: Any, root: Any) -> Any:
    """Returns the schema at a reference within the tool's parameters, such as `#/$defs/City`."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    for part in reference[2:].split("/"):
        root = root.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(root, dict) else None
    return root


def _kind_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    for kind, name in ((str, "string"), (list, "array"), (dict, "object")):
        if isinstance(value, kind):
            return name
    return "null"


def as_json(text: str, wanted: ArgumentType = ANY) -> str:
    """Returns a value as JSON: unchanged if it is valid JSON of an allowed type, else as a string.

    Converts the words True, False and None, and lists, dictionaries and tuples as Python writes them.
    """
    value = text.strip()
    if value in NULLS and (wanted.nullable or not wanted.kinds or "string" not in wanted.kinds):
        return "null"
    word = value.lower()
    if word in ("true", "false") and ("boolean" in wanted.kinds or value in ("True", "False", "true", "false")):
        found: str | None = word
    elif _is_json(value):
        found = value
    else:
        found = _from_python(value) if value[:1] in ("[", "{", "(") and {"array", "object"} & {*wanted.kinds} else None
    if found is None or ("string" in wanted.kinds and not _allowed(found, wanted.kinds)):
        return json.dumps(text, ensure_ascii=False)
    return found


def _allowed(value: str, kinds: tuple[str, ...]) -> bool:
    kind = _KINDS.get(value[0])
    return kind in kinds if kind else "integer" in kinds or "number" in kinds


def _is_json(value: str) -> bool:
    try:
        json.loads(value, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(word: str) -> None:
    raise ValueError(word)


def _from_python(value: str) -> str | None:
    """Returns a Python literal as JSON; None if it is not one."""
    literal, at, parts = PyLiteral(), 0, list[str]()
    try:
        while at < len(value) and not literal.done:
            at, piece = literal.push(value, at)
            parts.append(piece)
    except Malformed:
        return None
    return "".join(parts) if literal.done and at == len(value) else None

"""Constraints on the output: from a request's many names for them to the one that the engine gets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import orjson

from services.common.errors import invalid
from services.gateway.generation import Guided
from services.gateway.openai.guided_schemas import GuidedFields, ResponseFormat, StructuredOutputs
from services.gateway.openai.json_schema import check_regex, check_schema

CAPABILITIES = {
    "json_schema": "guided_json",
    "json_object": "guided_json",
    "regex": "guided_regex",
    "ebnf": "guided_grammar",
    "choice": "guided_choice",
    "structural_tag": "structural_tag",
}
"""What an engine must be able to do for each kind of constraint."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """A constraint, the field that asks for it, and what the engine must be able to do."""

    guided: Guided
    field: str

    @property
    def needs(self) -> tuple[str, str]:
        """Capability and field."""
        return CAPABILITIES[self.guided.kind], self.field


def constraint(fields: GuidedFields) -> Constraint | None:
    """The constraint of a request, checked; None when there is none.

    Raises:
        SluiceError: INVALID_ARGUMENT naming the field of a schema, pattern or grammar that is none, or of the second
            constraint where there are two.
    """
    found = list(_constraints(fields))
    if len(found) > 1:
        raise invalid(
            f"{found[1].field} and {found[0].field} exclude each other; one constraint is possible.",
            param=found[1].field,
            code="invalid_value",
        )
    return found[0] if found else None


def _constraints(fields: GuidedFields) -> Iterator[Constraint]:
    if fields.response_format is not None and fields.response_format.type != "text":
        yield Constraint(_of_format(fields.response_format), "response_format")
    if fields.structured_outputs is not None:
        yield _of_structured_outputs(fields.structured_outputs)
    for name in ("guided_json", "json_schema"):
        if (document := getattr(fields, name)) is not None:
            yield Constraint(_schema(document, name), name)
    for name in ("guided_regex", "regex"):
        if (pattern := getattr(fields, name)) is not None:
            yield Constraint(_regex(pattern, name), name)
    for name in ("guided_grammar", "ebnf"):
        if (grammar := getattr(fields, name)) is not None:
            yield Constraint(_grammar(grammar, name), name)
    if fields.guided_choice is not None:
        yield Constraint(Guided("choice", tuple(fields.guided_choice)), "guided_choice")


def _of_format(form: ResponseFormat) -> Guided:
    if form.type == "json_object":
        return Guided("json_object")
    if form.type == "structural_tag":
        return Guided("structural_tag", orjson.dumps({"type": form.type, **(form.model_extra or {})}).decode())
    assert form.json_schema is not None
    return _schema(form.json_schema.schema_document, "response_format.json_schema.schema")


def _of_structured_outputs(outputs: StructuredOutputs) -> Constraint:
    if outputs.json_ is not None:
        field = "structured_outputs.json"
        return Constraint(_schema(outputs.json_, field), field)
    if outputs.regex is not None:
        field = "structured_outputs.regex"
        return Constraint(_regex(outputs.regex, field), field)
    if outputs.choice is not None:
        return Constraint(Guided("choice", tuple(outputs.choice)), "structured_outputs.choice")
    if outputs.grammar is not None:
        field = "structured_outputs.grammar"
        return Constraint(_grammar(outputs.grammar, field), field)
    if outputs.structural_tag is not None:
        field = "structured_outputs.structural_tag"
        _loaded(outputs.structural_tag, field)
        return Constraint(Guided("structural_tag", outputs.structural_tag), field)
    return Constraint(Guided("json_object"), "structured_outputs.json_object")


def _schema(document: Any, field: str) -> Guided:
    schema = _loaded(document, field) if isinstance(document, str) else document
    check_schema(schema, field)
    return Guided("json_schema", orjson.dumps(schema).decode())


def _loaded(document: str, field: str) -> dict[str, Any]:
    try:
        loaded = orjson.loads(document)
    except orjson.JSONDecodeError as error:
        raise invalid(f"{field} is no valid JSON: {error.msg} at character {error.pos}.", param=field) from None
    if not isinstance(loaded, dict):
        raise invalid(f"{field} must hold a JSON object.", param=field)
    return loaded


def _regex(pattern: str, field: str) -> Guided:
    check_regex(pattern, field)
    return Guided("regex", pattern)


def _grammar(grammar: str, field: str) -> Guided:
    if not grammar.strip():
        raise invalid(f"{field} is empty.", param=field, code="invalid_value")
    return Guided("ebnf", grammar)

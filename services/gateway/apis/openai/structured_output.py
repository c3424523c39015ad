"""Translates the fields that constrain the output to the constraint that the engine receives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import orjson

from services.common.errors import invalid
from services.gateway.apis.openai.json_schema import check_schema
from services.gateway.apis.openai.schema_meter import SchemaMeter
from services.gateway.apis.openai.structured_output_fields import GuidedFields, ResponseFormat, StructuredOutputs
from services.gateway.core.request import StructuredOutput
from services.gateway.http.json_values import most_nodes

CAPABILITIES = {
    "json_schema": "guided_json",
    "json_object": "guided_json",
    "regex": "guided_regex",
    "ebnf": "guided_grammar",
    "choice": "guided_choice",
    "structural_tag": "structural_tag",
}
"""The capability that each kind of constraint requires of an engine."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """A constraint and the client's field that sets it."""

    guided: StructuredOutput
    field: str

    @property
    def required_capability(self) -> tuple[str, str]:
        """The required capability and the field."""
        return CAPABILITIES[self.guided.kind], self.field


def read_constraint(fields: GuidedFields, meter: SchemaMeter) -> Constraint | None:
    """Returns the constraint of a request, or None; patterns and grammars are validated by the engine only.

    Args:
        meter: measures every schema, pattern and grammar before it is processed.

    Raises:
        SluiceError: INVALID_ARGUMENT for an invalid schema or grammar, one that exceeds a budget, or two constraints.
    """
    found = list(_constraints(fields, _Reader(meter)))
    if len(found) > 1:
        raise invalid(
            f"{found[1].field} and {found[0].field} exclude each other; set only one of them.",
            param=found[1].field,
            code="invalid_value",
        )
    return found[0] if found else None


def _constraints(fields: GuidedFields, read: _Reader) -> Iterator[Constraint]:
    if fields.response_format is not None and fields.response_format.type != "text":
        yield Constraint(_of_format(fields.response_format, read), "response_format")
    if fields.structured_outputs is not None:
        yield _of_structured_outputs(fields.structured_outputs, read)
    for name in ("guided_json", "json_schema"):
        if (document := getattr(fields, name)) is not None:
            yield Constraint(read.schema(document, name), name)
    for name in ("guided_regex", "regex"):
        if (pattern := getattr(fields, name)) is not None:
            yield Constraint(read.regex(pattern, name), name)
    for name in ("guided_grammar", "ebnf"):
        if (grammar := getattr(fields, name)) is not None:
            yield Constraint(read.grammar(grammar, name), name)
    if fields.guided_choice is not None:
        yield Constraint(read.choice(fields.guided_choice, "guided_choice"), "guided_choice")


def _of_format(form: ResponseFormat, read: _Reader) -> StructuredOutput:
    if form.type == "json_object":
        return StructuredOutput("json_object")
    if form.type == "structural_tag":
        return read.tag({"type": form.type, **(form.model_extra or {})}, "response_format")
    assert form.json_schema is not None
    return read.schema(form.json_schema.schema_document, "response_format.json_schema.schema")


def _of_structured_outputs(outputs: StructuredOutputs, read: _Reader) -> Constraint:
    if outputs.json_ is not None:
        field = "structured_outputs.json"
        return Constraint(read.schema(outputs.json_, field), field)
    if outputs.regex is not None:
        field = "structured_outputs.regex"
        return Constraint(read.regex(outputs.regex, field), field)
    if outputs.choice is not None:
        field = "structured_outputs.choice"
        return Constraint(read.choice(outputs.choice, field), field)
    if outputs.grammar is not None:
        field = "structured_outputs.grammar"
        return Constraint(read.grammar(outputs.grammar, field), field)
    if outputs.structural_tag is not None:
        field = "structured_outputs.structural_tag"
        return Constraint(read.tag(outputs.structural_tag, field), field)
    return Constraint(StructuredOutput("json_object"), "structured_outputs.json_object")


class _Reader:
    """Measures and validates the value of a field and returns the engine's constraint."""

    def __init__(self, meter: SchemaMeter) -> None:
        self._meter = meter

    def schema(self, document: Any, field: str) -> StructuredOutput:
        schema = self._measured(document, field)
        check_schema(schema, field)
        return StructuredOutput("json_schema", orjson.dumps(schema).decode())

    def tag(self, document: Any, field: str) -> StructuredOutput:
        tag = self._measured(document, field)
        return StructuredOutput("structural_tag", document if isinstance(document, str) else orjson.dumps(tag).decode())

    def regex(self, pattern: str, field: str) -> StructuredOutput:
        self._meter.add_pattern(pattern, field)
        return StructuredOutput("regex", pattern)

    def grammar(self, grammar: str, field: str) -> StructuredOutput:
        self._meter.check_grammar([grammar], field)
        if not grammar.strip():
            raise invalid(f"{field} is empty; send a grammar.", param=field, code="invalid_value")
        return StructuredOutput("ebnf", grammar)

    def choice(self, texts: list[str], field: str) -> StructuredOutput:
        self._meter.check_grammar(texts, field)
        return StructuredOutput("choice", tuple(texts))

    def _measured(self, document: Any, field: str) -> Any:
        """Returns a JSON document, parsed if it is text."""
        parsed = self._parsed(document, field) if isinstance(document, str) else document
        self._meter.add_schema(parsed, field)
        return parsed

    def _parsed(self, document: str, field: str) -> dict[str, Any]:
        self._meter.check_text(document, field)
        text = document.encode()
        self._meter.check_nodes(most_nodes(text, self._meter.budgets.schema_nodes.limit), field)
        try:
            parsed = orjson.loads(text)
        except orjson.JSONDecodeError as error:
            raise invalid(f"{field} is not valid JSON: {error.msg} at character {error.pos}.", param=field) from None
        if not isinstance(parsed, dict):
            raise invalid(f"{field} must be a JSON object.", param=field)
        return parsed

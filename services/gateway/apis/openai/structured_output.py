"""Constraints on the output: from a request's many names for them to the one that the engine gets."""

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
"""What an engine must be able to do for each kind of constraint."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """A constraint, the field that asks for it, and what the engine must be able to do."""

    guided: StructuredOutput
    field: str

    @property
    def needs(self) -> tuple[str, str]:
        """Capability and field."""
        return CAPABILITIES[self.guided.kind], self.field


def constraint(fields: GuidedFields, meter: SchemaMeter) -> Constraint | None:
    """Returns the constraint of a request, checked as far as that needs no compiler; None when there is none.

    Args:
        meter: gets every schema, pattern and grammar before it is looked at.

    Raises:
        SluiceError: INVALID_ARGUMENT naming the field of a schema or grammar that is none or over a budget, or of the
            second constraint where there are two.
    """
    found = list(_constraints(fields, _Reader(meter)))
    if len(found) > 1:
        raise invalid(
            f"{found[1].field} and {found[0].field} exclude each other; one constraint is possible.",
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
    """Makes what an engine gets of a field's value, checked and counted."""

    def __init__(self, meter: SchemaMeter) -> None:
        self._meter = meter

    def schema(self, document: Any, field: str) -> StructuredOutput:
        schema = self._counted(document, field)
        check_schema(schema, field)
        return StructuredOutput("json_schema", orjson.dumps(schema).decode())

    def tag(self, document: Any, field: str) -> StructuredOutput:
        tag = self._counted(document, field)
        return StructuredOutput("structural_tag", document if isinstance(document, str) else orjson.dumps(tag).decode())

    def regex(self, pattern: str, field: str) -> StructuredOutput:
        self._meter.add_pattern(pattern, field)
        return StructuredOutput("regex", pattern)

    def grammar(self, grammar: str, field: str) -> StructuredOutput:
        self._meter.check_grammar([grammar], field)
        if not grammar.strip():
            raise invalid(f"{field} is empty.", param=field, code="invalid_value")
        return StructuredOutput("ebnf", grammar)

    def choice(self, texts: list[str], field: str) -> StructuredOutput:
        self._meter.check_grammar(texts, field)
        return StructuredOutput("choice", tuple(texts))

    def _counted(self, document: Any, field: str) -> Any:
        """Returns a JSON document, parsed where it is a text."""
        loaded = self._loaded(document, field) if isinstance(document, str) else document
        self._meter.add_schema(loaded, field)
        return loaded

    def _loaded(self, document: str, field: str) -> dict[str, Any]:
        self._meter.check_text(document, field)
        text = document.encode()
        self._meter.check_nodes(most_nodes(text, self._meter.budgets.schema_nodes.limit), field)
        try:
            loaded = orjson.loads(text)
        except orjson.JSONDecodeError as error:
            raise invalid(f"{field} is no valid JSON: {error.msg} at character {error.pos}.", param=field) from None
        if not isinstance(loaded, dict):
            raise invalid(f"{field} must hold a JSON object.", param=field)
        return loaded

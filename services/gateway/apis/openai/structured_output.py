"""Translates the fields that constrain the output to the constraint that the engine receives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from services.common.base.errors import invalid
from services.common.net.intake.json_values import most_nodes
from services.gateway.apis.openai.json_schema import check_schema
from services.gateway.apis.openai.schema_meter import SchemaMeter
from services.gateway.apis.openai.structured_output_fields import GuidedFields, ResponseFormat
from services.gateway.core.request import StructuredOutput

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


_Set = tuple[Any, Callable[[Any, str], StructuredOutput]]
"""The value of a field, None if it is not set, and the reader of the value."""


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
    outputs = fields.structured_outputs
    if outputs is not None:
        values: dict[str, _Set] = {
            "json": (outputs.json_, read.schema),
            "regex": (outputs.regex, read.regex),
            "choice": (outputs.choice, read.choice),
            "grammar": (outputs.grammar, read.grammar),
            "structural_tag": (outputs.structural_tag, read.tag),
            "json_object": (outputs.json_object or None, lambda value, field: StructuredOutput("json_object")),
        }
        yield from _read_set({f"structured_outputs.{name}": value for name, value in values.items()})
    yield from _read_set(
        {
            "guided_json": (fields.guided_json, read.schema),
            "json_schema": (fields.json_schema, read.schema),
            "guided_regex": (fields.guided_regex, read.regex),
            "regex": (fields.regex, read.regex),
            "guided_grammar": (fields.guided_grammar, read.grammar),
            "ebnf": (fields.ebnf, read.grammar),
            "guided_choice": (fields.guided_choice, read.choice),
        }
    )


def _read_set(values: Mapping[str, _Set]) -> Iterator[Constraint]:
    """Returns the constraints of the fields that are set."""
    return (Constraint(read(value, field), field) for field, (value, read) in values.items() if value is not None)


def _of_format(form: ResponseFormat, read: _Reader) -> StructuredOutput:
    if form.type == "json_object":
        return StructuredOutput("json_object")
    if form.type == "structural_tag":
        return read.tag({"type": form.type, **(form.model_extra or {})}, "response_format")
    assert form.json_schema is not None
    return read.schema(form.json_schema.schema_document, "response_format.json_schema.schema")


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

"""The fields of OpenAI, vLLM and SGLang that constrain the output."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from services.gateway.apis.openai.fields import SchemaObject, Strict
from services.gateway.apis.openai.unsupported_fields import reject_unsupported, unsupported_field

MAX_CHOICES = 1_000
"""Texts of which the model is to generate one; more are refused with INVALID_ARGUMENT."""


def _schema(value: Any) -> Any:
    if value is not None and not isinstance(value, str | dict):
        raise ValueError("must be a JSON schema, as an object or as JSON text")
    return value


SchemaDocument = Annotated[
    str | dict[str, Any] | None,
    BeforeValidator(_schema),
    WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "string"}, {"type": "null"}], "default": None}),
]
Grammar = Annotated[str, Field(min_length=1)]
"""A grammar or regular expression; its size is bounded by `SchemaMeter`."""

Choices = Annotated[
    list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)
]


class NamedSchema(Strict):
    """The `json_schema` of a response format."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    schema_document: SchemaObject = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """The format of the output; structural tags have additional fields."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True, hide_input_in_errors=True)

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def _fits_its_type(self) -> ResponseFormat:
        more = set(self.model_extra or ())
        if self.type != "structural_tag" and more:
            raise ValueError(f"has the unknown field {min(more)[:64]}")
        if self.type == "structural_tag" and not more:
            raise ValueError("requires a format, or structures and triggers, when type is structural_tag")
        if self.json_schema is not None and self.type != "json_schema":
            raise ValueError("accepts json_schema only when type is json_schema")
        if self.type == "json_schema" and (self.json_schema is None or self.json_schema.schema_document is None):
            raise ValueError("requires a json_schema with a name and a schema when type is json_schema")
        return self


class StructuredOutputs(Strict):
    """vLLM's `structured_outputs`; exactly one constraint must be set."""

    json_: SchemaDocument = Field(None, alias="json")
    regex: Grammar | None = None
    choice: Choices | None = None
    grammar: Grammar | None = None
    json_object: bool | None = None
    structural_tag: Grammar | None = None

    disable_any_whitespace: Any = unsupported_field("the engine determines white space", False)
    disable_additional_properties: Any = unsupported_field("set additionalProperties in the schema", False)
    whitespace_pattern: Any = unsupported_field("the engine determines white space")

    @model_validator(mode="after")
    def _exactly_one(self) -> StructuredOutputs:
        reject_unsupported(self)
        given = (self.json_, self.regex, self.choice, self.grammar, self.json_object or None, self.structural_tag)
        if sum(value is not None for value in given) != 1:
            raise ValueError("requires exactly one of json, regex, choice, grammar, json_object and structural_tag")
        return self


class GuidedFields(Strict):
    """All fields that constrain the output."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    # Former names of vLLM.
    guided_json: SchemaDocument = None
    guided_regex: Grammar | None = None
    guided_choice: Choices | None = None
    guided_grammar: Grammar | None = None
    guided_decoding_backend: Any = unsupported_field("the worker's engine determines it")
    guided_whitespace_pattern: Any = unsupported_field("the engine determines white space")
    # Names of SGLang.
    json_schema: SchemaDocument = None
    regex: Grammar | None = None
    ebnf: Grammar | None = None

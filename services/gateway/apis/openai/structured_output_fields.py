"""Fields that constrain the output, as OpenAI, vLLM and SGLang write them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from services.gateway.apis.openai.fields import SchemaObject, Strict
from services.gateway.apis.openai.unsupported_fields import refuse, refused

MAX_CHOICES = 1_000


def _schema(value: Any) -> Any:
    if value is not None and not isinstance(value, str | dict):
        raise ValueError("must be a JSON schema, as an object or as its text")
    return value


SchemaDocument = Annotated[
    str | dict[str, Any] | None,
    BeforeValidator(_schema),
    WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "string"}, {"type": "null"}], "default": None}),
]
Grammar = Annotated[str, Field(min_length=1)]
"""A grammar or a regular expression, which `SchemaMeter` bounds."""

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
    """What form the answer has to have; a structural tag keeps its own fields."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True, hide_input_in_errors=True)

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def _fits_its_type(self) -> ResponseFormat:
        more = set(self.model_extra or ())
        if self.type != "structural_tag" and more:
            raise ValueError(f"has the unknown field {min(more)[:64]}")
        if self.type == "structural_tag" and not more:
            raise ValueError("of type structural_tag needs a format, or structures and triggers")
        if self.json_schema is not None and self.type != "json_schema":
            raise ValueError("has a json_schema, which belongs to the type json_schema")
        if self.type == "json_schema" and (self.json_schema is None or self.json_schema.schema_document is None):
            raise ValueError("of type json_schema needs a json_schema with a name and a schema")
        return self


class StructuredOutputs(Strict):
    """vLLM's `structured_outputs`: one of the six constraints."""

    json_: SchemaDocument = Field(None, alias="json")
    regex: Grammar | None = None
    choice: Choices | None = None
    grammar: Grammar | None = None
    json_object: bool | None = None
    structural_tag: Grammar | None = None

    disable_any_whitespace: Any = refused("white space is the engine's own affair", False)
    disable_additional_properties: Any = refused("say additionalProperties in the schema", False)
    whitespace_pattern: Any = refused("white space is the engine's own affair")

    @model_validator(mode="after")
    def _one_of_them(self) -> StructuredOutputs:
        refuse(self)
        given = (self.json_, self.regex, self.choice, self.grammar, self.json_object or None, self.structural_tag)
        if sum(value is not None for value in given) != 1:
            raise ValueError("needs exactly one of json, regex, choice, grammar, json_object and structural_tag")
        return self


class GuidedFields(Strict):
    """Every name under which a request may constrain its output."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    # vLLM's earlier names
    guided_json: SchemaDocument = None
    guided_regex: Grammar | None = None
    guided_choice: Choices | None = None
    guided_grammar: Grammar | None = None
    guided_decoding_backend: Any = refused("each engine has its own")
    guided_whitespace_pattern: Any = refused("white space is the engine's own affair")
    # SGLang's
    json_schema: SchemaDocument = None
    regex: Grammar | None = None
    ebnf: Grammar | None = None

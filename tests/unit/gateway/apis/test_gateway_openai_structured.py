"""Constraints on the output: every name for them arrives, mistakes are said in bounded time with their field."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.base.errors import ErrorKind, SluiceError
from services.gateway.apis.openai.json_schema import check_schema
from services.gateway.apis.openai.schemas import ChatCompletionRequest, CompletionRequest
from services.gateway.apis.openai.tool_choice import forced_call
from services.gateway.apis.openai.translate import chat_request, completion_requests
from services.gateway.apis.openai.validation import check
from services.gateway.core.request import GenerationRequest, StructuredOutput
from tests.support.data.bodies import BUDGETS
from tests.support.oracles.errors import raises_error

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TEXT = '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]}'
JSON_TEXT = StructuredOutput("json_schema", TEXT)
TAG = {"type": "structural_tag", "structures": [], "triggers": ["<f"]}


def chat(forces: bool = False, **fields: Any) -> GenerationRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    return chat_request(body, check(ChatCompletionRequest, body, BUDGETS), "chatcmpl-1", 8, BUDGETS, forces)


def complete(**fields: Any) -> GenerationRequest:
    return completion_requests(
        check(CompletionRequest, {"model": "m", "prompt": "x", **fields}, BUDGETS), "cmpl-1", 8, BUDGETS
    )[0]


@pytest.mark.parametrize("make", [chat, complete])
@pytest.mark.parametrize(
    ("fields", "guided", "capability", "field"),
    [
        (
            {"response_format": {"type": "json_object"}},
            StructuredOutput("json_object"),
            "guided_json",
            "response_format",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
            StructuredOutput("json_schema", TEXT),
            "guided_json",
            "response_format",
        ),
        (
            {"response_format": TAG},
            StructuredOutput("structural_tag", json.dumps(TAG, separators=(",", ":"))),
            "structural_tag",
            "response_format",
        ),
        (
            {"structured_outputs": {"json": SCHEMA}},
            StructuredOutput("json_schema", TEXT),
            "guided_json",
            "structured_outputs.json",
        ),
        (
            {"structured_outputs": {"json": TEXT}},
            StructuredOutput("json_schema", TEXT),
            "guided_json",
            "structured_outputs.json",
        ),
        (
            {"structured_outputs": {"json_object": True}},
            StructuredOutput("json_object"),
            "guided_json",
            "structured_outputs.json_object",
        ),
        (
            {"structured_outputs": {"choice": ["a", "b"]}},
            StructuredOutput("choice", ("a", "b")),
            "guided_choice",
            "structured_outputs.choice",
        ),
        (
            {"structured_outputs": {"regex": "a+"}},
            StructuredOutput("regex", "a+"),
            "guided_regex",
            "structured_outputs.regex",
        ),
        ({"guided_json": SCHEMA}, StructuredOutput("json_schema", TEXT), "guided_json", "guided_json"),
        ({"guided_regex": r"\p{L}+"}, StructuredOutput("regex", r"\p{L}+"), "guided_regex", "guided_regex"),
        ({"guided_choice": ["x"]}, StructuredOutput("choice", ("x",)), "guided_choice", "guided_choice"),
        (
            {"guided_grammar": 'root ::= "a"'},
            StructuredOutput("ebnf", 'root ::= "a"'),
            "guided_grammar",
            "guided_grammar",
        ),
        ({"regex": "[0-9]"}, StructuredOutput("regex", "[0-9]"), "guided_regex", "regex"),
        ({"ebnf": 'root ::= "a"'}, StructuredOutput("ebnf", 'root ::= "a"'), "guided_grammar", "ebnf"),
        ({"json_schema": TEXT}, StructuredOutput("json_schema", TEXT), "guided_json", "json_schema"),
    ],
)
def test_every_name_for_a_constraint_arrives(
    make: Any, fields: dict[str, Any], guided: StructuredOutput, capability: str, field: str
) -> None:
    request = make(**fields)
    assert request.guided == guided
    assert (capability, field) in [(need, name.split(".json_schema")[0]) for need, name in request.needs]
    assert not request.guided_calls


def test_text_is_no_constraint() -> None:
    assert chat(response_format={"type": "text"}).guided is None
    assert chat(response_format=None).guided is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "response_format.json_schema.name",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "float"}}}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format"),
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": True}}, "structured_outputs.json"),
        ({"structured_outputs": {"structural_tag": "[]"}}, "structured_outputs.structural_tag"),
        ({"guided_json": {"type": "object", "required": "a"}}, "guided_json"),
        ({"guided_json": []}, "guided_json"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"regex": "a" * 20_000}, "regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": [""]}, "guided_choice[0]"),
        ({"guided_grammar": "  "}, "guided_grammar"),
        ({"ebnf": ""}, "ebnf"),
        ({"json_schema": "nonsense"}, "json_schema"),
        ({"regex": "a", "ebnf": "b"}, "ebnf"),
        ({"response_format": {"type": "json_object"}, "guided_choice": ["a"]}, "guided_choice"),
        ({"guided_decoding_backend": "outlines"}, "guided_decoding_backend"),
    ],
)
def test_mistakes_name_their_field(fields: dict[str, Any], param: str) -> None:
    with raises_error(kind=ErrorKind.INVALID_ARGUMENT, param=param) as caught:
        chat(**fields)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {"type": []},
        {"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"anyOf": [{"type": "string"}, {"enum": [1]}]}}},
        {"items": [{"type": "string"}], "minItems": 2, "additionalProperties": False},
        {"type": ["string", "null"], "pattern": "^[a-z]+$"},
        {"$ref": "#"},
    ],
)
def test_schemas_that_are_some(schema: Any) -> None:
    if schema is True:
        with pytest.raises(SluiceError):
            check_schema(schema, "f")
    else:
        check_schema(schema, "f")


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"properties": {"a": {"type": "str"}}}, "/properties/a/type"),
        ({"anyOf": []}, "/anyOf"),
        ({"$ref": "https://example.com/schema"}, "/$ref"),
        ({"$ref": "#/$defs/missing"}, "/$ref"),
        ({"items": 5}, "/items"),
        ({"enum": []}, "/enum"),
        ({"maxLength": -1}, "/maxLength"),
        ({"minimum": "1"}, "/minimum"),
        ({"pattern": 5}, "/pattern"),
        ({"patternProperties": []}, "/patternProperties"),
        ({"properties": []}, "/properties"),
    ],
)
def test_invalid_schema_raises_an_error_with_its_path(schema: Any, place: str) -> None:
    with raises_error(match=place.replace("$", r"\$"), param="response_format"):
        check_schema(schema, "response_format")


def test_schemas_nested_too_deep_are_refused() -> None:
    deep: Any = {}
    for _ in range(900):
        deep = {"items": deep}
    with pytest.raises(SluiceError, match="nested more than 64 deep"):
        check_schema(deep, "f")


@pytest.mark.parametrize("pattern", ["(", "[", "a{2,1}", "(?<=a+)b", "\\"])
def test_patterns_are_left_to_engines_to_compile(pattern: str) -> None:
    assert chat(guided_regex=pattern).guided == StructuredOutput("regex", pattern)
    document = {"properties": {"a": {"pattern": pattern}}, "patternProperties": {pattern: {}}}
    request = chat(guided_json=document)
    assert request.guided is not None
    assert json.loads(str(request.guided.grammar)) == document


def assert_typed(checks: Callable[[], None], param: str) -> None:
    """It passes, or fails with an error that names the parameter; anything else comes through."""
    failure = None
    try:
        checks()
    except SluiceError as error:
        failure = error
    assert failure is None or failure.param == param


KEYWORDS = st.sampled_from(
    ["type", "properties", "items", "anyOf", "enum", "required", "$ref", "$defs", "pattern", "minLength", "not"]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda children: (
        st.lists(children, max_size=3) | st.dictionaries(KEYWORDS | st.text(max_size=3), children, max_size=4)
    ),
    max_leaves=20,
)


@settings(max_examples=400)
@given(JSON)
def test_any_json_is_a_schema_or_a_typed_error(schema: Any) -> None:
    assert_typed(lambda: check_schema(schema, "f"), "f")


def tool(name: str, parameters: Any = None) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": name, **({} if parameters is None else {"parameters": parameters})},
    }


def test_a_demanded_call_becomes_a_schema() -> None:
    request = chat(forces=True, tools=[tool("f", SCHEMA), tool("g")], tool_choice="required")
    assert request.guided is not None
    schema = json.loads(str(request.guided.grammar))
    assert [call["properties"]["name"]["const"] for call in schema["anyOf"]] == ["f", "g"]
    assert schema["anyOf"][0]["properties"]["parameters"] == SCHEMA
    assert request.guided_calls
    assert ("guided_json", "tool_choice") in request.needs
    assert request.parsing is not None
    assert (request.parsing.tool_parser, request.parsing.reasoning_parser) == ("llama3_json", "auto")

    named = chat(
        forces=True, tools=[tool("f", SCHEMA), tool("g")], tool_choice={"type": "function", "function": {"name": "g"}}
    )
    assert named.guided is not None
    assert json.loads(str(named.guided.grammar))["properties"]["name"] == {"const": "g"}


@pytest.mark.parametrize("more", [{}, {"tool_choice": "auto"}, {"tool_choice": "none"}])
def test_without_a_demand_there_is_no_constraint(more: dict[str, Any]) -> None:
    request = chat(forces=True, tools=[tool("f")], **more)
    assert request.guided is None
    assert not request.guided_calls


def test_engines_without_schemas_are_left_to_the_model() -> None:
    request = chat(forces=False, tools=[tool("f")], tool_choice="required")
    assert request.guided is None
    assert request.parsing is not None
    assert request.parsing.tool_parser == "auto"


def test_definitions_move_to_the_top_and_clashes_are_refused() -> None:
    uses = {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"type": "string"}}}
    clashes = {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"type": "number"}}}
    elsewhere = {"type": "object", "properties": {"a": {"$ref": "#/properties/b"}, "b": {}}}
    found = forced_call([tool("f", uses), tool("g")], "required")
    assert found is not None
    assert json.loads(str(found.grammar))["$defs"] == {"A": {"type": "string"}}
    with raises_error(match="another definition of 'A'", param="tools[1].function.parameters"):
        forced_call([tool("f", uses), tool("g", clashes)], "required")
    assert forced_call([tool("f", uses), tool("g", clashes)], {"type": "function", "function": {"name": "g"}})
    assert forced_call([tool("f", elsewhere)], "required") is None


def test_demanded_call_takes_the_place_of_a_constraint_on_the_text() -> None:
    asked = chat(forces=True, tools=[tool("f")], tool_choice="required", response_format={"type": "json_object"})
    assert asked == chat(forces=True, tools=[tool("f")], tool_choice="required")


@pytest.mark.parametrize("parameters", [5, [1], "x", {"$defs": 1}, {"type": "str"}, {"$defs": {"a": {"items": 3}}}])
def test_parameters_of_a_demanded_call_that_are_no_schema(parameters: Any) -> None:
    with raises_error(param="tools[1].function.parameters"):
        chat(forces=True, tools=[tool("g"), tool("f", parameters)], tool_choice="required")

"""What the mock engine says under a constraint satisfies it, or the constraint is refused."""

from __future__ import annotations

import json
import re
from random import Random
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.errors import ErrorKind, SluiceError
from services.worker.contract.generation import FinishReason, SamplingParams, StructuredOutput
from services.worker.engines.mock.guided.sampler import guided_text
from services.worker.engines.mock.text import TextGenerator
from tests.support.fakes.engines import EOS, WordVocabulary, request

TREE = {
    "$defs": {
        "node": {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}}
    },
    "$ref": "#/$defs/node",
}
SCHEMAS: list[Any] = [
    {},
    True,
    {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]},
    {"type": "object", "properties": {}, "required": ["free"], "additionalProperties": {"type": "number"}},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 3, "maxItems": 5},
    {"type": "array", "prefixItems": [{"const": 1}, {"enum": ["a"]}], "items": {"type": "null"}, "minItems": 4},
    {"type": "string", "minLength": 40, "maxLength": 41},
    {"type": "string", "maxLength": 2},
    {"type": "string", "pattern": "^[A-Z]{3}-\\d{4}$"},
    {"type": "string", "format": "date-time"},
    {"type": "integer", "minimum": 17, "maximum": 17},
    {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 5},
    {"type": "integer", "maximum": -100},
    {"type": "number", "minimum": 0.25, "maximum": 0.5},
    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    {"type": ["null", "integer"]},
    {"enum": ["ä", None, 3]},
    {"const": {"a": [1]}},
    {"oneOf": [{"type": "string"}, {"type": "integer"}]},
    {"allOf": [{"type": "object", "required": ["a"]}, {"properties": {"a": {"type": "integer", "minimum": 4}}}]},
    TREE,
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=str)
def test_every_example_satisfies_its_schema(schema: Any) -> None:
    for seed in range(30):
        text = guided_text(StructuredOutput("json_schema", json.dumps(schema)), Random(seed))
        jsonschema.validate(json.loads(text), schema)


LEAVES = st.sampled_from(
    [{"type": "string"}, {"type": "integer", "minimum": 2}, {"type": "boolean"}, {"enum": [1, "x"]}, {"type": "null"}]
)


def _nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    names = st.sampled_from(["a", "b", "c"])
    objects = st.dictionaries(names, inner, min_size=1).map(
        lambda parts: {"type": "object", "properties": parts, "required": list(parts), "additionalProperties": False}
    )
    lists = inner.map(lambda part: {"type": "array", "items": part, "minItems": 1, "maxItems": 2})
    return objects | lists | st.lists(inner, min_size=1, max_size=3).map(lambda parts: {"anyOf": parts})


@settings(max_examples=60, deadline=None)
@given(st.recursive(LEAVES, _nested, max_leaves=8), st.integers(0, 1_000))
def test_nested_schemas_are_satisfied(schema: Any, seed: int) -> None:
    jsonschema.validate(
        json.loads(guided_text(StructuredOutput("json_schema", json.dumps(schema)), Random(seed))), schema
    )


@pytest.mark.parametrize(
    "pattern",
    [
        "a+",
        "(yes|no)( please)?",
        r"\d{3}-\d{4}",
        "[^a-y]+z?",
        r"^\w+@\w+\.(com|org)$",
        "x*",
        "(?i:ab)c",
        "[\\s\\S]{5,9}",
    ],
)
def test_every_text_matches_its_expression(pattern: str) -> None:
    for seed in range(30):
        assert re.fullmatch(pattern, guided_text(StructuredOutput("regex", pattern), Random(seed)))


def test_a_choice_is_one_of_them_and_all_come_up() -> None:
    said = {guided_text(StructuredOutput("choice", ("yes", "no", "maybe")), Random(seed)) for seed in range(60)}
    assert said == {"yes", "no", "maybe"}
    assert isinstance(json.loads(guided_text(StructuredOutput("json_object"), Random(0))), dict)


@pytest.mark.parametrize(
    ("guided", "said"),
    [
        (StructuredOutput("regex", "("), "not a valid regular expression"),
        (StructuredOutput("regex", r"(a)\1"), "not supported"),
        (StructuredOutput("regex", "a(?=b)"), "not supported"),
        (StructuredOutput("regex", "a" * 5_000), "longer"),
        (StructuredOutput("regex", "(?:a{4000}){4000}"), "longer"),
        (StructuredOutput("json_schema", '{"not": {}}'), "'not'"),
        (StructuredOutput("json_schema", "false"), "allows no value"),
        (StructuredOutput("json_schema", '{"type": "rock"}'), "rock"),
        (StructuredOutput("json_schema", '{"$ref": "#/$defs/none"}'), "has no target"),
        (StructuredOutput("json_schema", '{"$ref": "http://example.com"}'), "outside the document"),
        (StructuredOutput("json_schema", '{"$ref": "#"}'), "circular"),
        (StructuredOutput("json_schema", '{"type": "integer", "minimum": 5, "maximum": 4}'), "bounds"),
        (StructuredOutput("json_schema", '{"type": "array", "minItems": 1000000}'), "too many"),
        (StructuredOutput("json_schema", '{"type": "string", "minLength": 1000000}'), "longer"),
        (StructuredOutput("json_schema", '{"properties": {"a": {"$ref": "#"}}, "required": ["a"]}'), "deep"),
        (StructuredOutput("json_schema", '{"type": "object", "properties": [1]}'), "wrong type"),
        (StructuredOutput("json_schema", '{"type": "string", "minLength": "long"}'), "wrong type"),
        (StructuredOutput("json_schema", '{"type": "number", "multipleOf": 7}'), "'multipleOf'"),
        (StructuredOutput("ebnf", "root ::= 'a'"), "not supported"),
    ],
    ids=str,
)
def test_what_cannot_be_followed_is_refused_in_bounded_time(guided: StructuredOutput, said: str) -> None:
    with pytest.raises(SluiceError) as refusal:
        guided_text(guided, Random(0))
    assert refusal.value.kind is ErrorKind.INVALID_ARGUMENT
    assert refusal.value.param == "response_format"
    assert said in refusal.value.message


def test_the_answer_is_the_constrained_text_and_then_it_ends() -> None:
    words = WordVocabulary()
    asked = request(guided=StructuredOutput("choice", ("a river runs",)), ignore_eos=True)
    answer = TextGenerator(words).answer(asked, 100)
    assert words.decode(answer.token_ids) == "a river runs"
    assert (answer.reason, answer.token_ids[-1]) == (FinishReason.STOP, EOS)
    assert TextGenerator(words).answer(asked, 2).reason is FinishReason.LENGTH


def test_choices_of_one_prompt_differ_without_a_seed_and_repeat_with_one() -> None:
    teller = TextGenerator(WordVocabulary())

    def said(request_id: str, seed: int | None = None) -> bytes:
        return teller.answer(request(request_id, sampling=SamplingParams(seed=seed)), 1_000).token_ids.tobytes()

    assert len({said(f"chat-{index}") for index in range(4)}) == 4
    assert said("chat-1") == said("other-1")
    assert said("chat-0") == said("plain")
    assert said("chat-1", seed=7) == said("chat-2", seed=7)

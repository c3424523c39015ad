"""What the mock engine makes up beside tokens: log-probabilities, embeddings, step times from a table."""

from __future__ import annotations

import json
import math
from array import array
from pathlib import Path
from random import Random
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.base.errors import ErrorKind, SluiceError
from services.worker.contract.generation import FinishReason, SamplingParams, StructuredOutput
from services.worker.engines.mock.guided import guided_text
from services.worker.engines.mock.outputs import embed
from services.worker.engines.mock.text import TextGenerator
from services.worker.engines.mock.timing import TableTiming, decode_ms, prefill_ms
from tests.support.fakes.engines import EOS, WordVocabulary, request
from tests.support.oracles.errors import raises_error


def vector(ids: list[int], dimensions: int = 0, lora: str = "") -> list[float]:
    embedded = embed([array("I", ids)], 32, dimensions, lora)
    assert embedded.prompt_tokens == len(ids)
    values = array("f")
    values.frombytes(embedded.vectors[0])
    return list(values)


def test_embeddings_are_unit_vectors_that_depend_on_tokens_and_adapter_alone() -> None:
    one = vector([1, 2, 3])
    assert len(one) == 32
    assert math.isclose(sum(value * value for value in one), 1.0, rel_tol=1e-5)
    assert one == vector([1, 2, 3])
    assert one != vector([1, 2, 4])
    assert one != vector([1, 2, 3], lora="polite")


def test_embeddings_are_cut_and_made_unit_vectors_again() -> None:
    whole, cut = vector([1, 2, 3]), vector([1, 2, 3], dimensions=8)
    assert len(cut) == 8
    assert math.isclose(sum(value * value for value in cut), 1.0, rel_tol=1e-5)
    assert math.isclose(cut[0] / cut[1], whole[0] / whole[1], rel_tol=1e-4)
    with raises_error(param="dimensions"):
        vector([1], dimensions=33)


def test_the_published_fit_is_the_one_modelled() -> None:
    assert prefill_ms(1_000) == pytest.approx(4.209989e-7 * 1e6 + 15.18344 + 16.50142)
    assert decode_ms(0.0) == pytest.approx(5.74)
    assert decode_ms(0.5) == pytest.approx(-25.74 * 0.25 + 54.01 * 0.5 + 5.74)
    assert decode_ms(0.0) >= 1.0


@pytest.fixture
def table(tmp_path: Path) -> Path:
    file = tmp_path / "table.json"
    decode = [[1, 0.0, 5], [11, 0.0, 10], [1, 1.0, 15], [11, 1.0, 20]]
    file.write_text(json.dumps({"prefill": [[100, 10], [200, 30]], "decode": decode}))
    return file


@pytest.mark.parametrize(
    ("prefill", "decoding", "use", "ms"),
    [
        (100, 0, 0.0, 10),
        (150, 0, 0.0, 20),
        (10, 0, 0.0, 10),  # before the first point
        (300, 0, 0.0, 50),  # the last line goes on
        (0, 1, 0.0, 5),
        (0, 6, 0.0, 7.5),
        (0, 6, 0.5, 12.5),
        (0, 21, 1.0, 25),
        (150, 6, 0.5, 32.5),
        (0, 0, 0.5, 0),
    ],
)
def test_a_table_is_read_between_its_points(table: Path, prefill: int, decoding: int, use: float, ms: float) -> None:
    assert TableTiming.read(table).step_s(prefill, decoding, use) * 1e3 == pytest.approx(ms)
    assert TableTiming.read(table, speedup=10).step_s(prefill, decoding, use) * 1e4 == pytest.approx(ms)


@pytest.mark.parametrize(
    "content",
    [
        *("", "[]", "{}", '{"prefill": [], "decode": []}', '{"prefill": [[1, 2]], "decode": [[1, "x"]]}'),
        *('{"prefill": [[1, -2]], "decode": [[1, 2]]}', '{"prefill": [[1, 2, 3, 4]], "decode": [[1, 2]]}'),
    ],
)
def test_what_is_no_table_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "broken.json"
    file.write_text(content)
    with pytest.raises(SluiceError) as refusal:
        TableTiming.read(file)
    assert "not a valid timing table" in refusal.value.message


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


def test_a_choice_is_one_of_them_and_all_come_up() -> None:
    said = {guided_text(StructuredOutput("choice", ("yes", "no", "maybe")), Random(seed)) for seed in range(60)}
    assert said == {"yes", "no", "maybe"}
    assert isinstance(json.loads(guided_text(StructuredOutput("json_object"), Random(0))), dict)


@pytest.mark.parametrize(
    ("guided", "message"),
    [
        (StructuredOutput("regex", "a+"), "not supported"),
        (StructuredOutput("json_schema", '{"pattern": "a+"}'), "'pattern'"),
        (StructuredOutput("json_schema", '{"not": {}}'), "'not'"),
        (StructuredOutput("json_schema", "false"), "allows no value"),
        (StructuredOutput("json_schema", '{"type": "rock"}'), "rock"),
        (StructuredOutput("json_schema", '{"$ref": "#/$defs/none"}'), "has no target"),
        (StructuredOutput("json_schema", '{"$ref": "http://example.com"}'), "outside the document"),
        (StructuredOutput("json_schema", '{"$ref": "#"}'), "circular"),
        (StructuredOutput("json_schema", '{"type": "integer", "minimum": 5, "maximum": 4}'), "bounds"),
        (StructuredOutput("json_schema", '{"type": "array", "minItems": 1000000}'), "too much work"),
        (StructuredOutput("json_schema", '{"type": "string", "minLength": 1000000}'), "too much work"),
        (StructuredOutput("json_schema", '{"properties": {"a": {"$ref": "#"}}, "required": ["a"]}'), "deep"),
        (StructuredOutput("json_schema", '{"type": "object", "properties": [1]}'), "wrong type"),
        (StructuredOutput("json_schema", '{"type": "string", "minLength": "long"}'), "wrong type"),
        (StructuredOutput("json_schema", '{"type": "number", "multipleOf": 7}'), "'multipleOf'"),
        (StructuredOutput("ebnf", "root ::= 'a'"), "not supported"),
    ],
    ids=str,
)
def test_what_cannot_be_followed_is_refused_in_bounded_time(guided: StructuredOutput, message: str) -> None:
    with raises_error(kind=ErrorKind.INVALID_ARGUMENT, param="response_format") as refusal:
        guided_text(guided, Random(0))
    assert message in refusal.value.message


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

"""Fields of a body that multiply: what all choices, prompts, pairs and log-probabilities come to is bounded first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields as fields_of
from dataclasses import is_dataclass
from io import BytesIO
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy
import pybase64
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from scripts.pages.fields import SCHEMAS
from services.common.base.budgets import Budget
from services.common.base.errors import ErrorKind, SluiceError, internal
from services.common.rpc.generation import write_guided, write_sampling
from services.gateway.apis.generate.operation import translated
from services.gateway.apis.generate.schemas import SamplingFields
from services.gateway.apis.openai.choices import CollectedChoices
from services.gateway.apis.openai.completion_objects import CompletionFormat
from services.gateway.apis.openai.detailed_choices import DetailedCollectedChoice, DetailOptions
from services.gateway.apis.openai.schemas import ChatCompletionRequest, CompletionRequest
from services.gateway.apis.openai.translate import chat_request, completion_requests
from services.gateway.apis.openai.unsupported_fields import FieldClass, class_of
from services.gateway.apis.openai.validation import check
from services.gateway.apis.scores.schemas import RerankRequest, ScoreRequest
from services.gateway.core.request import GenerationRequest, PositionLogprobs, TokenLogprob, TokenPrompt
from services.gateway.core.request_size import SHORT, SIZES, check_prompt_logprobs, sizes_of
from services.gateway.http.body_budgets import BodyBudgets
from services.gateway.operations.logprobs import Naming, TokenText
from services.gateway.streams.running_memory import RunningMemory
from tests.support.data.bodies import BUDGETS
from tests.support.data.hostile_bodies import USER, tool
from tests.support.fakes.streams import StreamTable

CHOICES = 16
LONG = "x" * 4_000
CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "m", "messages": [USER]},
    COMPLETIONS: {"model": "m", "prompt": "hi"},
    GENERATE: {"model": "m", "token_ids": [1], "sampling_params": {}},
}
"""The bodies that may ask for several choices."""
ONE_CHOICE = {"/v1/responses", "/v1/messages"}
POOLING = {"/v1/embeddings", "/v1/score", "/v1/rerank", "/v1/classify"}
"""Their inputs are bounded in number and computed once each; pairs have tests of their own."""


def _embeds() -> str:
    values = numpy.ones((40, 64), dtype=numpy.float32)
    file = BytesIO()
    numpy.save(file, values)
    return pybase64.b64encode(file.getvalue()).decode()


EXAMPLES: dict[str, Any] = {
    "prompt": LONG,
    "messages": [{"role": "user", "content": LONG}],
    "tools": [tool("a", {"description": LONG})],
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"description": LONG}}},
    "structured_outputs": {"grammar": LONG},
    "modalities": ["text"],
    "metadata": {"a": "x" * 500},
    "nvext": {"token_data": list(range(1_000))},
    "stream_options": {"include_usage": True},
    "prompt_embeds": _embeds(),
    "tool_choice": {"type": "function", "function": {"name": "a"}, "extra": LONG},
    "sampling_params": {},
}
"""Long values of fields whose schema alone does not make one."""
BESIDE: dict[str, dict[str, Any]] = {
    "tool_choice": {"tools": [tool("a", {})]},
    "stream_options": {"stream": True},
    "prompt_embeds": {"prompt": None},
    "suffix": {},
}
NOT_COPIED = {
    "model": "the name of a served model",
    "user": "names the session, whose id is a hash",
    "prompt_cache_key": "names the session, whose id is a hash",
    "safety_identifier": "not used",
    "prompt_cache_options": "not used",
    "metadata": "not used, at most 16 texts of 512 characters",
    "modalities": "must be ['text']",
    "stream_options": "three booleans",
    "nvext": "two names of workers, and token ids in place of the prompt, bounded by the context",
    "bad_words": "at most 16 Ki characters, charged as tokens; see word_characters",
    "suffix": "counted with the prompt; see its own test",
    "cache_salt": "at most 1,024 characters",
    "extra_key": "at most 1,024 characters",
    "lora_path": "at most 1,024 characters",
    "request_id": "at most 512 characters",
    "rid": "at most 512 characters",
    "sampling_params": "its members are looked at one by one",
}
"""Fields that may be long and are not sent to each choice, with the reason."""
COUNTS = {
    "n": "16 choices",
    "best_of": "must equal n",
}
"""Whole numbers without a maximum of their own, and what bounds them."""


def kinds(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yields the alternatives of a JSON schema."""
    if "$ref" in schema:
        schema = definitions[schema["$ref"].rpartition("/")[2]]
    for part in schema.get("anyOf", ()):
        yield from kinds(part, definitions)
    if "anyOf" not in schema:
        yield schema


def may_be_long(alternatives: list[Mapping[str, Any]]) -> bool:
    def long(schema: Mapping[str, Any]) -> bool:
        if "enum" in schema or "const" in schema:
            return False
        return schema.get("type") in ("string", "array", "object", None)

    return any(map(long, alternatives))


def long_value(name: str, alternatives: list[Mapping[str, Any]]) -> Any:
    if name in EXAMPLES:
        return EXAMPLES[name]
    for schema in sorted(alternatives, key=lambda schema: str(schema.get("type"))):  # array, object, string
        match schema.get("type"):
            case "array" if schema.get("items", {}).get("type") == "integer":
                return list(range(10_000, 11_000))
            case "array":
                return [f"{index}{'x' * 100}" for index in range(40)]
            case "object" if "propertyNames" in schema:
                return {str(index): 1 for index in range(1_000)}
            case "object":
                return {"key": LONG}
            case "string":
                return LONG[: schema.get("maxLength", len(LONG))]
    raise AssertionError(f"{name}: add a long value to EXAMPLES")


def long_fields(path: str) -> dict[str, Any]:
    """Returns the fields of a body that may be long, each with a long value; derived from its schema."""
    kind = SCHEMAS[path]
    long = {}
    for name, schema, definitions in _properties(kind):
        if schema.get("x-unsupported") or name in _refused(kind):
            continue
        alternatives = list(kinds(schema, definitions))
        if may_be_long(alternatives):
            long[name] = long_value(name, alternatives)
    return long


def _properties(kind: type[BaseModel]) -> Iterator[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
    document = kind.model_json_schema()
    definitions = document.get("$defs", {})
    for name, schema in document["properties"].items():
        yield name, schema, definitions
        if name == "sampling_params":
            for member, part in definitions["SamplingFields"]["properties"].items():
                yield member, part, definitions


def _refused(kind: type[BaseModel]) -> set[str]:
    honoured = (FieldClass.HONOURED, FieldClass.HINT, FieldClass.PLATFORM)
    fields = {**kind.model_fields, **SamplingFields.model_fields, **kind.model_fields}
    return {field.alias or name for name, field in fields.items() if class_of(field) not in honoured}


def body_of(path: str, given_fields: Mapping[str, Any]) -> dict[str, Any]:
    body = dict(BODIES[path])
    for name, value in given_fields.items():
        body |= BESIDE.get(name, {})
        if path == GENERATE and name not in body and name not in SCHEMAS[path].model_fields:
            body["sampling_params"] = {**body["sampling_params"], name: value}
        else:
            body[name] = value
    if body.get("prompt", "") is None:
        del body["prompt"]
    return body


def requests_of(path: str, body: dict[str, Any], budgets: BodyBudgets = BUDGETS) -> list[GenerationRequest]:
    if path == CHAT:
        fields = check(ChatCompletionRequest, body, budgets)
        return [chat_request(body, fields, "r", CHOICES, budgets, forces_calls=True)]
    if path == COMPLETIONS:
        return completion_requests(check(CompletionRequest, body, budgets), "r", CHOICES, budgets)
    return translated(body, "r", CHOICES, budgets)[1]


def outcome_of(
    path: str, body: dict[str, Any], budgets: BodyBudgets
) -> tuple[list[GenerationRequest], SluiceError | None]:
    try:
        return requests_of(path, body, budgets), None
    except SluiceError as error:
        return [], error


def sent_bytes(request: GenerationRequest) -> int:
    """Bytes of the messages of one choice to its worker and its postprocess replica, beside its prompt."""
    size = write_sampling(request.sampling).ByteSize()
    size += sum(len(text.encode()) for text in request.stop.strings) + 4 * len(request.stop.token_ids)
    if request.guided is not None:
        size += write_guided(request.guided).ByteSize()
    if (parsing := request.parsing) is not None:
        size += len(parsing.tools_json) + len(parsing.tool_choice_json) + len(parsing.template_kwargs_json)
    return size


def leaves(kind: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the paths of a dataclass's fields that are not dataclasses, with their types."""
    hints = get_type_hints(kind)
    for field in fields_of(kind):
        hint, path = hints[field.name], prefix + field.name
        parts = [part for part in _members(hint) if part is not type(None)]
        inner = parts[0] if len(parts) == 1 and is_dataclass(parts[0]) else None
        if inner is None or path == "hints":
            yield path, hint
        else:
            yield from leaves(inner, f"{path}.")


def _members(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _is_number(hint: Any) -> bool:
    return all(member in (int, float, bool, type(None)) or get_origin(member) is Literal for member in _members(hint))


def test_every_field_of_a_request_has_a_size_or_a_reason_to_have_none() -> None:
    long = {path for path, hint in leaves(GenerationRequest) if not _is_number(hint)}
    assert long <= SIZES.keys() | SHORT.keys()
    assert SIZES.keys() | SHORT.keys() <= {path for path, _ in leaves(GenerationRequest)}
    assert not SIZES.keys() & SHORT.keys()


def test_every_body_either_has_one_choice_or_is_looked_at_here() -> None:
    assert set(SCHEMAS) == set(BODIES) | ONE_CHOICE | POOLING
    for path in ONE_CHOICE | POOLING:
        assert "n" not in SCHEMAS[path].model_fields


@pytest.mark.parametrize("path", BODIES)
def test_every_whole_number_of_a_body_has_a_maximum(path: str) -> None:
    kind = SCHEMAS[path]
    for name, schema, definitions in _properties(kind):
        for part in kinds(schema, definitions):
            if part.get("type") == "integer" and name not in COUNTS:
                assert "maximum" in part or "exclusiveMaximum" in part, name


@pytest.mark.parametrize("path", BODIES)
def test_every_long_field_of_a_body_counts_for_each_choice_or_is_not_sent(path: str) -> None:
    base = sum(sizes_of(requests_of(path, body_of(path, {}))[0]).values())
    long = long_fields(path)
    assert len(long) > 10
    for name, value in long.items():
        if name in NOT_COPIED:
            continue
        counted = sum(sizes_of(requests_of(path, body_of(path, {name: value}))[0]).values()) - base
        assert counted > 2_000, f"{name} is sent to each choice and not in SIZES; or give NOT_COPIED the reason"


def test_every_reason_is_about_a_field_of_a_body() -> None:
    named = {name for path in BODIES for name, _, _ in _properties(SCHEMAS[path])}
    assert NOT_COPIED.keys() | COUNTS.keys() <= named


def _scaled(value: Any, factor: int) -> Any:
    if isinstance(value, str):
        return value * factor
    if isinstance(value, dict):
        return {name: _scaled(part, factor) if part is not True else part for name, part in value.items()}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [_scaled(part, factor) for part in value]
    return value


@pytest.mark.parametrize("path", BODIES)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_what_all_choices_are_sent_is_bounded_or_refused_with_its_field(path: str, data: st.DataObject) -> None:
    small = BodyBudgets(choice_bytes=Budget("choice_bytes", 1 << 20, ""))
    scalable = {"stop", "vllm_xargs", "chat_template_kwargs", "guided_grammar", "ebnf"}
    long = {name: value for name, value in long_fields(path).items() if name not in NOT_COPIED}
    alone = {"prompt_embeds", "messages", "token_ids"}
    names = data.draw(st.sets(st.sampled_from(sorted(long.keys() - alone)), min_size=1, max_size=3))
    factor = data.draw(st.sampled_from((1, 20, 100)))
    chosen = {name: _scaled(long[name], factor) if name in scalable else long[name] for name in names}
    chosen["n"] = data.draw(st.integers(1, CHOICES))
    if path == COMPLETIONS and data.draw(st.booleans()):
        prompts = data.draw(st.integers(1, CHOICES // chosen["n"]))
        chosen["prompt"] = [LONG * data.draw(st.integers(1, 8))] * prompts
    body = body_of(path, chosen)
    requests, error = outcome_of(path, body, small)
    if error is not None:
        assert error.kind is ErrorKind.INVALID_ARGUMENT
        if error.code == "budget_exceeded":
            assert error.param.partition(".")[0] in {*body, *chosen}
            assert error.param in error.message
        return
    total = sum(request.choices * sent_bytes(request) for request in requests)
    if len(requests) * requests[0].choices > 1:
        assert total <= small.choice_bytes.limit


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"tools": [{"type": "function", "function": {"name": "a", "description": "x" * 3_000_000}}]}, "tools"),
        (CHAT, {"stop": ["x" * 3_000_000]}, "stop"),
        (CHAT, {"allowed_token_ids": [70_000] * 131_072}, "allowed_token_ids"),
        (CHAT, {"vllm_xargs": {"a": "x" * 3_000_000}}, "vllm_xargs"),
        (CHAT, {"custom_params": {"a": "x" * 3_000_000}}, "custom_params"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 3_000_000}]}, "messages"),
        (CHAT, {"chat_template_kwargs": {"a": "x" * 3_000_000}}, "chat_template_kwargs"),
        (COMPLETIONS, {"prompt": "x" * 3_000_000}, "prompt"),
        (COMPLETIONS, {"suffix": "x" * 3_000_000}, "suffix"),
        (GENERATE, {"allowed_token_ids": [70_000] * 131_072}, "sampling_params.allowed_token_ids"),
        (GENERATE, {"token_ids": [70_000] * 600_000}, "token_ids"),
    ],
)
def test_field_that_is_too_long_for_its_choices_is_refused_and_accepted_with_one(
    path: str, fields: dict[str, Any], param: str
) -> None:
    assert requests_of(path, body_of(path, fields))
    with pytest.raises(SluiceError, match="n is 16") as caught:
        requests_of(path, body_of(path, {**fields, "n": CHOICES}))
    assert (caught.value.kind, caught.value.param) == (ErrorKind.INVALID_ARGUMENT, param)
    assert str(33_554_432) in caught.value.message


def test_options_of_many_prompts_are_built_once() -> None:
    body = {"model": "m", "prompt": ["a"] * CHOICES, "allowed_token_ids": [70_000] * 10_000}
    requests = requests_of(COMPLETIONS, body)
    assert len(requests) == len({request.request_id for request in requests}) == CHOICES
    assert len({id(request.sampling) for request in requests}) == 1


@pytest.mark.parametrize(
    ("kind", "body", "param"),
    [
        (RerankRequest, {"query": "x" * 20_000, "documents": ["d"] * 2_000}, "query"),
        (ScoreRequest, {"text_1": "x" * 20_000, "text_2": ["d"] * 2_000}, "text_1"),
    ],
)
def test_text_that_is_too_long_for_its_pairs_is_refused(
    kind: type[BaseModel], body: dict[str, Any], param: str
) -> None:
    with pytest.raises(SluiceError, match="16777216") as caught:
        check(kind, {"model": "m", **body}, BUDGETS)
    assert (caught.value.kind, caught.value.param) == (ErrorKind.INVALID_ARGUMENT, param)
    few = {name: value[:20] for name, value in body.items()}
    check(kind, {"model": "m", **few}, BUDGETS)


def test_log_probabilities_of_a_prompt_are_refused_before_they_are_computed() -> None:
    request = requests_of(COMPLETIONS, {"model": "m", "prompt": [5], "prompt_logprobs": 20, "n": CHOICES})[0]
    assert isinstance(request.prompt, TokenPrompt)
    check_prompt_logprobs(request, 6_000)
    with pytest.raises(SluiceError, match="2097152") as caught:
        check_prompt_logprobs(request, 6_500)
    assert (caught.value.kind, caught.value.param) == (ErrorKind.INVALID_ARGUMENT, "prompt_logprobs")


@pytest.mark.parametrize("with_prompt", [False, True])
def test_log_probabilities_of_a_collected_response_are_bounded(with_prompt: bool) -> None:
    options = DetailOptions(logprobs=True, prompt_logprobs=with_prompt)
    naming, form = Naming({}), CompletionFormat("cmpl-1", 0, "m", False)
    response = CollectedChoices(
        2, lambda error: error, make=lambda choices: DetailedCollectedChoice(choices, form, options, naming)
    )
    top = tuple(TokenLogprob(token, -1.0) for token in range(20))
    tokens = [TokenText(1, b"a", 0, PositionLogprobs(TokenLogprob(1, -1.0), top))] * 49_932
    for choice in response.sinks:
        assert isinstance(choice, DetailedCollectedChoice)
        choice.shown(tokens)
    response.check()
    choice = response.sinks[0]
    assert isinstance(choice, DetailedCollectedChoice)
    (choice.shown_prompt if with_prompt else choice.shown)(tokens[:1])
    with pytest.raises(SluiceError, match="2097152") as caught:
        response.check()
    assert (caught.value.kind, caught.value.param) == (ErrorKind.INVALID_ARGUMENT, "logprobs")


def test_memory_of_a_request_is_held_while_one_of_its_streams_runs() -> None:
    table = StreamTable()
    share = table.stream_manager.memory.take("a", 600)
    streams = [table.connect(index=index, memory=share)[0] for index in range(2)]
    share.release()
    assert table.stream_manager.memory.used == 600
    table.stream_manager.cancel(streams[0])
    table.stream_manager.cancel(streams[0])
    assert table.stream_manager.memory.used == 600
    table.stream_manager.give_up(streams[1], internal("lost"))
    assert table.stream_manager.memory.used == 0


def test_memory_of_running_requests_is_held_until_their_last_stream_ends() -> None:
    memory = RunningMemory(1_000)
    share = memory.take("a", 600)
    share.add_holder()
    share.release()
    assert memory.used == 600
    with pytest.raises(SluiceError, match="of this tenant exceed") as caught:
        memory.take("a", 200)
    assert (caught.value.kind, caught.value.code) == (ErrorKind.OVERLOADED, "rate_limit_exceeded")
    other = memory.take("b", 400)
    assert memory.used == 1_000
    with pytest.raises(SluiceError, match="of all tenants exceed") as caught:
        memory.take("c", 100)
    assert caught.value.code == "budget_exceeded"
    other.release()
    share.release()
    assert memory.used == 0

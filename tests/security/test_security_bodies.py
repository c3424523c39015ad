"""Bodies that cost more than they may: refused by their size and structure, before anything is built or compiled."""

from __future__ import annotations

import gc
import re
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import FrameType
from typing import Any, cast

import httpx
import orjson
import pytest

from services.common.base import budgets as common_budgets
from services.common.base.budgets import Budget
from services.common.base.errors import ErrorKind, SluiceError
from services.common.net.intake.json_values import check_values
from services.gateway.apis.openai.json_schema import check_schema
from services.gateway.http.body_budgets import BodyBudgets
from tests.support.data import hostile_bodies
from tests.support.data.bodies import BUDGETS, read
from tests.support.data.hostile_bodies import (
    CHAT,
    CONSTRAINTS,
    COUNTED,
    GROWING,
    LONG,
    MESSAGES,
    MIB,
    Hostile,
)
from tests.support.servers.suite import Suite

REFUSED = {**COUNTED, **LONG, **CONSTRAINTS}
MAX_CALLS = 10_000
"""Functions called for a refusal; a loop in Python over the elements of any of these bodies calls more."""
MAX_CALLS_OF_NODE = 20
"""The same for each value of a schema that is within the budget of nodes."""


@pytest.fixture(autouse=True)
def _collect_little() -> Iterator[None]:
    """Leaves what was there before out of garbage collections, as the gateway does."""
    gc.freeze()
    yield
    gc.unfreeze()


def peak_of(work: Callable[[], object]) -> int:
    """Most memory that Python objects took meanwhile, bytes."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def calls_of(work: Callable[[], object]) -> int:
    """Functions called meanwhile, those written in C as well."""
    calls = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def refusal_of(path: str, body: bytes) -> SluiceError:
    with pytest.raises(SluiceError) as caught:
        read(path, body)
    return caught.value


@pytest.mark.parametrize("hostile", REFUSED.values(), ids=list(REFUSED))
def test_hostile_body_is_refused_with_its_field(hostile: Hostile) -> None:
    error = refusal_of(hostile.path, hostile.make())
    assert (error.kind, error.code) == (ErrorKind.INVALID_ARGUMENT, hostile.code)
    assert error.param.startswith(hostile.param)
    assert bool(error.param) == bool(hostile.param)
    assert len(error.message) < 500


@pytest.mark.parametrize("hostile", [*COUNTED.values(), *LONG.values()], ids=[*COUNTED, *LONG])
def test_refusal_does_not_look_at_every_element(hostile: Hostile) -> None:
    body = hostile.make()
    assert calls_of(lambda: refusal_of(hostile.path, body)) < MAX_CALLS


@pytest.mark.parametrize("hostile", CONSTRAINTS.values(), ids=list(CONSTRAINTS))
def test_refusal_looks_at_schemas_within_the_budget_only(hostile: Hostile) -> None:
    body = hostile.make()
    most = MAX_CALLS + MAX_CALLS_OF_NODE * BUDGETS.schema_nodes.limit
    assert calls_of(lambda: refusal_of(hostile.path, body)) < most


@pytest.mark.parametrize("hostile", COUNTED.values(), ids=list(COUNTED))
def test_body_of_many_values_is_refused_without_being_parsed(hostile: Hostile) -> None:
    body = hostile.make()
    assert peak_of(lambda: refusal_of(hostile.path, body)) < 3 * len(body)


@pytest.mark.parametrize("hostile", [*LONG.values(), *CONSTRAINTS.values()], ids=[*LONG, *CONSTRAINTS])
def test_refusal_takes_little_memory_beside_the_parsed_body(hostile: Hostile) -> None:
    body = hostile.make()
    parsed = peak_of(lambda: orjson.loads(body))
    assert peak_of(lambda: refusal_of(hostile.path, body)) < 1.25 * parsed + 8 * MIB


@pytest.mark.parametrize(("path", "make"), GROWING.values(), ids=list(GROWING))
def test_work_for_a_body_grows_with_its_length(path: str, make: Callable[[int], bytes]) -> None:
    def cost(count: int) -> float:
        body = make(count)
        times = []
        for _ in range(3):
            began = time.process_time()
            read(path, body)
            times.append(time.process_time() - began)
        return min(times)

    # 16 times the parts; a square would be 256 times the work.
    assert cost(9_600) < 80 * cost(600)


def test_paths_in_a_schema_take_no_memory_before_an_error() -> None:
    schema = hostile_bodies.under_a_long_name(50_000, 5_000)
    assert peak_of(lambda: check_schema(schema, "f")) < 4 * MIB  # 250 MiB when each child has its path


def test_paths_in_a_schema_name_the_mistake() -> None:
    with pytest.raises(SluiceError, match=r"the schema at /properties/a/anyOf/1/items/type must be of"):
        check_schema({"properties": {"a": {"anyOf": [{}, {"items": {"type": "str"}}]}}}, "f")


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_regex": "[\x01-\U0010ffff]" * 800},
        {"regex": "("},
        {"structured_outputs": {"regex": "(a+)+b"}},
        {"guided_json": {"properties": {"a": {"pattern": "[\x01-\U0010ffff]" * 800}}}},
        {"guided_json": {"patternProperties": {"[\x01-\U0010ffff]" * 800: {}}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"pattern": "("}}}},
    ],
    ids=["guided_regex", "regex", "structured_outputs", "pattern", "patternProperties", "response_format"],
)
def test_pattern_is_not_compiled_by_the_gateway(monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]) -> None:
    compiled: list[str] = []

    def compile_nothing(pattern: Any, flags: int = 0) -> Any:
        compiled.append(str(pattern)[:40])
        raise re.error("compiled")

    body = hostile_bodies.chat(**fields)
    with monkeypatch.context() as patched:
        re.purge()
        patched.setattr("re._compiler.compile", compile_nothing)
        try:
            read(CHAT, body)
        except SluiceError as error:
            compiled.append(error.message)
    assert not compiled


def test_budgets_hold_for_all_schemas_of_a_request_together() -> None:
    schema = {"properties": hostile_bodies.named("p", 300, {})}
    tools = [hostile_bodies.tool(f"f{index}", schema) for index in range(3)]
    few = BodyBudgets(schema_nodes=Budget("schema_nodes", 1_300, ""))
    read(CHAT, hostile_bodies.chat(tools=tools), few)
    read(CHAT, hostile_bodies.chat(guided_json=schema), few)
    with pytest.raises(SluiceError) as caught:
        read(CHAT, hostile_bodies.chat(tools=[*tools, tools[0]], guided_json=schema), few)
    assert caught.value.param == "guided_json"
    with pytest.raises(SluiceError) as caught:
        read(CHAT, hostile_bodies.chat(tools=[*tools, *tools]), few)
    assert caught.value.param == "tools[4].function.parameters"


@pytest.mark.parametrize(
    ("field", "name", "limit"),
    [
        ("values", "body_values", 1_000),
        ("list_items", "list_items", 1),
        ("schema_nodes", "schema_nodes", 2),
        ("schema_characters", "schema_characters", 1_024),
        ("pattern_characters", "pattern_characters", 1_024),
        ("grammar_characters", "grammar_characters", 1_024),
    ],
)
def test_content_over_a_budget_is_refused_and_counted(
    monkeypatch: pytest.MonkeyPatch, field: str, name: str, limit: int
) -> None:
    counted: list[str] = []
    monkeypatch.setattr(common_budgets, "on_refused", counted.append)
    contents: dict[str, dict[str, Any]] = {
        "body_values": {"stop_token_ids": [1] * 1_000},
        "list_items": {"documents": [1, 2]},
        "schema_nodes": {"guided_json": {"properties": {"a": {"type": "string"}}}},
        "schema_characters": {"guided_json": {"description": "x" * 1_025}},
        "pattern_characters": {"guided_regex": "x" * 1_025},
        "grammar_characters": {"guided_grammar": "x" * 1_025},
    }
    body = hostile_bodies.chat(**contents[name])
    read(CHAT, body)
    with pytest.raises(SluiceError):
        read(CHAT, body, replace(BodyBudgets(), **cast(Any, {field: Budget(name, limit, "")})))
    assert counted == [name]


@pytest.mark.parametrize(
    "text",
    [
        "a,b[c]{d}:" * 100_000,
        '{"a": [1, 2, {"b": "c"}]}' * 50_000,
        "\\" * 300_001,
        '\\",[' * 100_000 + "\\\\",
    ],
    ids=["punctuation", "JSON", "backslashes", "escapes"],
)
def test_punctuation_in_texts_does_not_count_as_values(text: str) -> None:
    messages = [{"role": "user", "content": text}]
    budgets = BodyBudgets(values=Budget("body_values", 1_000, ""))
    assert read(CHAT, hostile_bodies.chat(messages=messages), budgets)


@pytest.mark.parametrize("head", [rb'"\\",', rb'"\"",', rb'"\\\"",', b""])
def test_escapes_do_not_hide_values(head: bytes) -> None:
    budget = Budget("body_values", 1_000, "")
    with pytest.raises(SluiceError, match="too many values"):
        check_values(b"[" + head + b"[]," * 400 + b"0]", budget)


@pytest.fixture(scope="module")
def http(suite: Suite) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=suite.url, timeout=30) as client:
        yield client


def refused_so_far(http: httpx.Client) -> dict[str, float]:
    """By budget, of the gateway."""
    line = r'^sluice_process_refused_total\{budget="(\w+)",service="gateway"\} (\S+)$'
    return {name: float(value) for name, value in re.findall(line, http.get("/metrics").text, re.M)}


@pytest.mark.parametrize(
    ("name", "budget"),
    [
        ("lists as messages", "body_values"),
        ("messages", "list_items"),
        ("a wide schema", "schema_nodes"),
        ("a long name above many", "schema_characters"),
        ("patterns of a schema", "pattern_characters"),
        ("a grammar", "grammar_characters"),
        ("content blocks", "list_items"),
        ("parameters of the Responses API", "schema_nodes"),
    ],
)
def test_hostile_body_over_http_is_a_counted_400(http: httpx.Client, name: str, budget: str) -> None:
    hostile = REFUSED[name]
    before = refused_so_far(http)[budget]
    answer = http.post(hostile.path, content=hostile.make())
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    if hostile.path == MESSAGES:
        assert error["type"] == "invalid_request_error"
        assert error["message"].startswith(hostile.param)
    else:
        assert error["code"] == hostile.code
        assert (error["param"] or "").startswith(hostile.param)
    assert refused_so_far(http)[budget] == before + 1


def test_body_larger_than_the_memory_once_parsed_over_http_is_a_counted_413(http: httpx.Client) -> None:
    before = refused_so_far(http)["body_bytes"]
    answer = http.post(CHAT, content=hostile_bodies.chat(metadata=hostile_bodies.named("p", 94_000, {})))
    assert answer.status_code == 413, answer.text
    assert "--max-body-mb" in answer.json()["error"]["message"]
    assert refused_so_far(http)["body_bytes"] == before + 1


def test_defaults_take_what_agents_send() -> None:
    """A long conversation with many tools of real size is far from every budget."""
    parameters = {
        "type": "object",
        "properties": {
            f"argument{index}": {"type": "string", "description": "What it is for. " * 8, "pattern": "^[a-z]+$"}
            for index in range(12)
        },
        "required": ["argument0"],
    }
    tools = [hostile_bodies.tool(f"tool{index}", parameters) for index in range(100)]
    messages = [{"role": "user", "content": [{"type": "text", "text": "Look at this, [1, 2]. " * 20}]}] * 3_000
    assert read(CHAT, hostile_bodies.chat(messages=messages, tools=tools), BUDGETS)

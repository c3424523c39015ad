"""Grammars of strangers: engines compile them beside their event loops, within time, steps and memory."""

from __future__ import annotations

import asyncio
import ctypes
import json
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from tokenizers import Tokenizer

from services.common.base import budgets
from services.common.base.budgets import Budget
from services.common.base.errors import ErrorKind, SluiceError, invalid
from services.worker.contract.engine import GenerateContext
from services.worker.contract.generation import FinishReason, StructuredOutput
from services.worker.engines.mock import MockEngine
from services.worker.engines.mock.guided import guided_text
from services.worker.engines.shared.grammar_compiler import GrammarCompiler, naming_constraint
from services.worker.engines.shared.sglang_request_state import RequestState as SglangFlight
from services.worker.engines.transformers.guidance import Constraint, GrammarLimits, Grammars
from services.worker.engines.vllm import library
from services.worker.engines.vllm.engine import VllmEngine
from services.worker.generation.validation import validate_grammar_size
from services.worker.settings import WorkerSettings
from tests.support.data.hostile_grammars import GRAMMARS, regex, schema
from tests.support.fakes.engines import RecordingSink, request
from tests.support.oracles.errors import raises_error
from tests.support.servers.suite import Suite
from tests.support.waiting import until

# The mock engine's own examples.


@pytest.mark.parametrize("guided", GRAMMARS.values(), ids=list(GRAMMARS))
def test_hostile_grammar_is_refused_by_the_mock_engine(guided: StructuredOutput) -> None:
    began = time.perf_counter()
    with pytest.raises(SluiceError) as caught:
        guided_text(guided, Random(0))
    assert time.perf_counter() - began < 1  # it runs in the event loop
    error = caught.value
    assert (error.kind, error.param, error.code) == (ErrorKind.INVALID_ARGUMENT, "response_format", "invalid_value")
    assert len(error.message) < 300


# The mock engine as a whole.


CHOICE = StructuredOutput("choice", ("a", "b"))


@pytest.fixture
async def engine(folder: Path) -> AsyncIterator[MockEngine]:
    made = MockEngine.from_args(WorkerSettings(model=f"tiny={folder}", speedup=1e6, max_waiting=4))
    await made.start("w")
    yield made
    await made.cleanup()


async def test_schema_that_cannot_be_followed_is_refused_and_the_engine_goes_on(engine: MockEngine) -> None:
    sink = RecordingSink()
    with raises_error(kind=ErrorKind.INVALID_ARGUMENT, param="response_format"):
        engine.submit(request("wrong", guided=schema({"pattern": "("})), GenerateContext("wrong"), sink)
    engine.submit(request("right", guided=CHOICE, max_tokens=5), GenerateContext("right"), sink)
    await until(sink.done.is_set)
    assert sink.reason is FinishReason.STOP


# What engines share.


async def test_compiling_gives_up_in_time_and_says_why() -> None:
    compiling, release = GrammarCompiler(0.2, 2), threading.Event()
    try:
        async with asyncio.timeout(30):
            runs = [asyncio.create_task(compiling.run(lambda: release.wait(60))) for _ in range(3)]
            await asyncio.wait(runs)
    finally:
        release.set()
        compiling.close()
    errors = [cast(SluiceError, run.exception()) for run in runs]
    assert [error.kind for error in errors] == [ErrorKind.INVALID_ARGUMENT] * 2 + [ErrorKind.OVERLOADED]
    assert errors[0].param == "response_format"


async def test_compiler_that_panics_ends_its_request_only() -> None:
    class PanicException(BaseException):
        """As pyo3 raises when Rust code panics."""

    def panics() -> None:
        raise PanicException("unreachable code")

    compiling = GrammarCompiler(30, 1)
    try:
        with pytest.raises(SluiceError) as caught:
            await compiling.run(panics)
        assert caught.value.kind is ErrorKind.INTERNAL
        assert await compiling.run(lambda: 5) == 5
    finally:
        compiling.close()


def test_refusal_of_a_constrained_request_names_the_constraint() -> None:
    assert naming_constraint(invalid("no"), CHOICE).param == "response_format"
    assert naming_constraint(invalid("no"), None).param == ""
    assert naming_constraint(invalid("no", param="stop"), CHOICE).param == "stop"
    broken = SluiceError(ErrorKind.INTERNAL, "no")
    assert naming_constraint(broken, CHOICE) is broken


def test_long_constraint_is_refused_before_a_worker_parses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[str] = []
    monkeypatch.setattr(budgets, "on_refused", counted.append)
    budget = Budget("grammar_characters", 100, "")
    validate_grammar_size(schema({"title": "x" * 20}), budget)
    for guided in (schema({"title": "x" * 100}), StructuredOutput("choice", ("x" * 60, "y" * 60)), regex("[" * 101)):
        with pytest.raises(SluiceError, match="100") as caught:
            validate_grammar_size(guided, budget)
        assert (caught.value.kind, caught.value.param) == (ErrorKind.INVALID_ARGUMENT, "response_format")
    assert counted == ["grammar_characters"] * 3


# transformers: llguidance.


@pytest.fixture(scope="module")
def grammars(folder: Path) -> Callable[..., Grammars]:
    text = (folder / "tokenizer.json").read_text("utf-8")
    size = Tokenizer.from_str(text).get_vocab_size()

    def made(**limits: int) -> Grammars:
        return Grammars(text, size, (1,), GrammarLimits(**limits))

    return made


ALTERNATIVES = StructuredOutput("ebnf", "start: " + " | ".join(f'"x{index}"' for index in range(3_000)))
AMBIGUOUS = StructuredOutput("ebnf", 'start: a\na: a a | "x"')


@pytest.mark.parametrize(
    ("guided", "limits", "problem"),
    [
        (ALTERNATIVES, {"size": 1_000}, "too big"),
        (regex("("), {}, "regex"),
        (schema({"type": "string", "pattern": "("}), {}, ""),
        (schema({"type": "rock"}), {}, "rock"),
        (StructuredOutput("json_schema", '{"items":' * 3_000 + "{}" + "}" * 3_000), {}, "deep|recursion"),
        (StructuredOutput("json_schema", "{"), {}, ""),
        (StructuredOutput("ebnf", "start: ("), {}, ""),
        (StructuredOutput("regex", " "), {}, "empty"),
    ],
    ids=["size", "regex", "pattern", "type", "depth", "JSON", "grammar", "empty"],
)
def test_grammar_that_llguidance_refuses_is_a_typed_error(
    grammars: Callable[..., Grammars], guided: StructuredOutput, limits: dict[str, int], problem: str
) -> None:
    with pytest.raises(SluiceError) as caught:
        grammars(**limits).constraint(guided, [])
    error = caught.value
    assert (error.kind, error.param, error.code) == (ErrorKind.INVALID_ARGUMENT, "response_format", "invalid_value")
    assert re.search(problem, error.message)  # Python 3.12 and newer leave the depth to llguidance
    assert "\n" not in error.message
    assert len(error.message) < 500


def follow(constraint: Constraint, most: int = 200) -> int:
    """Takes the first token that each mask allows; how many, until none is left or the grammar ends."""
    mask = (ctypes.c_uint8 * constraint.mask_bytes)()
    for taken in range(most):
        if not constraint.fill_mask(ctypes.addressof(mask)):
            return taken
        allowed = [8 * place + bit for place, byte in enumerate(mask) for bit in range(8) if byte >> bit & 1]
        constraint.accept(allowed[-1])
        if constraint.error:
            return taken
    return most


def test_grammar_within_its_limits_is_followed(grammars: Callable[..., Grammars]) -> None:
    constraint = grammars().constraint(regex("[0-9]{3}-[a-f]{2}"), [])
    assert follow(constraint) > 0
    assert not constraint.error


def test_grammar_over_a_limit_while_it_is_followed_is_an_error_and_no_end(grammars: Callable[..., Grammars]) -> None:
    constraint = grammars(step_items=20).constraint(AMBIGUOUS, [])
    assert follow(constraint) < 200
    assert "Too many items" in constraint.error


# vLLM: its client, which is the worker's process, compiles grammars to check them.


class FakeLlm:
    """As much of AsyncLLM as admits requests; grammars are checked when `release` is set."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self.threads: list[threading.Thread] = []
        self.added: list[tuple[str, Any]] = []
        self.error: Exception | None = None
        self.input_processor = SimpleNamespace(process_inputs=self._process)

    def _process(self, request_id: str, prompt: Any, params: Any, *, supported_tasks: Any, **options: Any) -> Any:
        assert supported_tasks == ("generate",)
        self.threads.append(threading.current_thread())
        assert self.release.wait(60)
        if self.error is not None:
            raise self.error
        return f"checked {request_id}"

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    async def add_request(self, request_id: str, prompt: Any, params: Any, **options: Any) -> Any:
        self.added.append((request_id, prompt))
        return SimpleNamespace(request_id=f"{request_id}-1", output=None, put=None)

    async def abort(self, ids: list[str], internal: bool) -> None:
        pass

    def shutdown(self, timeout_s: float) -> None:
        pass


@pytest.fixture
async def vllm(monkeypatch: pytest.MonkeyPatch, folder: Path) -> AsyncIterator[tuple[VllmEngine, FakeLlm]]:
    monkeypatch.setattr(library, "sampling_params", lambda arguments: arguments)
    monkeypatch.setattr(library, "prompt_of", lambda token_ids, salt: "rendered")
    monkeypatch.setattr(library, "error_of", lambda error: invalid(f"vLLM rejected the request: {error}"))
    engine, llm = VllmEngine(WorkerSettings(model=f"tiny={folder}", engine="vllm")), FakeLlm()
    monkeypatch.setattr(engine, "_llm", llm)
    monkeypatch.setattr(engine, "_config", SimpleNamespace(model_config=SimpleNamespace(runner_type="generate")))
    monkeypatch.setattr(engine._states, "error_of", lambda error: error)
    yield engine, llm
    llm.release.set()
    await engine.cleanup()


async def test_grammar_is_checked_beside_the_event_loop_of_a_vllm_worker(vllm: tuple[VllmEngine, FakeLlm]) -> None:
    engine, llm = vllm
    engine.submit(request("slow", guided=CHOICE), GenerateContext("slow"), RecordingSink())
    await until(lambda: llm.threads)
    engine.submit(request("quick"), GenerateContext("quick"), RecordingSink())
    await until(lambda: llm.added)
    assert llm.added == [("quick", "rendered")]
    assert threading.current_thread() not in llm.threads
    llm.release.set()
    await until(lambda: len(llm.added) == 2)
    assert llm.added[1] == ("slow", "checked slow")


async def test_grammar_that_vllm_refuses_is_the_clients_error(vllm: tuple[VllmEngine, FakeLlm]) -> None:
    engine, llm = vllm
    llm.error = ValueError("Failed to transform regex into a grammar")
    llm.release.set()
    sink = RecordingSink()
    engine.submit(request("wrong", guided=regex("(")), GenerateContext("wrong"), sink)
    await until(sink.done.is_set)
    assert sink.error is not None
    assert (sink.error.kind, sink.error.param) == (ErrorKind.INVALID_ARGUMENT, "response_format")
    assert "Failed to transform regex" in sink.error.message
    assert not llm.added


# SGLang: its scheduler compiles.


def test_grammar_that_sglang_refuses_is_the_clients_error() -> None:
    sink = RecordingSink()
    flight = SglangFlight(request(guided=regex("(")), "rid", sink)
    said = "Failed to compile regex grammar: " + "x" * 10_000
    flight.take({"meta_info": {"finish_reason": {"type": "abort", "message": said, "status_code": 400}}})
    assert sink.error is not None
    assert (sink.error.kind, sink.error.param) == (ErrorKind.INVALID_ARGUMENT, "response_format")
    assert len(sink.error.message) < 600


# Over HTTP.


@pytest.fixture(scope="module")
def http(suite: Suite) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=suite.url, timeout=60) as client:
        yield client


USER = [{"role": "user", "content": "hi"}]
OPEN = {"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}, "required": ["a"]}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {"messages": USER, "guided_json": OPEN}, "guided_json"),
        (
            "/v1/chat/completions",
            {
                "messages": USER,
                "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": OPEN}},
            },
            "response_format",
        ),
        ("/v1/completions", {"prompt": "x", "structured_outputs": {"json": OPEN}}, "structured_outputs.json"),
        (
            "/v1/responses",
            {"input": "x", "text": {"format": {"type": "json_schema", "name": "n", "schema": OPEN}}},
            "text.format",
        ),
        (
            "/v1/messages",
            {
                "messages": USER,
                "max_tokens": 5,
                "output_config": {"format": {"type": "json_schema", "schema": OPEN}},
            },
            "output_config.format",
        ),
    ],
    ids=["guided_json", "response_format", "structured_outputs", "responses", "messages"],
)
def test_schema_that_no_engine_follows_is_a_400_with_its_field(
    http: httpx.Client, path: str, body: dict[str, Any], param: str, stream: bool
) -> None:
    answer = http.post(path, json={"model": "tekken", "stream": stream, **body})
    assert answer.status_code == 400, answer.text
    error = json.loads(answer.text)["error"]
    assert "the keyword 'pattern' is not supported" in error["message"]
    if path == "/v1/messages":
        assert error["type"] == "invalid_request_error"
        assert param in error["message"]
    else:
        assert (error["param"], error["code"]) == (param, "invalid_value")


@pytest.mark.parametrize("name", ["anyOf of anyOf", "allOf of allOf"])
def test_grammar_that_never_ends_is_a_400_and_the_worker_goes_on(http: httpx.Client, name: str) -> None:
    body = {"model": "tekken", "messages": USER, "guided_json": GRAMMARS[name].grammar}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == "guided_json"
    for _ in range(4):  # on either worker
        after = http.post("/v1/chat/completions", json={"model": "tekken", "messages": USER, "max_tokens": 3})
        assert after.status_code == 200, after.text

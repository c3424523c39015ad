"""The OpenAPI document against the running suite: whatever it allows and much that it does not, every answer is one
that the document names. `SLUICE_TEST_SCHEMATHESIS=1000` tries more than CI does."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from random import Random
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.core.result import Ok
from schemathesis.schemas import BaseSchema
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.support.servers.suite import Suite

CI_EXAMPLES = 20
EXAMPLES = int(os.environ.get("SLUICE_TEST_SCHEMATHESIS", CI_EXAMPLES))
CHECKS = [
    schemathesis.checks.not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
MAX_S = 60
REQUIRED = {"model", "messages", "prompt", "input", "tokens", "max_tokens"}
MESSAGES = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
PROMPTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": MESSAGES,
    "/v1/chat/completions/render": MESSAGES,
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": {"messages": MESSAGES["messages"]},
    "/v1/embeddings": {"input": "hi"},
    "/v1/classify": {"input": "hi"},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [5]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/responses/input_tokens": {"input": "hi"},
    "/v1/responses/compact": {"input": "hi"},
    "/inference/v1/generate": {"token_ids": [5], "sampling_params": {"max_tokens": 4}},
    "/v1/score": {"text_1": "hi", "text_2": "ho"},
    "/v1/rerank": {"query": "hi", "documents": ["ho"]},
}
"""A prompt of each endpoint that has one: every model that serves the endpoint takes it."""
SELDOM = {
    "previous_response_id", "conversation", "prompt_embeds", "lora_path", "nvext", "data_parallel_rank", "suffix",
    "best_of",
    "stream_options", "tool_choice", "truncation_side", "top_logprobs", "logprobs", "prompt_logprobs", "min_tokens",
    "stop_token_ids", "allowed_token_ids", "logit_bias", "response_format", "structured_outputs", "guided_json",
    "guided_regex", "guided_choice", "guided_grammar", "json_schema", "regex", "ebnf", "custom_params", "vllm_xargs",
    "extra_key", "chat_template", "chat_template_kwargs", "continue_final_message", "add_generation_prompt",
    "documents", "text", "thinking", "output_config", "modalities", "tools", "instructions", "system",
}  # fmt: skip
"""Fields that few models and engines can honour, or that others exclude: with all of them nothing would be served."""


@pytest.fixture(scope="module")
def hurried() -> Iterator[Suite]:
    """Short answers, so that requests without a limit end soon."""
    with Suite("--workers", "1", "--speedup", "1000", env={"SLUICE_WORKER_CONTEXT_LENGTH": "1024"}) as running:
        yield running


@pytest.fixture(scope="module")
def document(hurried: Suite) -> BaseSchema:
    return schemathesis.openapi.from_url(f"{hurried.url}/openapi.json")


@pytest.fixture(scope="module")
def classifying_document(classifying_suite: Suite) -> BaseSchema:
    return schemathesis.openapi.from_url(f"{classifying_suite.url}/openapi.json")


@pytest.fixture
def kept_response(hurried: Suite) -> str:
    answer = httpx.post(f"{hurried.url}/v1/responses", json={"model": "tekken", "input": "hi"}, timeout=MAX_S)
    return str(answer.json()["id"])


@pytest.fixture
def kept_conversation(hurried: Suite) -> str:
    return str(httpx.post(f"{hurried.url}/v1/conversations", json={}, timeout=MAX_S).json()["id"])


ENDPOINTS = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/embeddings"),
    ("POST", "/inference/v1/generate"),
    ("POST", "/v1/score"),
    ("POST", "/v1/rerank"),
    ("POST", "/v1/classify"),
    ("POST", "/v1/chat/completions/render"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/responses/input_tokens"),
    ("POST", "/v1/responses/compact"),
    ("GET", "/v1/responses/{response_id}"),
    ("DELETE", "/v1/responses/{response_id}"),
    ("GET", "/v1/responses/{response_id}/input_items"),
    ("POST", "/v1/responses/{response_id}/cancel"),
    ("POST", "/v1/conversations"),
    ("GET", "/v1/conversations/{conversation_id}"),
    ("POST", "/v1/conversations/{conversation_id}"),
    ("DELETE", "/v1/conversations/{conversation_id}"),
    ("GET", "/v1/conversations/{conversation_id}/items"),
    ("POST", "/v1/conversations/{conversation_id}/items"),
    ("GET", "/v1/conversations/{conversation_id}/items/{item_id}"),
    ("DELETE", "/v1/conversations/{conversation_id}/items/{item_id}"),
    ("POST", "/v1/files"),
    ("GET", "/v1/files"),
    ("GET", "/v1/files/{file_id}"),
    ("GET", "/v1/files/{file_id}/content"),
    ("DELETE", "/v1/files/{file_id}"),
    ("GET", "/v1/batches"),
    ("GET", "/v1/batches/{batch_id}"),
    ("DELETE", "/v1/batches/{batch_id}"),
    ("POST", "/v1/batches/{batch_id}/cancel"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model}"),
    ("GET", "/health"),
    ("GET", "/ready"),
    ("GET", "/metrics"),
]
OPERATING = [
    ("POST", "/v1/load_lora_adapter"),
    ("POST", "/v1/unload_lora_adapter"),
    ("POST", "/sleep"),
    ("POST", "/wake_up"),
    ("POST", "/reset_prefix_cache"),
    ("POST", "/v1/batches"),
]
"""Not tried at random: they change the workers of all tests, see test_e2e_operations, or need a file, see
test_e2e_batches."""


def test_every_endpoint_is_tried(document: BaseSchema) -> None:
    found = []
    for operation in document.get_all_operations():
        assert isinstance(operation, Ok), operation.err()
        found.append((operation.ok().method.upper(), operation.ok().path))
    assert sorted(found) == sorted([*ENDPOINTS, *OPERATING])


def bearable(body: dict[str, Any], random: Random) -> dict[str, Any]:
    """Mostly a model that is there and few fields that could exclude each other, or all would be refused for that."""
    few = random.sample(sorted(body), k=min(len(body), random.choice([0, 1, 2, 4, 8, 200])))
    if random.random() < 0.7:
        few = [name for name in few if name not in SELDOM]
    kept = {name: value for name, value in body.items() if name in REQUIRED or name in few}
    if isinstance(body.get("model"), str) and random.random() < 0.9:
        kept["model"] = "tekken"
    if type(kept.get("max_tokens")) is int and kept["max_tokens"] > 64 and random.random() < 0.9:
        kept["max_tokens"] = 64
    return kept


def plain(path: str, body: dict[str, Any], random: Random) -> dict[str, Any]:
    """The endpoint's prompt with at most two of the other fields."""
    others = sorted(body.keys() - SELDOM - REQUIRED)
    kept = random.sample(others, k=min(len(others), random.choice([0, 1, 2])))
    return {"model": "tekken"} | {name: body[name] for name in kept} | PROMPTS[path]


def whole_numbers(value: Any) -> Any:
    """1.0 is an integer to JSON Schema, and none to the API."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [whole_numbers(each) for each in value]
    return {key: whole_numbers(each) for key, each in value.items()} if isinstance(value, dict) else value


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"])
def test_streamed_answer_conforms_to_the_document(document: BaseSchema, path: str) -> None:
    prompt = PROMPTS.get(path, {"messages": [{"role": "user", "content": "hi"}]})
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    body = {"model": "tekken", limit: 8, "stream": True, **prompt}
    answer = document[path]["POST"].Case(body=body).call_and_validate(checks=CHECKS, timeout=MAX_S)
    assert answer.headers["content-type"][0].startswith("text/event-stream")


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize(("method", "path"), ENDPOINTS)
def test_every_answer_is_one_that_the_document_names(
    request: pytest.FixtureRequest,
    kept_response: str,
    kept_conversation: str,
    method: str,
    path: str,
    mode: GenerationMode,
) -> None:
    document: BaseSchema = request.getfixturevalue("classifying_document" if path == "/v1/classify" else "document")
    operation = document[path][method]
    if mode is GenerationMode.NEGATIVE and not operation.body:
        return  # nothing can be wrong with it

    answers: Counter[int] = Counter()

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=EXAMPLES <= CI_EXAMPLES,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode), random=st.randoms(use_true_random=False))
    def attempt(case: Case[Any], random: Random) -> None:
        if isinstance(case.body, dict):
            body = bearable(case.body, random)
            if mode is GenerationMode.POSITIVE and random.random() < 0.8:
                body = whole_numbers({**PROMPTS.get(path, {}), **body})
                if path in PROMPTS and random.random() < 0.5:  # content of any kind is rarely a prompt
                    body = plain(path, body, random)
            case.body = body
        if case.path_parameters and "response_id" in case.path_parameters and random.random() < 0.5:
            case.path_parameters["response_id"] = kept_response
        if case.path_parameters and "conversation_id" in case.path_parameters and random.random() < 0.7:
            case.path_parameters["conversation_id"] = kept_conversation
            if path.endswith("/items") and isinstance(case.body, dict) and random.random() < 0.5:
                case.body["items"] = [{"role": "user", "content": "hi"}]
        if case.path_parameters and "model" in case.path_parameters and random.random() < 0.5:
            case.path_parameters["model"] = "tekken"
        if path == "/ready" and case.query:  # 503 for a model without workers is an answer, no failure
            case.query = {"model": "tekken"}
        answers[case.call_and_validate(checks=CHECKS, timeout=MAX_S).status_code] += 1

    attempt()
    print(method, path, mode.value, dict(answers))
    if operation.body:
        assert answers.total() >= EXAMPLES
    if operation.body and mode is GenerationMode.POSITIVE:
        assert answers[200], "nothing that the document allows was served"

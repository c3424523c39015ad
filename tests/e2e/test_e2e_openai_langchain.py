"""LangChain's OpenAI chat model, unmodified: streaming, tools, parallel tools, JSON schema, logprobs, errors."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel, SecretStr

from tests.support.servers.suite import Suite

CALLS = "[TOOL_CALLS] " + json.dumps([{"name": "weather", "arguments": {"city": city}} for city in ("Ulm", "Bonn")])


class Bird(BaseModel):
    """A bird."""

    name: str
    legs: int


@tool
def weather(city: str) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


def make(suite: Suite, **options: Any) -> ChatOpenAI:
    arguments: dict[str, Any] = {"model": "tekken", "max_retries": 0, "timeout": 60, **options}
    return ChatOpenAI(base_url=f"{suite.url}/v1", api_key=SecretStr("unused"), **arguments)


def embeddings_of(suite: Suite) -> OpenAIEmbeddings:
    # Its own tokenizer knows OpenAI's models only: texts are sent as they are.
    arguments: dict[str, Any] = {"model": "tekken", "check_embedding_ctx_length": False}
    arguments |= {"base_url": f"{suite.url}/v1", "api_key": SecretStr("unused")}
    return OpenAIEmbeddings(**arguments)


@pytest.fixture(scope="module")
def model(suite: Suite) -> ChatOpenAI:
    return make(suite, seed=3)


def test_whole_and_streamed_answers(model: ChatOpenAI) -> None:
    whole = model.invoke("Tell me about herons.")
    assert whole.content
    assert isinstance(whole, AIMessage)
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["output_tokens"] > 5
    chunks = list(model.stream("Tell me about herons."))
    assert "".join(str(chunk.content) for chunk in chunks) == whole.content


async def test_asynchronous_streaming(model: ChatOpenAI) -> None:
    chunks = [chunk async for chunk in model.astream("Tell me about herons.")]
    assert "".join(str(chunk.content) for chunk in chunks)


def test_parallel_tools_and_their_answers(model: ChatOpenAI) -> None:
    question = HumanMessage(f"How is the weather? <<<script: {CALLS}>>>")
    bound = model.bind_tools([weather])
    answer = bound.invoke([question])
    assert [(call["name"], call["args"]) for call in answer.tool_calls] == [
        ("weather", {"city": "Ulm"}),
        ("weather", {"city": "Bonn"}),
    ]
    streamed: Any = None
    for chunk in bound.stream([question]):
        streamed = chunk if streamed is None else streamed + chunk
    assert [call["args"] for call in streamed.tool_calls] == [{"city": "Ulm"}, {"city": "Bonn"}]
    results = [ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"]) for call in answer.tool_calls]
    assert bound.invoke([question, answer, *results]).type == "ai"


def test_a_demanded_tool(model: ChatOpenAI) -> None:
    answer = model.bind_tools([weather], tool_choice="weather").invoke("Ulm?")
    assert [call["name"] for call in answer.tool_calls] == ["weather"]
    assert isinstance(answer.tool_calls[0]["args"]["city"], str)


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(model: ChatOpenAI, method: Any) -> None:
    bird = model.with_structured_output(Bird, method=method).invoke("Name a bird.")
    assert isinstance(bird, Bird)


def test_a_structured_answer_is_streamed(model: ChatOpenAI) -> None:
    birds = list(model.with_structured_output(Bird, method="json_schema").stream("Name a bird."))
    assert isinstance(birds[-1], Bird)


def test_the_responses_api(suite: Suite) -> None:
    model = make(suite, use_responses_api=True)
    whole = model.invoke("Tell me about herons.")
    assert whole.text
    streamed: Any = None
    for chunk in model.stream("Tell me about herons."):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed.text
    question = HumanMessage(f"How is the weather? <<<script: {CALLS}>>>")
    bound = model.bind_tools([weather])
    answer = bound.invoke([question])
    assert [call["args"] for call in answer.tool_calls] == [{"city": "Ulm"}, {"city": "Bonn"}]
    results = [ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"]) for call in answer.tool_calls]
    assert bound.invoke([question, answer, *results]).type == "ai"
    assert isinstance(model.with_structured_output(Bird, method="json_schema").invoke("Name a bird."), Bird)


async def test_embeddings_asynchronously(suite: Suite) -> None:
    made = embeddings_of(suite)
    vectors = await made.aembed_documents(["one", "two"])
    assert [len(vector) for vector in vectors] == [len(vectors[0])] * 2


def test_logprobs(suite: Suite) -> None:
    answer = make(suite, logprobs=True, top_logprobs=2, max_tokens=20).invoke("Tell me about herons.")
    content = answer.response_metadata["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == answer.content
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)


def test_errors_are_those_of_the_official_client(suite: Suite) -> None:
    with pytest.raises(openai.NotFoundError):
        make(suite, model="nope").invoke("hi")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        make(suite, temperature=3).invoke("hi")

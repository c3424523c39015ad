"""The official client, unmodified, against real processes."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests.support.servers.suite import Suite

QUESTION: list[ChatCompletionMessageParam] = [
    {"role": "user", "content": "Tell me about sluices — und auf Deutsch: Schleusen für Schiffe. 🚢"}
]


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tekken"]


def test_chat_at_once_and_streamed_say_the_same(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="tekken", messages=QUESTION, max_tokens=60, seed=7)
    message = whole.choices[0].message
    assert message.role == "assistant"
    assert message.content
    assert len(message.content.split()) > 5
    assert "\ufffd" not in message.content
    assert whole.usage is not None
    assert whole.usage.completion_tokens <= 60
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens

    stream = client.chat.completions.create(
        model="tekken",
        messages=QUESTION,
        max_tokens=60,
        seed=7,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == message.content
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert reasons[-1] == whole.choices[0].finish_reason
    assert set(reasons[:-1]) == {None}
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


def test_completions(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="tekken", prompt="Once upon a time", max_tokens=20, seed=3)
    assert whole.object == "text_completion"
    assert whole.choices[0].text
    streamed = client.completions.create(model="tekken", prompt="Once upon a time", max_tokens=20, seed=3, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == whole.choices[0].text
    echoed = client.completions.create(model="tekken", prompt="Once upon a time", max_tokens=20, seed=3, echo=True)
    assert echoed.choices[0].text == "Once upon a time" + whole.choices[0].text


def test_several_prompts_are_several_choices(client: openai.OpenAI) -> None:
    both = client.completions.create(model="tekken", prompt=["Red", "Blue"], max_tokens=10, n=2, seed=1)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    alone = client.completions.create(model="tekken", prompt="Blue", max_tokens=10, seed=1)
    assert both.choices[2].text == alone.choices[0].text


def test_n_choices_differ_by_seed(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tekken", messages=QUESTION, max_tokens=80, n=3, seed=11)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) == 3
    stream = client.chat.completions.create(model="tekken", messages=QUESTION, max_tokens=80, n=3, seed=11, stream=True)
    texts = {0: "", 1: "", 2: ""}
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == {choice.index: choice.message.content for choice in answer.choices}


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI, stream: bool) -> None:
    whole = client.chat.completions.create(model="tekken", messages=QUESTION, max_tokens=60, seed=5)
    text = whole.choices[0].message.content or ""
    stop = text[len(text) // 2 : len(text) // 2 + 6]
    expected = text[: text.index(stop)]
    arguments: Any = {"model": "tekken", "messages": QUESTION, "max_tokens": 60, "seed": 5, "stop": [stop]}
    if stream:
        chunks = list(client.chat.completions.create(**arguments, stream=True))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
        assert chunks[-1].choices[0].finish_reason == "stop"
    else:
        answer = client.chat.completions.create(**arguments)
        assert answer.choices[0].message.content == expected
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage is not None
        assert whole.usage is not None
        assert answer.usage.completion_tokens < whole.usage.completion_tokens


async def test_the_async_client(suite: Suite) -> None:
    async with openai.AsyncOpenAI(base_url=f"{suite.url}/v1", api_key="unused", max_retries=0, timeout=60) as client:
        stream = await client.chat.completions.create(model="tekken", messages=QUESTION, max_tokens=30, stream=True)
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="nope", messages=QUESTION)
    assert missing.value.code == "model_not_found"
    assert "tekken" in missing.value.message
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="tekken", messages=[])
    assert bad.value.param == "messages"

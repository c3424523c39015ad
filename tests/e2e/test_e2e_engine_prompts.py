"""A gateway that leaves prompts to the engine still counts them, cuts conversations and says what does not fit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from tests.support.servers.suite import Suite

CONTEXT = 1024
USER: Any = [{"role": "user", "content": "Tell me of rivers."}]


@pytest.fixture(scope="module")
def suite() -> Iterator[Suite]:
    env = {"SLUICE_WORKER_CONTEXT_LENGTH": str(CONTEXT)}
    with Suite("--speedup", "50", "--workers", "1", "--preprocessing", "engine", env=env) as running:
        yield running


@pytest.fixture(scope="module")
def client(suite: Suite) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{suite.url}/v1", api_key="unused", max_retries=0, timeout=90) as made:
        yield made


@pytest.fixture(scope="module")
def claude(suite: Suite) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=suite.url, api_key="unused", max_retries=0, timeout=90) as made:
        yield made


def test_prompts_are_counted_as_the_engine_makes_them(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    answer = client.chat.completions.create(model="tekken", messages=USER, max_tokens=3)
    assert answer.usage is not None
    assert claude.messages.count_tokens(model="tekken", messages=USER).input_tokens == answer.usage.prompt_tokens
    counted = client.responses.input_tokens.count(model="tekken", input=USER[0]["content"])
    assert counted.input_tokens == answer.usage.prompt_tokens


def test_the_oldest_turns_are_left_out(client: openai.OpenAI) -> None:
    turns: Any = [{"role": "user", "content": "river " * 300}, {"role": "assistant", "content": "Yes. " * 100}] * 4
    long: Any = [*turns, *USER]
    response = client.responses.create(model="tekken", input=long, truncation="auto", max_output_tokens=16)
    assert response.usage is not None
    assert 16 < response.usage.input_tokens < CONTEXT
    with pytest.raises(openai.BadRequestError):
        client.responses.create(model="tekken", input=long, max_output_tokens=16)


def test_what_does_not_fit_is_said_or_clipped(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tekken", messages=USER, max_tokens=10_000_000)
    assert (caught.value.param, caught.value.code) == ("max_tokens", "context_length_exceeded")
    clipped = claude.messages.create(model="tekken", messages=USER, max_tokens=10_000_000)
    assert clipped.stop_reason in ("end_turn", "model_context_window_exceeded")
    assert clipped.content

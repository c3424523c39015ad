"""Constrained answers and demanded calls, options of the engines, single models: with the official client."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from pydantic import BaseModel

QUESTION: Any = [{"role": "user", "content": "Where is the heron?"}]


class Bird(BaseModel):
    name: str
    legs: int
    colours: list[str]


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(model="tekken", messages=QUESTION, max_tokens=300, **fields)


def test_the_clients_own_parsing_of_a_schema(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(model="tekken", messages=QUESTION, response_format=Bird, max_tokens=400)
    assert isinstance(answer.choices[0].message.parsed, Bird)


def test_a_streamed_schema_is_the_same_document(client: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "bird", "schema": Bird.model_json_schema()}}
    text = "".join(
        chunk.choices[0].delta.content or "" for chunk in ask(client, response_format=form, stream=True, seed=2)
    )
    Bird.model_validate_json(text)
    assert ask(client, response_format=form, seed=2).choices[0].message.content == text


def test_constraints_under_the_engines_names(client: openai.OpenAI) -> None:
    chosen = ask(client, extra_body={"structured_outputs": {"choice": ["reeds", "river"]}})
    assert chosen.choices[0].message.content in ("reeds", "river")
    document = ask(client, extra_body={"guided_json": Bird.model_json_schema()})
    Bird.model_validate_json(document.choices[0].message.content)


def test_a_capability_that_no_engine_has_names_the_field(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, extra_body={"guided_regex": "[0-9]{3}-[a-f]+"})
    assert (refused.value.param, refused.value.code) == ("guided_regex", "unsupported_parameter")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tekken", prompt="", extra_body={"prompt_embeds": EMBEDS})
    assert caught.value.param == "prompt_embeds"
    assert "capability" in caught.value.message


# A .npy file of one row of two zeros.
EMBEDS = (
    "k05VTVBZAQB2AHsnZGVzY3InOiAnPGY0JywgJ2ZvcnRyYW5fb3JkZXInOiBGYWxzZSwgJ3NoYXBlJzogKDEsIDIpLCB9ICAgICAgICAgICAgICAg"
    "ICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgIAoAAAAAAAAAAA=="
)


def test_options_of_the_engines_are_taken(client: openai.OpenAI) -> None:
    answer = ask(
        client,
        temperature=0.5,
        top_p=0.9,
        frequency_penalty=0.1,
        presence_penalty=0.1,
        logit_bias={"5": 1},
        seed=1,
        user="me",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        extra_body={
            "top_k": 5,
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "bad_words": ["reeds", "heron"],
            "allowed_token_ids": [1, 2, 3],
            "spaces_between_special_tokens": True,
            "priority": 3,
            "cache_salt": "tenant",
            "request_id": "mine",
            "use_beam_search": False,
        },
    )
    assert answer.choices[0].message.content


def test_prompts_are_cut(client: openai.OpenAI) -> None:
    for side in ("left", "right"):
        answer = client.completions.create(
            model="tekken",
            prompt="one two three four five six seven",
            max_tokens=3,
            echo=True,
            extra_body={"truncate_prompt_tokens": 3, "truncation_side": side},
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == 3
        assert ("one" in answer.choices[0].text) == (side == "right")

"""Log-probabilities with the official client: in both APIs, streamed and whole, in OpenAI's exact shapes."""

from __future__ import annotations

import math
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionTokenLogprob

QUESTION: Any = [{"role": "user", "content": "Schiff 🚢 ahoy — und los!"}]
PROMPT = "Schiff 🚢 ahoy"


def text_of(content: Any) -> str:
    return b"".join(bytes(entry.bytes) for entry in content).decode()


def test_a_chat_tells_each_token_and_its_alternatives(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tekken", messages=QUESTION, max_tokens=40, seed=3, logprobs=True, top_logprobs=4
    )
    choice = answer.choices[0]
    assert choice.logprobs is not None
    content: Any = choice.logprobs.content
    assert answer.usage is not None
    assert len(content) == answer.usage.completion_tokens
    assert text_of(content) == choice.message.content
    assert "🚢" in text_of(content)
    for entry in content:
        assert len(entry.top_logprobs) == 4
        ranked = [top.logprob for top in entry.top_logprobs]
        assert ranked == sorted(ranked, reverse=True)
        assert sum(math.exp(top.logprob) for top in entry.top_logprobs) <= 1.0001
        assert entry.logprob <= 0
        assert (entry.token, entry.logprob) in [(top.token, top.logprob) for top in entry.top_logprobs]
    assert any(entry.token.startswith("\\x") or entry.token.startswith(" \\x") for entry in content)


@pytest.mark.parametrize("top", [None, 0, 2])
def test_streamed_and_whole_logprobs_are_the_same(client: openai.OpenAI, top: int | None) -> None:
    arguments: Any = {"model": "tekken", "messages": QUESTION, "max_tokens": 50, "seed": 5, "logprobs": True}
    if top is not None:
        arguments["top_logprobs"] = top
    whole = client.chat.completions.create(**arguments).choices[0]
    heard: list[ChatCompletionTokenLogprob] = []
    text = ""
    for chunk in client.chat.completions.create(**arguments, stream=True):
        text += chunk.choices[0].delta.content or ""
        if chunk.choices[0].logprobs is not None:
            heard += chunk.choices[0].logprobs.content or []
    assert whole.logprobs is not None
    assert heard == whole.logprobs.content
    assert text == whole.message.content
    assert all(len(entry.top_logprobs) == (top or 0) for entry in heard)


def test_logprobs_end_where_a_stop_string_ends_the_text(client: openai.OpenAI) -> None:
    arguments: Any = {"model": "tekken", "messages": QUESTION, "max_tokens": 40, "seed": 3, "logprobs": True}
    free = client.chat.completions.create(**arguments).choices[0]
    assert free.message.content is not None
    stop = free.message.content[20:26]
    stopped = client.chat.completions.create(**arguments, stop=stop)
    choice = stopped.choices[0]
    assert choice.logprobs is not None
    assert stopped.usage is not None
    assert len(choice.logprobs.content or []) == stopped.usage.completion_tokens
    assert text_of(choice.logprobs.content).startswith(choice.message.content or "?")


def test_choices_have_their_own(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tekken", messages=QUESTION, max_tokens=60, seed=3, n=3, logprobs=True, top_logprobs=1
    )
    for choice in answer.choices:
        assert choice.logprobs is not None
        # The end-of-sequence token is one of the tokens, but not of the text.
        assert text_of(choice.logprobs.content).removesuffix("</s>") == choice.message.content


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("echo", [False, True])
def test_completions_tell_tokens_offsets_and_alternatives(client: openai.OpenAI, stream: bool, echo: bool) -> None:
    arguments: Any = {
        "model": "tekken",
        "prompt": PROMPT,
        "max_tokens": 30,
        "seed": 3,
        "logprobs": 2,
        "echo": echo,
    }
    lists: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    text = ""
    answers = (
        client.completions.create(**arguments, stream=True) if stream else [client.completions.create(**arguments)]
    )
    for answer in answers:
        choice = answer.choices[0]
        text += choice.text
        if choice.logprobs is not None:
            for name, values in lists.items():
                values += getattr(choice.logprobs, name)
    assert len({len(values) for values in lists.values()}) == 1
    assert text.startswith(PROMPT) == echo
    known = [alternatives for alternatives in lists["top_logprobs"] if alternatives is not None]
    assert lists["top_logprobs"].count(None) == lists["token_logprobs"].count(None) == int(echo)
    for token, logprob, top in zip(lists["tokens"], lists["token_logprobs"], lists["top_logprobs"], strict=True):
        if top is not None:
            assert top[token] == logprob
    assert all(len(alternatives) in (2, 3) for alternatives in known)
    plain = [
        (token, offset)
        for token, offset in zip(lists["tokens"], lists["text_offset"], strict=True)
        if not token.startswith("bytes:") and token not in ("<s>", "</s>")
    ]
    assert len(plain) > 5
    assert all(text.startswith(token, offset) for token, offset in plain)
    assert lists["text_offset"] == sorted(lists["text_offset"])


def test_scoring_a_text_without_an_answer(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tekken", prompt=[PROMPT, "Red"], max_tokens=0, echo=True, logprobs=1)
    assert [choice.text for choice in answer.choices] == [PROMPT, "Red"]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs is not None
        assert choice.logprobs.token_logprobs[0] is None
        assert all(logprob is not None for logprob in choice.logprobs.token_logprobs[1:])


def test_tokens_as_ids(client: openai.OpenAI) -> None:
    answer: Any = client.chat.completions.create(
        model="tekken",
        messages=QUESTION,
        max_tokens=5,
        logprobs=True,
        top_logprobs=1,
        extra_body={"return_tokens_as_token_ids": True, "return_token_ids": True, "prompt_logprobs": 1},
    )
    choice = answer.choices[0]
    assert [entry.token for entry in choice.logprobs.content] == [f"token_id:{token}" for token in choice.token_ids]
    assert len(answer.prompt_token_ids) == answer.usage.prompt_tokens
    assert answer.prompt_logprobs[0] is None
    for token, known in zip(answer.prompt_token_ids[1:], answer.prompt_logprobs[1:], strict=True):
        assert known[str(token)]["logprob"] <= 0


def test_token_ids_and_usage_in_every_chunk(client: openai.OpenAI) -> None:
    arguments: Any = {
        "model": "tekken",
        "messages": QUESTION,
        "max_tokens": 30,
        "seed": 1,
        "extra_body": {"return_token_ids": True},
    }
    whole: Any = client.chat.completions.create(**arguments)
    options: Any = {"include_usage": True, "continuous_usage_stats": True}  # the latter is no field of OpenAI's
    chunks: Any = list(client.chat.completions.create(**arguments, stream=True, stream_options=options))
    ids = [token for chunk in chunks if chunk.choices for token in getattr(chunk.choices[0], "token_ids", None) or []]
    assert ids == whole.choices[0].token_ids
    assert chunks[0].prompt_token_ids == whole.prompt_token_ids
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == whole.usage.completion_tokens

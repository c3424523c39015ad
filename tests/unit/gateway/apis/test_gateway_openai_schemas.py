"""OpenAI requests: every mistake is a typed error that names its field."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from services.common.errors import ErrorKind, SluiceError
from services.gateway.apis.openai.schemas import ChatCompletionRequest, CompletionRequest
from services.gateway.apis.openai.translate import chat_request, completion_requests
from services.gateway.apis.openai.validation import check
from services.gateway.core.request import ChatPrompt, GenerationRequest, TextPrompt, TokenPrompt
from tests.support.data.bodies import BUDGETS

MESSAGES = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def chat(**fields: Any) -> GenerationRequest:
    body = {"model": "m", "messages": MESSAGES, **fields}
    return chat_request(body, check(ChatCompletionRequest, body, BUDGETS), "chatcmpl-1", 8, BUDGETS)


def complete(**fields: Any) -> list[GenerationRequest]:
    body = {"model": "m", "prompt": "once", **fields}
    return completion_requests(check(CompletionRequest, body, BUDGETS), "cmpl-1", 8, BUDGETS)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": None}, "messages"),
        ({"model": ""}, "model"),
        ({"model": 3}, "model"),
        ({"temperature": "0.5"}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"n": 0}, "n"),
        ({"n": 9}, "n"),
        ({"stream": "yes"}, "stream"),
        ({"stream": False, "stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", 1]}, "stop"),
        ({"stop": ["x"] * 1001}, "stop"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias[5]"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.1}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [TOOL, {"type": "other", "function": {}}]}, "tools[1].type"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"temprature": 1}, "temprature"),
        ({"cache_salt": ""}, "cache_salt"),
    ],
)
def test_chat_mistakes_name_their_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(SluiceError) as caught:
        chat(**fields)
    assert caught.value.kind is ErrorKind.INVALID_ARGUMENT
    assert caught.value.param == param
    assert caught.value.message.endswith(".")
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": ["a"] * 5, "n": 2}, "prompt"),
        ({"suffix": "end", "echo": True}, "suffix"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"best_of": 3, "n": 2}, "best_of"),
    ],
)
def test_completion_mistakes_name_their_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(SluiceError) as caught:
        complete(**fields)
    assert (caught.value.kind, caught.value.param) == (ErrorKind.INVALID_ARGUMENT, param)


def test_a_chat_request_arrives_whole() -> None:
    request = chat(
        n=2,
        stop=["\n", "END"],
        max_tokens=5,
        max_completion_tokens=7,
        min_tokens=2,
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        min_p=0.1,
        seed=-4,
        frequency_penalty=1,
        presence_penalty=-1,
        repetition_penalty=1.1,
        logit_bias={"5": 2.5},
        ignore_eos=True,
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        stop_token_ids=[7, 8],
        tools=[TOOL],
        chat_template_kwargs={"thinking": True},
        reasoning_effort="low",
        priority=-3,
        cache_salt="tenant",
    )
    assert request.choices == 2
    assert request.stop.strings == ("\n", "END")
    assert (request.stop.max_tokens, request.stop.min_tokens) == (7, 2)
    assert request.stop.token_ids == (7, 8)
    assert request.stop.ignore_eos
    assert request.stop.include_stop_string
    assert not request.skip_special_tokens
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 3, 0.1)
    assert (sampling.seed, sampling.logit_bias) == (-4, {5: 2.5})
    assert (sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty) == (1, -1, 1.1)
    assert (request.priority, request.cache_salt) == (-3, "tenant")
    prompt = request.prompt
    assert isinstance(prompt, ChatPrompt)
    assert orjson.loads(prompt.messages_json) == MESSAGES
    assert orjson.loads(prompt.tools_json) == [TOOL]
    assert orjson.loads(prompt.template_kwargs_json) == {"thinking": True, "reasoning_effort": "low"}


def test_nulls_are_unset() -> None:
    request = chat(temperature=None, stop=None, max_tokens=None, n=None, stream=None, tools=None, logit_bias=None)
    assert request.choices == 1
    assert request.sampling.temperature is None
    assert request.stop.max_tokens is None


def test_every_form_of_completion_prompt() -> None:
    assert [one.prompt for one in complete(prompt="a")] == [TextPrompt("a", None)]
    assert [one.prompt for one in complete(prompt=["a", "b"])] == [TextPrompt("a", None), TextPrompt("b", None)]
    assert [one.prompt for one in complete(prompt=[1, 2])] == [TokenPrompt(b"\1\0\0\0\2\0\0\0")]
    assert [one.prompt for one in complete(prompt=[[1], [2]])] == [TokenPrompt(b"\1\0\0\0"), TokenPrompt(b"\2\0\0\0")]
    assert complete(prompt="a")[0].stop.max_tokens == 16
    assert len({one.request_id for one in complete(prompt=["a", "b"])}) == 2


def test_what_an_answer_is_taken_apart_with() -> None:
    plain = chat().parsing
    assert plain is not None
    assert (plain.tool_parser, plain.reasoning_parser) == ("", "auto")
    called = chat(tools=[TOOL], tool_choice="required", parallel_tool_calls=False).parsing
    assert called is not None
    assert (called.tool_parser, called.single_tool_call) == ("auto", True)
    assert orjson.loads(called.tools_json) == [TOOL]
    assert orjson.loads(called.tool_choice_json) == "required"
    forbidden = chat(tools=[TOOL], tool_choice="none").parsing
    assert forbidden is not None
    assert forbidden.tool_parser == ""
    assert complete(prompt="a")[0].parsing is None

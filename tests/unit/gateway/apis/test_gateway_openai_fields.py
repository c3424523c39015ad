"""OpenAI requests: valid fields become a generation request, every mistake is a typed error that names its field."""

from __future__ import annotations

import base64
import struct
from typing import Any

import orjson
import pytest

from services.common.base.errors import ErrorKind
from services.common.base.packing import pack_u32
from services.gateway.apis.openai.schemas import ChatCompletionRequest, CompletionRequest
from services.gateway.apis.openai.translate import chat_request, completion_requests
from services.gateway.apis.openai.validation import check
from services.gateway.core.request import ChatPrompt, EmbedsPrompt, GenerationRequest, TextPrompt, TokenPrompt
from tests.support.data.bodies import BUDGETS
from tests.support.oracles.errors import raises_error

# As vLLM 0.33 and SGLang 0.5.23 list them, without those of OpenAI.
VLLM = """
thinking_token_budget include_reasoning use_beam_search top_k min_p repetition_penalty watermarking
length_penalty stop_token_ids include_stop_str_in_output ignore_eos min_tokens skip_special_tokens
spaces_between_special_tokens truncate_prompt_tokens truncation_side prompt_logprobs logprob_token_ids
allowed_token_ids bad_words echo add_generation_prompt continue_final_message add_special_tokens documents
chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs structured_outputs priority request_id
session_id return_tokens_as_token_ids return_token_ids return_weight_versions routed_experts_prompt_start
return_token_offsets return_prompt_text mm_payload return_mm_kwargs cache_salt kv_transfer_params
ec_transfer_params vllm_xargs repetition_detection stream_interval
"""
SGLANG = """
return_hidden_states return_routed_experts routed_experts_start_len return_cached_tokens_details
return_spec_tokens_details return_token_ids return_prompt_token_ids return_meta_info
return_input_ids_in_sglext return_output_ids_in_sglext return_sampling_mask sampling_logprobs_mode
return_flat_raw_output_top_logprobs thinking task top_k min_p min_tokens regex ebnf repetition_penalty
stop_token_ids stop_regex no_stop_trim ignore_eos continue_final_message skip_special_tokens lora_path
session_id session_params separate_reasoning stream_reasoning chat_template_kwargs max_dynamic_patch
min_dynamic_patch use_audio_in_video images_config video_config mm_processor_kwargs custom_logit_processor
custom_params watermark input_ids rid extra_key cache_salt priority data_parallel_rank bootstrap_host
bootstrap_port bootstrap_room custom_labels
"""
OPENAI = """
audio frequency_penalty function_call functions logit_bias logprobs max_completion_tokens max_tokens messages
metadata modalities model n parallel_tool_calls prediction presence_penalty prompt_cache_key
prompt_cache_retention reasoning_effort response_format safety_identifier seed service_tier stop store stream
stream_options temperature tool_choice tools top_logprobs top_p user verbosity web_search_options
"""


@pytest.mark.parametrize("field", sorted(set(f"{VLLM} {SGLANG} {OPENAI}".split())))
def test_every_field_of_a_chat_is_known_by_name(field: str) -> None:
    assert field in ChatCompletionRequest.model_fields


@pytest.mark.parametrize(
    ("field", "neutral", "asking"),
    [
        ("use_beam_search", False, True),
        ("length_penalty", 1.0, 0.8),
        ("stream_reasoning", True, False),
        ("functions", None, []),
        ("return_hidden_states", False, "last"),
        ("kv_transfer_params", None, {}),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_the_reason(field: str, neutral: Any, asking: Any) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    check(ChatCompletionRequest, {**body, field: neutral}, BUDGETS)
    with raises_error(match="not supported: ", param=field, code="unsupported_parameter"):
        check(ChatCompletionRequest, {**body, field: asking}, BUDGETS)


def complete(**fields: Any) -> GenerationRequest:
    return completion_requests(
        check(CompletionRequest, {"model": "m", "prompt": "x", **fields}, BUDGETS), "cmpl-1", 8, BUDGETS
    )[0]


def test_options_of_the_engines_arrive() -> None:
    request = complete(
        allowed_token_ids=[1, 2],
        thinking_token_budget=7,
        vllm_xargs={"a": 1},
        lora_path="adapter",
        extra_key="salt",
        no_stop_trim=True,
        stop="END",
        prompt_logprobs=2,
        return_token_ids=True,
        prompt=[1, 2],
    )
    assert request.prompt == TokenPrompt(pack_u32([1, 2]))
    assert request.sampling.allowed_token_ids == (1, 2)
    assert request.sampling.thinking_token_budget == 7
    assert request.sampling.engine_options == {"a": 1}
    assert (request.lora, request.cache_salt) == ("adapter", "salt")
    assert request.stop.include_stop_string
    assert request.prompt_logprobs == 2
    assert request.token_texts
    assert set(request.needs) == {("prompt_logprobs", "prompt_logprobs"), ("lora", "lora_path")}


def test_an_echo_with_logprobs_asks_for_the_prompts() -> None:
    request = complete(echo=True, logprobs=3, max_tokens=0)
    assert (request.logprobs, request.prompt_logprobs, request.stop.max_tokens) == (3, 3, 1)
    assert set(request.needs) == {("logprobs", "logprobs"), ("prompt_logprobs", "echo")}


def npy(rows: int, width: int, kind: str = "<f4", order: str = "False", cut: int = 0) -> str:
    header = f"{{'descr': '{kind}', 'fortran_order': {order}, 'shape': ({rows}, {width}), }}".ljust(117) + "\n"
    values = struct.pack(f"<{rows * width}f", *range(rows * width))
    data = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + values
    return base64.b64encode(data[: len(data) - cut]).decode()


def test_prompt_embeddings_arrive() -> None:
    request = completion_requests(
        check(CompletionRequest, {"model": "m", "prompt_embeds": npy(3, 4)}, BUDGETS), "c", 8, BUDGETS
    )[0]
    assert isinstance(request.prompt, EmbedsPrompt)
    assert (request.prompt.length, request.prompt.width) == (3, 4)
    assert request.needs == (("prompt_embeds", "prompt_embeds"),)


@pytest.mark.parametrize(
    "encoded",
    ["%%%", base64.b64encode(b"nothing").decode(), npy(2, 2, "<f8"), npy(2, 2, order="True"), npy(2, 2, cut=1)],
)
def test_prompt_embeddings_that_are_none(encoded: str) -> None:
    with raises_error(param="prompt_embeds"):
        completion_requests(
            check(CompletionRequest, {"model": "m", "prompt_embeds": encoded}, BUDGETS), "c", 8, BUDGETS
        )


MESSAGES = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def chat(**fields: Any) -> GenerationRequest:
    body = {"model": "m", "messages": MESSAGES, **fields}
    return chat_request(body, check(ChatCompletionRequest, body, BUDGETS), "chatcmpl-1", 8, BUDGETS)


def completions(**fields: Any) -> list[GenerationRequest]:
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
    with raises_error(kind=ErrorKind.INVALID_ARGUMENT, param=param) as caught:
        chat(**fields)
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
    with raises_error(kind=ErrorKind.INVALID_ARGUMENT, param=param):
        completions(**fields)


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
    assert [one.prompt for one in completions(prompt="a")] == [TextPrompt("a", None)]
    assert [one.prompt for one in completions(prompt=["a", "b"])] == [TextPrompt("a", None), TextPrompt("b", None)]
    assert [one.prompt for one in completions(prompt=[1, 2])] == [TokenPrompt(b"\1\0\0\0\2\0\0\0")]
    assert [one.prompt for one in completions(prompt=[[1], [2]])] == [
        TokenPrompt(b"\1\0\0\0"),
        TokenPrompt(b"\2\0\0\0"),
    ]
    assert completions(prompt="a")[0].stop.max_tokens == 16
    assert len({one.request_id for one in completions(prompt=["a", "b"])}) == 2


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
    assert completions(prompt="a")[0].parsing is None


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low", "enable_thinking": True, "thinking": True}),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False, "thinking": False}),
        (
            {"reasoning_effort": "high", "enable_thinking": False},
            {"reasoning_effort": "high", "enable_thinking": False},
        ),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"thinking": True}},
            {"reasoning_effort": "none", "thinking": True},
        ),
    ],
)
def test_effort_sets_the_switch_for_thinking_unless_the_client_does(
    fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    prompt = chat(**fields).prompt
    assert isinstance(prompt, ChatPrompt)
    assert orjson.loads(prompt.template_kwargs_json) == expected


def test_effort_none_is_reported_only_without_any_switch() -> None:
    request = chat(reasoning_effort="none")
    assert request.fields_without_effect(["reasoning_effort", "thinking"]) == []
    assert request.fields_without_effect(["reasoning_effort", "thinking", "enable_thinking"]) == ["reasoning_effort"]
    assert chat(reasoning_effort="low").fields_without_effect(["reasoning_effort"]) == ["reasoning_effort"]

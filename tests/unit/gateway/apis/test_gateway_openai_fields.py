"""Every field of every endpoint with every kind of wrong value, and every field that the engines know."""

from __future__ import annotations

import base64
import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from services.common.errors import ErrorKind, SluiceError
from services.common.packing import pack_u32
from services.gateway.apis.openai.embedding_schemas import EmbeddingRequest
from services.gateway.apis.openai.schemas import ChatCompletionRequest, CompletionRequest
from services.gateway.apis.openai.token_schemas import DetokenizeRequest, TokenizeRequest
from services.gateway.apis.openai.translate import chat_request, completion_requests
from services.gateway.apis.openai.validation import check
from services.gateway.core.request import EmbedsPrompt, GenerationRequest, TokenPrompt
from tests.support.data.bodies import BUDGETS

BODIES: dict[type[BaseModel], dict[str, Any]] = {
    ChatCompletionRequest: {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    CompletionRequest: {"model": "m", "prompt": "hi"},
    EmbeddingRequest: {"model": "m", "input": "hi"},
    TokenizeRequest: {"model": "m", "prompt": "hi"},
    DetokenizeRequest: {"model": "m", "tokens": [1]},
}
FIELDS = [
    (kind, field.alias or name) for kind in BODIES for name, field in kind.model_fields.items() if name != "messages"
]
VALUES: list[Any] = [
    None,
    True,
    0,
    -1,
    2**70,
    1.5,
    -1e300,
    float("inf"),
    "",
    "x",
    "x" * 300_000,
    [],
    [None],
    [""],
    ["x"],
    [-1],
    [1.5],
    [[]],
    {},
    {"x": None},
    {"type": "x"},
    {"1": 1e9},
    {"99999999999": 1},
    {"x": {"x": {"x": []}}},
]


def request_of(kind: type[BaseModel], body: dict[str, Any]) -> Any:
    fields = check(kind, body, BUDGETS)
    if isinstance(fields, ChatCompletionRequest):
        return chat_request(body, fields, "r", 8, BUDGETS, forces_calls=True)
    if isinstance(fields, CompletionRequest):
        return completion_requests(fields, "r", 8, BUDGETS)
    return fields


@pytest.mark.parametrize(("kind", "field"), FIELDS)
def test_a_wrong_value_is_an_error_that_names_its_field(kind: type[BaseModel], field: str) -> None:
    for value in VALUES:
        body = {**BODIES[kind], field: value}
        if field == "prompt_embeds" and value is not None:
            del body["prompt"]
        said = None
        try:
            request_of(kind, body)
        except SluiceError as error:
            said = error
        if said is not None:
            assert said.kind is ErrorKind.INVALID_ARGUMENT
            named = said.param or ""
            assert named == field or named.startswith((f"{field}.", f"{field}[")), (value, said.param, said.message)
            assert field in said.message
            assert "\n" not in said.message
            assert len(said.message) < 500


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(list(BODIES)), st.data())
def test_any_combination_is_a_request_or_a_typed_error(kind: type[BaseModel], data: st.DataObject) -> None:
    names = [field.alias or name for name, field in kind.model_fields.items()]
    json = st.recursive(
        st.none() | st.booleans() | st.integers(-3, 40) | st.floats(-3, 3) | st.text(max_size=3),
        lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=3), children, max_size=3),
        max_leaves=5,
    )
    body = {**BODIES[kind], **data.draw(st.dictionaries(st.sampled_from(names), json | st.sampled_from(VALUES)))}
    failure = None
    try:
        request_of(kind, body)
    except SluiceError as error:
        failure = error
    assert failure is None or (failure.kind is ErrorKind.INVALID_ARGUMENT and failure.param)


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
        ("verbosity", "medium", "low"),
        ("kv_transfer_params", None, {}),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_the_reason(field: str, neutral: Any, asking: Any) -> None:
    body = BODIES[ChatCompletionRequest]
    check(ChatCompletionRequest, {**body, field: neutral}, BUDGETS)
    with pytest.raises(SluiceError, match="not supported: ") as caught:
        check(ChatCompletionRequest, {**body, field: asking}, BUDGETS)
    assert (caught.value.param, caught.value.code) == (field, "unsupported_parameter")


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
    with pytest.raises(SluiceError) as caught:
        completion_requests(
            check(CompletionRequest, {"model": "m", "prompt_embeds": encoded}, BUDGETS), "c", 8, BUDGETS
        )
    assert caught.value.param == "prompt_embeds"

"""Every option of a request needs its capability; values that change nothing need none."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

import pytest

from services.common.base.errors import ErrorKind, SluiceError
from services.postprocess.detokenize.stream import StreamOptions
from services.worker.contract.capabilities import Capability
from services.worker.contract.generation import (
    Disaggregation,
    MediaKind,
    PromptEmbeds,
    Role,
    SamplingParams,
    StructuredOutput,
)
from services.worker.contract.required_capabilities import demands
from services.worker.engines import find_engine
from services.worker.generation.validation import validate, validate_embedding
from tests.support.fakes.engines import CONFIG, media_item, request
from tests.support.oracles.errors import raises_error

BARE = replace(CONFIG, capabilities=frozenset({"token_ids"}), adapters=("polite",))
USES: list[tuple[Capability, str, dict[str, Any]]] = [
    (Capability.TEXT, "prompt", {"text": "hello"}),
    (Capability.MESSAGES, "prompt", {"messages_json": b"{}"}),
    (Capability.PROMPT_EMBEDS, "prompt_embeds", {"embeds": PromptEmbeds(bytes(16), 4)}),
    (Capability.TEXT_OUT, "postprocess", {"text_out": StreamOptions("tiny")}),
    (Capability.LOGPROBS, "logprobs", {"logprobs": 0}),
    (Capability.PROMPT_LOGPROBS, "prompt_logprobs", {"prompt_logprobs": 2}),
    (Capability.GUIDED_JSON, "response_format", {"guided": StructuredOutput("json_schema", "{}")}),
    (Capability.GUIDED_JSON, "response_format", {"guided": StructuredOutput("json_object")}),
    (Capability.GUIDED_REGEX, "response_format", {"guided": StructuredOutput("regex", "a+")}),
    (Capability.GUIDED_GRAMMAR, "response_format", {"guided": StructuredOutput("ebnf", "root ::= 'a'")}),
    (Capability.GUIDED_CHOICE, "response_format", {"guided": StructuredOutput("choice", ("a", "b"))}),
    (Capability.STRUCTURAL_TAG, "response_format", {"guided": StructuredOutput("structural_tag", "{}")}),
    (Capability.TEMPERATURE, "temperature", {"sampling": SamplingParams(temperature=0.0)}),
    (Capability.TOP_P, "top_p", {"sampling": SamplingParams(top_p=0.5)}),
    (Capability.TOP_K, "top_k", {"sampling": SamplingParams(top_k=5)}),
    (Capability.MIN_P, "min_p", {"sampling": SamplingParams(min_p=0.1)}),
    (Capability.FREQUENCY_PENALTY, "frequency_penalty", {"sampling": SamplingParams(frequency_penalty=0.1)}),
    (Capability.PRESENCE_PENALTY, "presence_penalty", {"sampling": SamplingParams(presence_penalty=-0.1)}),
    (Capability.REPETITION_PENALTY, "repetition_penalty", {"sampling": SamplingParams(repetition_penalty=1.1)}),
    (Capability.SEED, "seed", {"sampling": SamplingParams(seed=0)}),
    (Capability.LOGIT_BIAS, "logit_bias", {"sampling": SamplingParams(logit_bias={5: 1.0})}),
    (Capability.ALLOWED_TOKEN_IDS, "allowed_token_ids", {"sampling": SamplingParams(allowed_token_ids=(5,))}),
    (Capability.BAD_WORDS, "bad_words", {"sampling": SamplingParams(bad_words=((5, 6),))}),
    (Capability.THINKING_TOKEN_BUDGET, "thinking_token_budget", {"sampling": SamplingParams(thinking_token_budget=0)}),
    (Capability.ENGINE_OPTIONS, "engine_options", {"sampling": SamplingParams(engine_options={"x": 1})}),
    (Capability.MIN_TOKENS, "min_tokens", {"min_tokens": 1}),
    (Capability.IGNORE_EOS, "ignore_eos", {"ignore_eos": True}),
    (Capability.PRIORITY, "priority", {"priority": -1}),
    (Capability.CACHE_SALT, "cache_salt", {"cache_salt": "tenant"}),
    (Capability.LORA, "lora", {"lora": "polite"}),
    (Capability.IMAGE, "media", {"media": (media_item(MediaKind.IMAGE),)}),
    (Capability.AUDIO, "media", {"media": (media_item(MediaKind.AUDIO),)}),
    (Capability.VIDEO, "media", {"media": (media_item(MediaKind.VIDEO),)}),
]
NO_USE: list[dict[str, Any]] = [
    {},
    {"sampling": SamplingParams(top_p=1.0, top_k=-1, min_p=0.0, frequency_penalty=0.0, presence_penalty=0.0)},
    {"sampling": SamplingParams(top_k=0, repetition_penalty=1.0)},
    {"data_parallel_rank": 0},
    {"priority": 0, "cache_salt": ""},
]


@pytest.mark.parametrize(("capability", "param", "fields"), USES, ids=lambda value: str(value)[:40])
def test_an_option_needs_its_capability(capability: Capability, param: str, fields: dict[str, Any]) -> None:
    asked = request(**fields)
    with raises_error(kind=ErrorKind.FAILED_PRECONDITION, param=param, code="unsupported_by_engine") as refusal:
        validate(asked, BARE)
    assert capability in refusal.value.message
    validate(asked, replace(BARE, capabilities=BARE.capabilities | {capability}))


@pytest.mark.parametrize("kind", MediaKind)
def test_http_engine_refuses_media(kind: MediaKind) -> None:
    config = replace(CONFIG, capabilities=find_engine("http").CAPABILITIES | {Capability.TOKEN_IDS})
    with raises_error(kind=ErrorKind.FAILED_PRECONDITION, param="media", code="unsupported_by_engine"):
        validate(request(media=(media_item(kind),)), config)


def test_every_capability_a_request_can_ask_for_is_tried_above() -> None:
    # The others are used by other calls, or by none.
    elsewhere = {"token_ids", "embeddings", "kv_events", "prefill", "decode", "local_prefill", "lora_loading", "sleep"}
    elsewhere |= {"clear_cache", "profile", "inject_fault", "data_parallel_rank", "resume", "resume_guided"}
    elsewhere |= {"classification"}
    assert {capability.value for capability, _, _ in USES} | elsewhere == {one.value for one in Capability}


def test_a_rank_beyond_the_first_needs_the_capability() -> None:
    ranks = replace(BARE, data_parallel_size=2)
    with pytest.raises(SluiceError, match="data_parallel_rank"):
        validate(request(data_parallel_rank=1), ranks)
    validate(request(data_parallel_rank=1), replace(ranks, capabilities=frozenset({"data_parallel_rank"})))


@pytest.mark.parametrize("fields", NO_USE, ids=str)
def test_a_value_that_changes_nothing_is_no_use(fields: dict[str, Any]) -> None:
    asked = request(**fields)
    assert not list(demands(asked))
    validate(asked, BARE)


def test_what_is_accepted_without_effect_is_not_refused() -> None:
    asked = request(sampling=SamplingParams(temperature=0.7, top_p=0.9))
    validate(asked, replace(BARE, accepted=frozenset({"temperature", "top_p"})))
    with raises_error(param="top_p"):
        validate(asked, replace(BARE, accepted=frozenset({"temperature"})))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided": StructuredOutput("choice", ())}, "response_format"),
        ({"guided": StructuredOutput("choice", ("a", ""))}, "response_format"),
        ({"guided": StructuredOutput("regex", "")}, "response_format"),
        ({"guided": StructuredOutput("json_schema", "{")}, "response_format"),
        ({"guided": StructuredOutput("json_schema", "[1]")}, "response_format"),
        ({"guided": StructuredOutput("json_schema", "[" * 100_000)}, "response_format"),
        ({"logprobs": 5_000}, "logprobs"),
        ({"prompt_logprobs": 5_000}, "prompt_logprobs"),
        ({"sampling": SamplingParams(allowed_token_ids=(1_000,))}, "allowed_token_ids"),
        ({"sampling": SamplingParams(bad_words=((1_000,),))}, "bad_words"),
        ({"sampling": SamplingParams(bad_words=((),))}, "bad_words"),
        ({"embeds": PromptEmbeds(b"", 4)}, "prompt_embeds"),
        ({"embeds": PromptEmbeds(bytes(4 * 64), 1)}, "prompt_embeds"),
    ],
    ids=str,
)
def test_what_can_never_work_is_refused_whatever_the_engine(fields: dict[str, Any], param: str) -> None:
    able = replace(BARE, capabilities=frozenset(Capability))
    with raises_error(kind=ErrorKind.INVALID_ARGUMENT, param=param):
        validate(request(**fields), able)


@pytest.mark.parametrize(
    ("mine", "asked", "capabilities", "fits"),
    [
        (Role.AGGREGATED, None, set(), True),
        (Role.AGGREGATED, Role.AGGREGATED, set(), True),
        (Role.AGGREGATED, Role.PREFILL, set(), False),
        (Role.AGGREGATED, Role.DECODE, set(), False),
        (Role.PREFILL, Role.PREFILL, set(), True),
        (Role.PREFILL, None, set(), False),
        (Role.PREFILL, Role.DECODE, set(), False),
        (Role.DECODE, Role.DECODE, set(), True),
        (Role.DECODE, None, set(), False),
        (Role.DECODE, None, {"local_prefill"}, True),
        (Role.DECODE, Role.PREFILL, {"local_prefill"}, False),
    ],
)
def test_request_for_another_role_fails(mine: Role, asked: Role | None, capabilities: set[str], fits: bool) -> None:
    config = replace(BARE, role=mine, capabilities=frozenset(capabilities))
    wanted = request(disaggregation=None if asked is None else Disaggregation(asked))
    if fits:
        validate(wanted, config)
        return
    with raises_error(code="wrong_role", param="disaggregation"):
        validate(wanted, config)


def embedding(inputs: list[list[int]], config: Any, model: str = "tiny", lora: str = "", dimensions: int = 0) -> None:
    validate_embedding(model, lora, [array("I", ids) for ids in inputs], dimensions, config)


def test_embeddings_are_checked_like_prompts() -> None:
    able = replace(BARE, capabilities=frozenset({"embeddings"}))
    embedding([[1, 2], [3] * 64], able)
    for inputs, config, kind, param in [
        ([[1]], BARE, ErrorKind.FAILED_PRECONDITION, "model"),
        ([], able, ErrorKind.INVALID_ARGUMENT, "input"),
        ([[1], []], able, ErrorKind.INVALID_ARGUMENT, "input"),
        ([[1_000]], able, ErrorKind.INVALID_ARGUMENT, "input"),
        ([[1] * 65], able, ErrorKind.INVALID_ARGUMENT, "input"),
        ([[1]] * 2_049, able, ErrorKind.INVALID_ARGUMENT, "input"),
    ]:
        with raises_error(kind=kind, param=param):
            embedding(inputs, config)
    with raises_error(kind=ErrorKind.NOT_FOUND):
        embedding([[1]], able, lora="rude")
    with raises_error(kind=ErrorKind.FAILED_PRECONDITION):
        embedding([[1]], able, lora="polite")

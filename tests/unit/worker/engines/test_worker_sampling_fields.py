"""Every field of vLLM's and SGLang's sampling parameters is set by what their tables say, and by nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from services.common.base.errors import ErrorKind
from services.worker.contract.generation import SamplingParams, StopParams, StructuredOutput
from services.worker.engines.inprocess.sampling import ENGINE_OPTIONS, NOT_OURS, Facts
from services.worker.engines.shared import sglang_fields
from services.worker.engines.shared import sglang_sampling as sglang
from services.worker.engines.vllm import fields as vllm_fields
from services.worker.engines.vllm import sampling as vllm
from tests.support.fakes.engines import request
from tests.support.oracles.errors import raises_error

SAMPLING: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 3,
    "min_p": 0.1,
    "frequency_penalty": 0.1,
    "presence_penalty": 0.1,
    "repetition_penalty": 1.1,
    "seed": 5,
    "logit_bias": {3: 1.0},
    "allowed_token_ids": (3, 4),
    "bad_words": ((3,),),
    "thinking_token_budget": 9,
}
EVERYTHING: dict[str, Any] = {
    "stop": StopParams(9, 2, frozenset({1, 4}), (1,), ignore_eos=True),
    "logprobs": 2,
    "prompt_logprobs": 1,
}
GRAMMARS: Mapping[Any, Any] = {
    "json_schema": "{}",
    "json_object": "",
    "regex": "a",
    "ebnf": "root ::= x",
    "choice": ("a",),
    "structural_tag": "{}",
}


def to_vllm(**options: Any) -> dict[str, Any]:
    sampling = SamplingParams(**SAMPLING, engine_options=options)
    asked = request(**{**EVERYTHING, "sampling": sampling, "guided": StructuredOutput("regex", "a")})
    arguments = vllm.sampling_arguments(asked, Facts(100))
    arguments["bad_words"] = arguments.pop("bad_words_token_ids")
    return arguments


def to_sglang(guided: StructuredOutput, **options: Any) -> dict[str, Any]:
    asked = request(**{**EVERYTHING, "sampling": SamplingParams(**SAMPLING, engine_options=options), "guided": guided})
    made = sglang.engine_request(asked, "rid", sglang.Facts(100, {}, has_seeds=True))
    params: dict[str, Any] = made["sampling_params"]
    return params


def ours(fields: Mapping[str, str]) -> set[str]:
    return {name for name, by in fields.items() if by not in NOT_OURS and by != ENGINE_OPTIONS}


def test_vllm_sampling_fields_match_the_table() -> None:
    assert to_vllm().keys() == ours(vllm_fields.FIELDS)
    options: dict[str, Any] = dict.fromkeys(vllm.OPTIONS, 1)
    assert to_vllm(**options).keys() == ours(vllm_fields.FIELDS) | vllm.OPTIONS
    assert to_vllm(of_a_plugin=1)["extra_args"] == {"of_a_plugin": 1}


def test_every_constraint_of_vllm_can_be_asked_for() -> None:
    reported: set[str] = set()
    for kind, grammar in GRAMMARS.items():
        asked = request(
            guided=StructuredOutput(kind, grammar), sampling=SamplingParams(engine_options={"whitespace_pattern": "x"})
        )
        arguments = vllm.sampling_arguments(asked, Facts(100))
        assert "extra_args" not in arguments
        reported |= arguments["structured_outputs"].keys()
    assert reported == ours(vllm_fields.GUIDED_FIELDS) | {"whitespace_pattern"}


def test_sglang_sampling_fields_match_the_table() -> None:
    reported = {name for kind, grammar in GRAMMARS.items() for name in to_sglang(StructuredOutput(kind, grammar))}
    assert reported == ours(sglang_fields.FIELDS)
    options: dict[str, Any] = dict.fromkeys(sglang.SAMPLING_OPTIONS, 1)
    assert to_sglang(StructuredOutput("regex", "a"), **options).keys() >= sglang.SAMPLING_OPTIONS


@pytest.mark.parametrize("name", sorted(vllm_fields.FIELDS.keys() - vllm.OPTIONS))
def test_what_vllm_has_another_way_for_is_no_option(name: str) -> None:
    with raises_error(match=name, kind=ErrorKind.INVALID_ARGUMENT):
        to_vllm(**{name: 1})


@pytest.mark.parametrize("name", sorted(sglang_fields.FIELDS.keys() - sglang.SAMPLING_OPTIONS))
def test_what_sglang_has_another_way_for_is_no_option(name: str) -> None:
    with raises_error(match=name, kind=ErrorKind.INVALID_ARGUMENT):
        to_sglang(StructuredOutput("regex", "a"), **{name: 1})

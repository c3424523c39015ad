"""Requests, settings and metrics of SGLang, without SGLang."""

from __future__ import annotations

import asyncio
import json
import logging
from array import array
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from services.common.base.errors import ErrorKind, SluiceError
from services.worker.contract.capabilities import SAMPLING, Capability
from services.worker.contract.generation import (
    Disaggregation,
    GenerateRequest,
    Role,
    SamplingParams,
    StopParams,
    StructuredOutput,
)
from services.worker.engines import find_engine
from services.worker.engines.inprocess.sampling import stop_ids
from services.worker.engines.sglang import card as sglang
from services.worker.engines.sglang import metrics
from services.worker.engines.sglang.handoff import FAKE_BOOTSTRAP_HOST, BootstrapInfo, bootstrap_for, unpack
from services.worker.engines.sglang.metrics import SchedulerMetrics
from services.worker.engines.sglang.options import Flags, command_line
from services.worker.engines.shared.sglang_sampling import CAPABILITIES, Facts, choice_grammar, engine_request
from services.worker.engines.vllm import card as vllm
from services.worker.settings import WorkerSettings
from tests.support.fakes.engines import request
from tests.support.oracles.errors import raises_error

FACTS = Facts(context_length=100, defaults={}, has_priorities=True)
FLAGS = Flags(
    names={"tp_size", "lora_strict_loading", "dp_size", "lora_paths", "tokenizer_worker_num", "config_like"},
    negatable={"lora_strict_loading"},
)


def mapped(facts: Facts = FACTS, **fields: Any) -> dict[str, Any]:
    return engine_request(request(**fields), "rid", facts)


def params(facts: Facts = FACTS, **fields: Any) -> dict[str, Any]:
    found: dict[str, Any] = mapped(facts, **fields)["sampling_params"]
    return found


def test_every_sampling_field_arrives() -> None:
    sampling = SamplingParams(
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        frequency_penalty=0.2,
        presence_penalty=0.3,
        repetition_penalty=1.1,
        seed=-1,
        logit_bias={5: 1.5},
    )
    found = params(replace(FACTS, has_seeds=True), sampling=sampling)
    assert found == {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "frequency_penalty": 0.2,
        "presence_penalty": 0.3,
        "repetition_penalty": 1.1,
        "sampling_seed": (1 << 63) - 1,
        "logit_bias": {"5": 1.5},
        "max_new_tokens": 96,
    }
    assert "sampling_seed" not in params(sampling=sampling)


def test_unset_options_take_the_models_defaults() -> None:
    facts = replace(FACTS, defaults={"temperature": 0.7, "top_k": 20})
    assert params(facts)["temperature"] == 0.7
    found = params(facts, sampling=SamplingParams(temperature=0.0, top_k=0))
    assert (found["temperature"], found["top_k"]) == (0.0, -1)


def test_the_answer_ends_with_the_context() -> None:
    assert params()["max_new_tokens"] == 96
    assert params(max_tokens=500)["max_new_tokens"] == 96
    assert params(max_tokens=5)["max_new_tokens"] == 5


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"stop_token_ids": frozenset({7, 3})}, {"stop_token_ids": [3, 7]}),
        ({"ignore_eos": True}, {"ignore_eos": True}),
        (
            {"ignore_eos": True, "stop_token_ids": frozenset({1, 7}), "eos_token_ids": (1,), "min_tokens": 4},
            {"ignore_eos": True, "stop_token_ids": [7], "min_new_tokens": 4},
        ),
        ({"ignore_eos": True, "min_tokens": 4}, {"ignore_eos": True}),
        ({"min_tokens": 4}, {"min_new_tokens": 4}),
    ],
)
def test_stops(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    found = params(**fields)
    del found["max_new_tokens"]
    assert found == expected


def test_ids_that_end_a_request() -> None:
    stop = StopParams(stop_token_ids=frozenset({1, 7}), eos_token_ids=(1,))
    assert stop_ids(stop) == {1, 7}
    assert stop_ids(replace(stop, ignore_eos=True)) == {7}


@pytest.mark.parametrize(
    ("guided", "expected"),
    [
        (StructuredOutput("json_schema", '{"type":"string"}'), {"json_schema": '{"type":"string"}'}),
        (StructuredOutput("json_object"), {"json_schema": '{"type": "object"}'}),
        (StructuredOutput("regex", "a+"), {"regex": "a+"}),
        (StructuredOutput("ebnf", 'root ::= "a"'), {"ebnf": 'root ::= "a"'}),
        (StructuredOutput("structural_tag", "{}"), {"structural_tag": "{}"}),
        (StructuredOutput("choice", ("a", "b")), {"ebnf": 'root ::= "a" | "b"'}),
    ],
)
def test_constraints(guided: StructuredOutput, expected: dict[str, str]) -> None:
    found = params(guided=guided)
    assert {key: found[key] for key in found if key != "max_new_tokens"} == expected


def test_choices_are_quoted() -> None:
    assert choice_grammar(('a"b\\', "c\nd")) == 'root ::= "a\\"b\\\\" | "c\\nd"'


def test_placement() -> None:
    found = mapped(lora="l", cache_salt="s", priority=3, data_parallel_rank=1)
    assert (found["lora_path"], found["cache_salt"], found["priority"], found["routed_dp_rank"]) == ("l", "s", 3, 1)
    assert mapped(replace(FACTS, low_first=False), priority=3)["priority"] == -3
    assert "priority" not in mapped(replace(FACTS, has_priorities=False), priority=3)
    assert found["rid"] == "rid"
    assert found["input_ids"] == [0, 20, 21, 2]


def test_logprobs() -> None:
    assert "return_logprob" not in mapped()
    found = mapped(logprobs=2)
    assert (found["return_logprob"], found["top_logprobs_num"], found["logprob_start_len"]) == (True, 2, -1)
    found = mapped(logprobs=0, prompt_logprobs=5)
    assert (found["return_logprob"], found["top_logprobs_num"], found["logprob_start_len"]) == (True, 5, 0)


def test_thinking_budget() -> None:
    found = mapped(sampling=SamplingParams(thinking_token_budget=9))
    assert (found["max_thinking_tokens"], found["require_reasoning"]) == (9, True)


def test_engine_options_go_where_they_belong() -> None:
    found = mapped(sampling=SamplingParams(engine_options={"custom_params": {"a": 1}, "extra_key": "k"}))
    assert found["sampling_params"]["custom_params"] == {"a": 1}
    assert found["extra_key"] == "k"
    assert "extra_key" not in found["sampling_params"]


@pytest.mark.parametrize("name", ["temperature", "no_such_thing", "n", "rid", "bootstrap_host", "skip_special_tokens"])
def test_engine_options_that_are_none_are_refused_by_name(name: str) -> None:
    with raises_error(match=name, kind=ErrorKind.INVALID_ARGUMENT, param=f"engine_options.{name}"):
        mapped(sampling=SamplingParams(engine_options={name: 1}))


def settings(**fields: Any) -> WorkerSettings:
    return WorkerSettings(**{"model": "m=/models/m", **fields})


def test_the_workers_settings_become_flags() -> None:
    argv = command_line(settings(block_size=32, total_blocks=10, context_length=64), "/models/m", FLAGS, gpu=False)
    pairs = dict(zip(argv, [*argv[1:], ""], strict=True))
    assert pairs["--model-path"] == "/models/m"
    assert pairs["--page-size"] == "32"
    assert pairs["--max-total-tokens"] == "320"
    assert pairs["--context-length"] == "64"
    assert pairs["--host"] == "127.0.0.1"
    assert pairs["--device"] == "cpu"
    assert "--incremental-streaming-output" in argv
    assert "--enable-metrics" not in argv or settings().metrics_listen


def test_unset_sizes_on_a_gpu_are_left_to_sglang() -> None:
    argv = command_line(settings(), "/models/m", FLAGS, gpu=True)
    assert "--device" not in argv
    assert "--max-total-tokens" not in argv
    asked = command_line(settings(total_blocks=100), "/models/m", FLAGS, gpu=True)
    assert asked[asked.index("--max-total-tokens") + 1] == "1600"


def test_flags_of_sglang_are_passed_on_and_win() -> None:
    given = settings(
        engine_args=json.dumps({"tp-size": 2, "lora_strict_loading": False, "lora_paths": ["a=/a", "b=/b"]})
    )
    argv = command_line(given.model_copy(update={"engine_flags": ("--dp-size", "4")}), "m", FLAGS, gpu=True)
    assert argv[argv.index("--tp-size") + 1] == "2"
    assert "--no-lora-strict-loading" in argv
    assert argv[argv.index("--lora-paths") : argv.index("--lora-paths") + 3] == ["--lora-paths", "a=/a", "b=/b"]
    assert argv[-2:] == ["--dp-size", "4"]


def test_roles_become_modes() -> None:
    argv = command_line(settings(role="prefill"), "m", FLAGS, gpu=True)
    assert argv[argv.index("--disaggregation-mode") + 1] == "prefill"
    assert "--disaggregation-mode" not in command_line(settings(), "m", FLAGS, gpu=True)


@pytest.mark.parametrize(
    ("fields", "flags", "word"),
    [
        ({"engine_args": "tp_sise=2"}, (), "tp_size"),
        ({"engine_args": "tokenizer_worker_num=2"}, (), "tokenizer_worker_num"),
        ({}, ("--kv-events-config={}",), "kv_events_config"),
    ],
)
def test_flags_that_cannot_be_are_refused(fields: dict[str, Any], flags: tuple[str, ...], word: str) -> None:
    with raises_error(match=word, param="engine_args"):
        command_line(settings(**fields).model_copy(update={"engine_flags": flags}), "m", FLAGS, gpu=True)


def prefilling(**fields: Any) -> GenerateRequest:
    return GenerateRequest("r", "m", array("I", [1, 2]), **fields)


def test_a_handoff_survives_the_journey() -> None:
    meeting = BootstrapInfo("10.0.0.1", 8998, 42, sent_tokens=0)
    assert unpack(meeting.pack()) == meeting
    asked = prefilling(disaggregation=Disaggregation(Role.DECODE, handoff=meeting.pack()))
    assert bootstrap_for(asked, Role.DECODE, "h", 1) == meeting


@pytest.mark.parametrize(
    "handoff",
    [
        b"\xff",
        b"[]",
        b"{}",
        b'{"host":"","port":1,"room":1}',
        b'{"host":"h","port":0,"room":1}',
        b'{"host":"h","port":1,"room":-1}',
        b'{"host":"h","port":1,"room":9223372036854775808}',
        b'{"host":"h","port":"x","room":1}',
        b"[" * 100_000,
    ],
)
def test_a_malformed_handoff_is_refused(handoff: bytes) -> None:
    with raises_error(kind=ErrorKind.INVALID_ARGUMENT):
        unpack(handoff)


def test_bootstrap_info_by_role_has_the_expected_host() -> None:
    assert bootstrap_for(prefilling(), Role.AGGREGATED, "h", 1) is None
    given = Disaggregation(Role.PREFILL, bootstrap_host="p", bootstrap_port=5, bootstrap_room=9)
    assert bootstrap_for(prefilling(disaggregation=given), Role.PREFILL, "h", 1) == BootstrapInfo(
        "p", 5, 9, sent_tokens=1
    )
    made = bootstrap_for(prefilling(), Role.PREFILL, "h", 1)
    assert made is not None
    assert (made.host, made.port, made.sent_tokens) == ("h", 1, 0)
    assert made.room > 0
    alone = bootstrap_for(prefilling(stop=StopParams(max_tokens=1)), Role.PREFILL, "h", 1)
    assert alone is not None
    assert (alone.host, alone.sent_tokens) == (FAKE_BOOTSTRAP_HOST, 1)
    with pytest.raises(SluiceError, match="handoff"):
        bootstrap_for(prefilling(), Role.DECODE, "h", 1)
    far = Disaggregation(Role.PREFILL, bootstrap_room=1 << 63)
    with pytest.raises(SluiceError):
        bootstrap_for(prefilling(disaggregation=far), Role.PREFILL, "h", 1)


def test_the_engine_is_there_without_sglang() -> None:
    engine = find_engine("sglang")
    assert engine.CAPABILITIES == CAPABILITIES
    assert {Capability.ALLOWED_TOKEN_IDS, Capability.BAD_WORDS} == SAMPLING - CAPABILITIES
    engine.from_args(settings())


Answers = list[str | Exception]


async def read(answers: Answers, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is told after each of the answers."""
    scheduler_metrics, told, left = SchedulerMetrics(), [], iter(answers)

    def answer() -> str:
        found = next(left)
        if isinstance(found, Exception):
            raise found
        return found

    async def wait(seconds: float) -> None:
        told.append(scheduler_metrics.text)
        if len(told) == len(answers):
            raise asyncio.CancelledError

    monkeypatch.setattr(metrics, "_read", answer)
    monkeypatch.setattr(asyncio, "sleep", wait)
    with pytest.raises(asyncio.CancelledError):
        await scheduler_metrics.run()
    return told


async def test_files_that_cannot_be_read_leave_the_last_text(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers: Answers = ["one", FileNotFoundError("gone"), ValueError("no JSON"), "two"]
    with caplog.at_level(logging.WARNING):
        assert await read(answers, monkeypatch) == ["one", "one", "one", "two"]
    assert len([record for record in caplog.records if record.name == metrics.__name__]) == 1


async def test_a_new_trouble_is_logged_anew(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert await read([OSError(), "one", OSError()], monkeypatch) == ["", "one", "one"]
    assert len([record for record in caplog.records if record.name == metrics.__name__]) == 2


@pytest.mark.parametrize("caches", [True, False])
def test_vllm_claims_salts_with_and_without_a_prefix_cache(caches: bool) -> None:
    config = MagicMock()
    config.cache_config.enable_prefix_caching = caches
    config.model_config.runner_type = "generate"
    config.parallel_config.data_parallel_size = 1
    found = vllm.capabilities(config, has_events=caches)
    assert Capability.CACHE_SALT in found
    assert (Capability.CLEAR_CACHE in found) is caches


@pytest.mark.parametrize("caches", [True, False])
def test_sglang_claims_salts_with_and_without_a_prefix_cache(caches: bool) -> None:
    values: dict[str, Any] = {"disable_radix_cache": not caches, "dp_size": 1, "disaggregation_mode": "null"}
    manager = SimpleNamespace(is_generation=True, mm_processor=None, config_value=lambda name: values.get(name))
    found = sglang.capabilities(SimpleNamespace(tokenizer_manager=manager))
    assert Capability.CACHE_SALT in found
    assert (Capability.KV_EVENTS in found) is caches

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from services.common.discovery.discovered_models import DiscoveredModel
from services.common.packages.model_files import DEFAULT_NAME, DEFAULT_SOURCE, ModelSpec
from services.postprocess.settings import PostprocessSettings
from services.preprocess.contract.generation_defaults import NO_DEFAULTS, GenerationDefaults, generation_defaults
from services.preprocess.encoders.backend import EncoderOptions
from services.preprocess.settings import PreprocessSettings


def test_the_default_works_offline() -> None:
    assert PreprocessSettings.load([]).served == [ModelSpec(DEFAULT_NAME, DEFAULT_SOURCE)]


def test_models_come_as_flags_or_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [ModelSpec("a", "/x"), ModelSpec("b", "/y", "hf")]
    assert PreprocessSettings.load(["--models", "a=/x", "--models", "b=/y@hf"]).served == expected
    monkeypatch.setenv("SLUICE_PREPROCESS_MODELS", "a=/x,b=/y@hf")
    assert PreprocessSettings.load([]).served == expected


def test_chat_templates_and_speed() -> None:
    settings = PreprocessSettings.load(["--models", "a=/x,b=/y", "--chat-templates", "b=/t=1.jinja", "--cache-mb", "0"])
    assert (settings.template_file("a"), settings.template_file("b")) == (None, Path("/t=1.jinja"))
    assert settings.encoder_options == EncoderOptions(fast_backend=True, cache_bytes=0)


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--models", "a=/x@banana"], "processor 'banana' is unknown"),
        (["--models", "a="], "has no source"),
        (["--models", "a=/x,a=/y"], "lists a more than once"),
        (["--models", ""], "--models is empty; set at least one model"),
        (["--tokenize-threads", "0"], "--tokenize-threads"),
        (["--max-prompt-mb", "0"], "--max-prompt-mb"),
        (["--chat-templates", "x.jinja"], "is not NAME=FILE"),
        (["--chat-templates", "other=x.jinja"], "the name of a served model"),
    ],
)
def test_bad_flags_are_one_sentence_and_exit_2(
    argv: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        PreprocessSettings.load(argv)
    assert caught.value.code == 2
    printed = capsys.readouterr().err
    assert sentence in printed
    assert printed.count("\n") == 1


MODELS = ["--models", "a=/x,b=/y@hf"]


def load(*flags: str) -> PreprocessSettings:
    return PreprocessSettings.load(list(flags))


def processors(settings: PreprocessSettings) -> dict[str, str]:
    return {spec.name: spec.processor for spec in settings.served}


def test_a_processing_is_for_models_that_name_no_processor() -> None:
    assert processors(load(*MODELS)) == {"a": "", "b": "hf"}
    assert processors(load(*MODELS, "--vllm-processing")) == {"a": "vllm", "b": "hf"}
    assert processors(load(*MODELS, "--sglang-processing")) == {"a": "sglang", "b": "hf"}
    assert processors(load("--models", "a=/x@vllm,b=/y@sglang")) == {"a": "vllm", "b": "sglang"}


def test_native_processing_waits_for_a_worker_with_its_engine() -> None:
    settings = load(*MODELS, "--native-framework-processing", "--workers", "localhost:1")
    assert processors(settings) == {"b": "hf"}
    for engine, expected in (
        ("vllm", "vllm"),
        ("vllm-grpc", "vllm"),
        ("sglang", "sglang"),
        ("mock", ""),
        ("module:Class", ""),
    ):
        learned = DiscoveredModel(ModelSpec("a", "/delivered", "hf"), engine, "0" * 64)
        assert settings.learned_spec(learned) == ModelSpec("a", "/x", expected)


def test_a_learned_model_is_processed_as_the_others() -> None:
    learned = DiscoveredModel(ModelSpec("new", "/delivered"), "mock", "0" * 64)
    assert load("--routers", "localhost:1").learned_spec(learned) == learned.spec
    settings = load("--routers", "localhost:1", "--vllm-processing")
    for format_of_the_files in ("", "hf", "mistral"):
        learned = DiscoveredModel(ModelSpec("new", "/delivered", format_of_the_files), "mock", "0" * 64)
        assert settings.learned_spec(learned) == ModelSpec("new", "/delivered", "vllm")
    learned = DiscoveredModel(ModelSpec("new", "/delivered", "sglang"), "sglang", "0" * 64)
    assert settings.learned_spec(learned) == learned.spec, "the worker names an engine's code"


def test_discovering_service_serves_the_default_model_only_if_named() -> None:
    assert load("--routers", "localhost:1").served == []
    assert processors(load("--routers", "localhost:1", *MODELS)) == {"a": "", "b": "hf"}
    assert PostprocessSettings.load(["--workers", "localhost:1"]).served == []


def test_engines_run_with_the_interpreters_of_the_settings() -> None:
    settings = load("--vllm-python", "/opt/python", "--engine-processes", "3")
    assert (settings.engines["vllm"].python, settings.engines["sglang"].python) == ("/opt/python", "")
    assert {options.processes for options in settings.engines.values()} == {3}


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--vllm-processing", "--sglang-processing"], "set only one of"),
        (["--vllm-processing", "--native-framework-processing"], "set only one of"),
        (["--native-framework-processing"], "requires routers or workers"),
        (["--trtllm-processing"], "TensorRT-LLM in docs/preprocessing.md"),
    ],
)
@pytest.mark.parametrize("service", [PreprocessSettings, PostprocessSettings])
def test_what_cannot_be_is_one_sentence(
    service: type[PreprocessSettings | PostprocessSettings],
    flags: list[str],
    sentence: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as caught:
        service.load(flags)
    assert caught.value.code == 2
    assert sentence in capsys.readouterr().err


def test_what_the_file_sets_is_read_and_the_rest_is_unset() -> None:
    file = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0, "repetition_penalty": 1.05}
    assert generation_defaults({**file, "max_new_tokens": 2048, "do_sample": False, "eos_token_id": 2}) == (
        GenerationDefaults(0.6, 0.95, 20, 0.0, 1.05, 2048)
    )
    assert generation_defaults({"top_k": 0}) == GenerationDefaults(top_k=0)
    assert generation_defaults({}) == NO_DEFAULTS


@pytest.mark.parametrize(
    "file",
    [
        {"temperature": -1},
        {"temperature": "hot"},
        {"temperature": True},
        {"temperature": float("nan")},
        {"top_p": 0},
        {"top_p": 1.1},
        {"top_k": -2},
        {"top_k": 2.5},
        {"top_k": 1 << 40},
        {"min_p": 2},
        {"repetition_penalty": 0},
        {"max_new_tokens": 0},
    ],
)
def test_invalid_generation_defaults_are_dropped_and_logged(
    file: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert generation_defaults(file) == NO_DEFAULTS
    assert "out of range" in caplog.text
    assert caplog.records[0].__dict__["option"] in file

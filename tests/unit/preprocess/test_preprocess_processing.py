"""Whose code makes a model's ids, by the settings."""

from __future__ import annotations

import pytest

from services.common.discovery.tokenizer_delivery import DiscoveredModel
from services.common.models import ModelSpec
from services.postprocess.settings import PostprocessSettings
from services.preprocess.settings import PreprocessSettings

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


def test_native_processing_waits_for_a_worker_that_says_its_engine() -> None:
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


def test_who_learns_serves_the_default_model_only_if_it_is_named() -> None:
    assert load("--routers", "localhost:1").served == []
    assert processors(load("--routers", "localhost:1", *MODELS)) == {"a": "", "b": "hf"}
    assert PostprocessSettings.load(["--workers", "localhost:1"]).served == []


def test_engines_are_run_as_the_settings_say() -> None:
    settings = load("--vllm-python", "/opt/python", "--engine-processes", "3", "--work-limit-s", "7")
    assert (settings.engines["vllm"].python, settings.engines["sglang"].python) == ("/opt/python", "")
    assert {(one.processes, one.limit_s) for one in settings.engines.values()} == {(3, 7.0)}


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

"""Whose code makes prompts and reads answers, and models that only a later worker brings; vLLM is a stand-in."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.servers.suite import SLUICE, Suite
from tests.support.waiting import wait_until

STAND_IN = Path(__file__).parents[1] / "support" / "fake_vllm_package"
MARK = "<by the engine>"
WITHIN_S = 120
MESSAGES = [{"role": "user", "content": "Tell me about rivers."}]


def chat(suite: Suite, model: str) -> httpx.Response:
    body = {"model": model, "messages": MESSAGES, "max_tokens": 24, "seed": 1, "temperature": 0}
    return httpx.post(f"{suite.url}/v1/chat/completions", json=body, timeout=60)


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


def prompt_of(suite: Suite, model: str) -> str:
    """The prompt that preprocess makes of a chat, as text."""
    rendered = httpx.post(
        f"{suite.url}/v1/chat/completions/render", json={"model": model, "messages": MESSAGES}, timeout=60
    )
    assert rendered.status_code == 200, rendered.text
    ids = rendered.json()["token_ids"]
    whole: dict[str, Any] = httpx.post(
        f"{suite.url}/detokenize", json={"model": model, "tokens": ids}, timeout=60
    ).json()
    prompt: str = whole["prompt"]
    return prompt


def processor_of(suite: Suite, model: str) -> str | None:
    """Whose code makes the model's ids, as /v1/models reports it."""
    listed = httpx.get(f"{suite.url}/v1/models", timeout=60).json()["data"]
    return next((entry["tokenizer"]["processor"] for entry in listed if entry["id"] == model), None)


@contextmanager
def second_worker(suite: Suite, name: str, folder: Path) -> Iterator[None]:
    """A worker with a model of its own, started by hand beside the suite."""
    command = [SLUICE, "worker", "--model", f"{name}={folder}", "--routers", suite.address("router")]
    process = subprocess.Popen([*map(str, command), "--listen", "127.0.0.1:0", "--speedup", "20"])
    try:
        wait_until(lambda: name in httpx.get(f"{suite.url}/ready", timeout=10).json()["models"])
        yield
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture(scope="module")
def native(folder: Path) -> Iterator[Suite]:
    """Mock workers, which bring no code of their own."""
    flags = ("--speedup", "20", "--workers", "1", "--native-framework-processing")
    with Suite(*flags, "--model", str(folder), "--model-name", "mine") as running:
        yield running


def lines_with(suite: Suite, *texts: str) -> list[str]:
    return [line for line in suite.output if all(text in line for text in texts)]


def test_model_of_a_worker_started_later_is_served_to_the_end(native: Suite, folder: Path) -> None:
    assert text_of(chat(native, "mine"))
    with second_worker(native, "q", folder):
        assert text_of(chat(native, "q")) == text_of(chat(native, "mine"))
        wait_until(lambda: processor_of(native, "q") == "hf")


def test_operators_model_is_loaded_before_the_suite_is_ready(native: Suite) -> None:
    (line,) = lines_with(native, "ready http")
    ready = native.output.index(line)
    for service in ("preprocess", "postprocess"):
        (loaded,) = [line for line in lines_with(native, f"{service} ", "tokenizer is loaded") if "model=mine" in line]
        assert native.output.index(loaded) < ready


def test_native_processing_without_native_code_is_reported_at_the_start_and_for_each_learned_model(
    native: Suite, folder: Path
) -> None:
    (note,) = lines_with(native, "sluice ", "--native-framework-processing", "has no code for prompts")
    (ready,) = lines_with(native, "ready http")
    assert native.output.index(note) < native.output.index(ready)
    with second_worker(native, "again", folder):
        assert text_of(chat(native, "again"))
        for service in ("preprocess", "postprocess"):
            wait_until(lambda: lines_with(native, f"{service} ", "no processing", "model=again", "engine=mock"))  # noqa: B023


@pytest.fixture(scope="module")
def by_vllm(folder: Path) -> Iterator[Suite]:
    flags = ("--speedup", "20", "--workers", "1", "--vllm-processing", "--vllm-python", sys.executable)
    with Suite(*flags, "--model", str(folder), env={"PYTHONPATH": str(STAND_IN)}) as running:
        yield running


def test_vllm_processing_makes_prompts_and_reads_answers_with_the_engines_code(by_vllm: Suite) -> None:
    wait_until(lambda: processor_of(by_vllm, "tiny") == "vllm")
    assert prompt_of(by_vllm, "tiny").startswith(MARK)
    answer = text_of(chat(by_vllm, "tiny"))
    assert answer == answer.upper(), "the stand-in's parser writes capitals"
    assert answer != answer.lower()


def test_vllm_processing_also_holds_for_a_learned_model(by_vllm: Suite, folder: Path) -> None:
    with second_worker(by_vllm, "q", folder):
        answer = text_of(chat(by_vllm, "q"))
        assert answer == answer.upper()
        assert prompt_of(by_vllm, "q").startswith(MARK)


@pytest.mark.parametrize("service", ["preprocess", "postprocess"])
def test_service_with_trtllm_processing_ends_with_a_sentence(service: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"services.{service}", "--trtllm-processing"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert done.stderr.startswith(
        f"python -m services.{service}: --trtllm-processing: TensorRT-LLM's processing code is not supported"
    )
    assert "docs/preprocessing.md" in done.stderr
    assert "Traceback" not in done.stderr

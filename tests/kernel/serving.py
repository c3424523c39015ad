"""What the kernel does without an extension: run by `test_kernel_extensions.py` with the installed distribution."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

import services
from tests.kernel.deletion import SITE
from tests.support.servers.suite import Suite

CHAT = {"model": "tekken", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
DEADLINE_S = 60


@pytest.fixture(scope="module")
def suite() -> Iterator[Suite]:
    with Suite("--workers", "1", "--speedup", "20") as running:
        yield running


def post(suite: Suite, path: str, body: dict[str, object]) -> httpx.Response:
    response = httpx.post(suite.url + path, json=body, timeout=DEADLINE_S)
    assert response.status_code == 200, response.text
    return response


def test_distribution_is_the_installed_one() -> None:
    assert Path(services.__file__).is_relative_to(os.environ[SITE])


def test_models_and_readiness_are_reported(suite: Suite) -> None:
    models = httpx.get(f"{suite.url}/v1/models", timeout=DEADLINE_S).json()
    assert [model["id"] for model in models["data"]] == ["tekken"]
    ready = httpx.get(f"{suite.url}/ready", timeout=DEADLINE_S)
    assert ready.status_code == 200
    assert ready.json()["missing_extensions"] == []


def test_chat_and_completion_are_answered(suite: Suite) -> None:
    chat = post(suite, "/v1/chat/completions", CHAT).json()
    assert chat["choices"][0]["message"]["content"]
    assert chat["usage"]["completion_tokens"] == 8
    completion = post(suite, "/v1/completions", {"model": "tekken", "prompt": "hello", "max_tokens": 8}).json()
    assert completion["choices"][0]["text"]


def test_chat_is_streamed(suite: Suite) -> None:
    lines = post(suite, "/v1/chat/completions", {**CHAT, "stream": True}).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_output_of_the_suite_has_no_traceback_and_no_warning_about_an_extension(suite: Suite) -> None:
    output = "".join(suite.output)
    assert "Traceback" not in output
    assert "Extension " not in output

"""The example API: built as a wheel, found by its entry point, and called as Ollama's clients do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from tests.support.servers.suite import Suite

ROOT = Path(__file__).parents[3]
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "one two three four"}]}
TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    work = tmp_path_factory.mktemp("api")
    source = shutil.copytree(ROOT / "examples" / "api", work / "source", ignore=shutil.ignore_patterns("__pycache__"))
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    build = (*pip, "wheel", "--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir", str(work), str(source))
    subprocess.run(build, check=True, capture_output=True, timeout=120)
    (wheel,) = work.glob("sluice_ollama-*.whl")
    install = (*pip, "install", "--no-index", "--no-deps", "--target", str(work / "site"), str(wheel))
    subprocess.run(install, check=True, capture_output=True, timeout=120)
    path = os.pathsep.join(filter(None, (str(work / "site"), os.environ.get("PYTHONPATH"))))
    with (
        Suite("--workers", "1", "--model-name", "tiny", env={"PYTHONPATH": path}) as suite,
        httpx.Client(base_url=suite.url, timeout=60) as client,
    ):
        yield client


def lines_of(gateway: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    response = gateway.post("/api/chat", json={**CHAT, **fields})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("application/x-ndjson")
    return [orjson.loads(line) for line in response.text.splitlines()]


def test_example_api_streams_lines_whose_text_is_that_of_a_whole_answer(gateway: httpx.Client) -> None:
    options = {"num_predict": 12, "temperature": 0, "seed": 7}
    *pieces, last = lines_of(gateway, options=options)
    assert all(not line["done"] for line in pieces)
    whole = gateway.post("/api/chat", json={**CHAT, "stream": False, "options": options}).json()
    assert "".join(line["message"]["content"] for line in pieces) == whole["message"]["content"] != ""
    ends = ("done", "done_reason", "prompt_eval_count", "eval_count")
    assert [last[name] for name in ends] == [whole[name] for name in ends] == [True, "length", whole[ends[2]], 12]


def test_example_api_counts_the_prompt_as_chat_completions_do(gateway: httpx.Client) -> None:
    whole = gateway.post("/api/chat", json={**CHAT, "stream": False, "options": {"num_predict": 1}}).json()
    completion = gateway.post("/v1/chat/completions", json={**CHAT, "max_tokens": 1}).json()
    assert whole["prompt_eval_count"] == completion["usage"]["prompt_tokens"]


def test_example_api_history_with_calls_is_accepted(gateway: httpx.Client) -> None:
    call = {"function": {"name": "look_up", "arguments": {}}}
    history = [
        *CHAT["messages"],
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "found", "tool_name": "look_up"},
    ]
    answer = gateway.post("/api/chat", json={**CHAT, "messages": history, "tools": TOOLS, "stream": False})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("fields", "status", "part"),
    [
        ({"options": {"temperature": -1}}, 400, "options.temperature"),
        ({"messages": []}, 400, "messages"),
        ({"surprise": 1}, 400, "surprise"),
        ({"model": "unknown"}, 404, "unknown"),
    ],
)
def test_example_api_invalid_request_is_an_error_in_its_own_format_and_names_its_field(
    gateway: httpx.Client, fields: dict[str, Any], status: int, part: str
) -> None:
    response = gateway.post("/api/chat", json={**CHAT, **fields})
    assert response.status_code == status, response.text
    assert list(response.json()) == ["error"]
    assert part in response.json()["error"]


def test_example_api_is_in_the_document_of_the_gateway(gateway: httpx.Client) -> None:
    document = gateway.get("/openapi.json").json()
    assert "/api/chat" in document["paths"]
    assert "ChatRequest" in document["components"]["schemas"]

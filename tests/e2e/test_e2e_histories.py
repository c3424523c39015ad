"""Histories that agents send are answered by every API with a strict template, and leave no text out."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.data.chat_templates import TEMPLATES
from tests.support.data.tiny_models import build_tiny_model
from tests.support.servers.suite import Suite

USER, ANSWER = {"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}
LATE = [USER, ANSWER, {"role": "user", "content": "three"}, {"role": "system", "content": "Agents: none"}]
FUNCTION = {"name": "bash", "arguments": '{"cmd": "ls'}
CUT = [
    USER,
    {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function", "function": FUNCTION}]},
    {"role": "tool", "tool_call_id": "c1", "content": "no"},
]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A model whose template takes system messages at the beginning only, and objects as arguments."""
    model = build_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
    strict = TEMPLATES["system_first"].replace("c.function.arguments | tojson", "c.function.arguments.items() | list")
    (model / "chat_template.jinja").write_text(strict)
    with Suite("--speedup", "100", "--workers", "1", "--model", str(model)) as running:
        yield running.url


def post(url: str, path: str, **body: Any) -> httpx.Response:
    answer = httpx.post(f"{url}{path}", json={"model": "tiny", **body}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer


def test_late_system_turn_is_answered_by_every_api(url: str) -> None:
    chat = post(url, "/v1/chat/completions", messages=LATE, max_tokens=2)
    assert chat.headers["x-sluice-degraded"] == "system_as_user"
    rendered = post(url, "/v1/chat/completions/render", messages=LATE).text
    assert "three\\n\\nAgents: none" in rendered
    post(url, "/v1/messages", messages=LATE, max_tokens=2)
    counted = post(url, "/v1/messages/count_tokens", messages=LATE).json()["input_tokens"]
    assert counted == chat.json()["usage"]["prompt_tokens"]
    developer = [USER, ANSWER, {"role": "developer", "content": "Be brief."}, USER]
    post(url, "/v1/responses", input=developer, max_output_tokens=16)


def test_call_that_was_cut_is_answered_in_the_next_request(url: str) -> None:
    rendered = post(url, "/v1/chat/completions/render", messages=CUT).text
    assert "raw_arguments" in rendered
    assert "cmd" in rendered
    answer = post(url, "/v1/chat/completions", messages=CUT, max_tokens=2)
    assert answer.headers["x-sluice-degraded"] == "tool_arguments_not_an_object"


def test_billing_line_leaves_the_prefix_alone(url: str) -> None:
    def tokens(number: int) -> int:
        line = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=9; cch={'ab' * number};"}
        system = [line, {"type": "text", "text": "Be brief. " * 100}]
        usage = post(url, "/v1/messages", system=system, messages=[USER], max_tokens=2).json()["usage"]
        return int(usage["cache_read_input_tokens"])

    tokens(1)
    assert tokens(20) > 100


def test_models_entry_says_what_the_template_shows(url: str) -> None:
    deadline = time.monotonic() + 30
    while (shown := httpx.get(f"{url}/v1/models/tiny", timeout=60).json()["tokenizer"]["template"]) is None:
        assert time.monotonic() < deadline, "the gateway does not learn of it"
        time.sleep(0.5)
    assert (shown["system"], shown["late_system"], shown["second_system"]) == (True, False, False)

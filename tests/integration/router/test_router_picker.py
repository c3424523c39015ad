"""The endpoint picker as Envoy uses it: a router process, workers, and the messages of ext_proc."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.net.ports import free_port
from services.common.rpc.channels import open_channel
from services.common.types.hashing import block_hashes
from services.router.picker import bootstrap, server
from services.router.picker.picker import PickerConfig
from sluice.v1 import common_pb2, router_pb2
from sluice.v1 import ext_proc_pb2 as ext_proc
from tests.support.clients.ext_proc import Exchange
from tests.support.data.loaded_tokenizers import tekken
from tests.support.servers.picker import CHAT, NAMES, http, picker, tokenizing_picker
from tests.support.servers.redis_server import RedisServer
from tests.support.servers.router_child import RouterChild
from tests.support.servers.router_cluster import BLOCK, MODEL, FakeWorker, routers
from tests.support.waiting import until

DROPPED = "x-llm-d-request-dropped-reason"
CALL = "c12345678"
TEXT = "The quick brown fox jumps over the lazy dog. " * 20


async def test_chat_goes_to_one_endpoint_in_header_and_metadata_and_comes_back_whole() -> None:
    async with tokenizing_picker() as found:
        exchange = found.exchange()
        answered = await exchange.request(CHAT, {"x-request-id": "r1"})
        assert sorted(answered.endpoints) == [http(1), http(2), http(3)]
        assert json.loads(answered.body) == CHAT
        assert answered.headers["content-length"] == str(len(answered.body))
        chosen = NAMES[int(answered.endpoints[0].split(".")[3][0]) - 1]
        assert answered.headers["x-sluice-worker"] == chosen
        assert answered.headers["x-dynamo-worker-instance-id"] == chosen
        assert "x-prefiller-host-port" in answered.removed
        (booked,) = (await found.bookings()).items()
        assert booked[0] == chosen
        assert booked[1][1] > 0
        usage = {"prompt_tokens": 11, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 3}}
        stream = [b'data: {"choices": []}\n\n', b"data: " + json.dumps({"usage": usage}).encode() + b"\n\n"]
        headers, body = await exchange.respond(stream)
        assert body == b"".join(stream)
        assert headers == {}
        await exchange.end()
        await found.empty()
        decisions = (await found.router.stub.GetDecisions(router_pb2.GetDecisionsRequest())).decisions
        latest = decisions[0]
        assert latest.request_id.startswith("r1.")
        assert (latest.delivered_cached_tokens, latest.output_tokens) == (3, 2)


async def test_first_byte_of_the_response_marks_the_prompt_computed() -> None:
    async with tokenizing_picker() as found:
        exchange = found.exchange()
        await exchange.request(CHAT)
        ((requests, prefill),) = (await found.bookings()).values()
        assert (requests, prefill > 0) == (1, True)
        first = asyncio.ensure_future(exchange.respond([b"data: {}\n\n"], trailers=True))

        async def computed() -> bool:
            return [each[1] for each in (await found.bookings()).values()] in ([0.0], [])

        await first
        await until(computed)
        await exchange.end()
        await found.empty()


async def test_cached_prefix_decides_and_its_repeats_land_together() -> None:
    async with tokenizing_picker() as found:
        ids = tekken().encode_text(TEXT)
        await found.workers[1].store(block_hashes(ids, BLOCK))
        for _ in range(3):
            answered = await found.pick({"model": MODEL, "prompt": TEXT}, path="/v1/completions")
            assert answered.endpoints[0] == http(2)
            await found.empty()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/responses", {"input": "hi", "instructions": "Be brief."}),
        (
            "/v1/responses",
            {
                "input": [
                    {"role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
                    {"type": "function_call", "call_id": CALL, "name": "f", "arguments": "{}"},
                    {"type": "function_call_output", "call_id": CALL, "output": "rain"},
                    {"role": "user", "content": "thanks"},
                ],
                "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
            },
        ),
        (
            "/v1/messages",
            {
                "system": [{"type": "text", "text": "Be brief."}],
                "max_tokens": 5,
                "messages": [
                    {"role": "user", "content": "weather?"},
                    {
                        "role": "assistant",
                        "content": [{"type": "tool_use", "id": "t12345678", "name": "f", "input": {}}],
                    },
                    {
                        "role": "user",
                        "content": [{"type": "tool_result", "tool_use_id": "t12345678", "content": "rain"}],
                    },
                    {"role": "user", "content": [{"type": "text", "text": "thanks"}]},
                ],
                "tools": [{"name": "f", "input_schema": {"type": "object"}}],
            },
        ),
        ("/v1/embeddings", {"input": ["hi", "there"]}),
    ],
    ids=["chat", "completion", "responses", "responses-tools", "messages-tools", "embeddings"],
)
async def test_every_api_is_tokenized_and_booked(path: str, body: dict[str, Any]) -> None:
    async with tokenizing_picker() as found:
        exchange = found.exchange()
        answered = await exchange.request({"model": MODEL, **body}, path=path)
        assert answered.endpoints
        headers, _ = await exchange.respond([b"{}"], content_type="application/json")
        assert "x-sluice-degraded" not in headers
        await exchange.end()
        await found.empty()


@pytest.mark.parametrize("size", [0, 61_999, 62_000, 62_001, 1_200_000])
async def test_body_of_any_size_is_passed_on_in_parts(size: int) -> None:
    async with picker() as found:
        whole = {"model": MODEL, "messages": [{"role": "user", "content": ""}]}
        padding = max(size - len(json.dumps(whole)), 0)
        whole["messages"] = [{"role": "user", "content": "x" * padding}]
        text = json.dumps(whole).encode()
        answered = await found.pick(text, repeated_ends=3)
        assert answered.body == text
        assert max(answered.parts) <= 62_000
        await found.empty()


async def test_split_body_and_repeated_ends_are_one_request() -> None:
    async with picker() as found:
        exchange = found.exchange()
        answered = await exchange.request(CHAT, chunk=7, repeated_ends=5)
        assert json.loads(answered.body) == CHAT
        _, body = await exchange.respond([b'{"a":', b"1}"], content_type="application/json")
        assert body == b'{"a":1}'
        await exchange.end()
        await found.empty()


@pytest.mark.parametrize(
    ("body", "path", "status", "reason"),
    [
        (b"no healthy upstream", "/v1/chat/completions", 400, None),
        (b"[1]", "/v1/chat/completions", 400, None),
        (b'{"model": 5, "prompt": "x"}', "/v1/completions", 400, None),
        (b'{"model": "unknown", "prompt": "x"}', "/v1/completions", 404, None),
        (b'{"model": "' + MODEL.encode() + b'", "messages": {}}', "/v1/messages", 400, None),
        (b"x" * (2 << 20), "/v1/chat/completions", 413, None),
    ],
    ids=["not-json", "array", "model-type", "unknown-model", "messages", "too-large"],
)
async def test_bad_request_is_rejected_and_books_nothing(
    body: bytes, path: str, status: int, reason: str | None
) -> None:
    async with picker(picker_body_mb=1) as found:
        answered = await found.pick(body, path=path)
        assert answered.status == status
        error = json.loads(answered.error)
        assert error["error"]["message"]
        assert (error.get("type") == "error") == (path == "/v1/messages")
        assert answered.headers.get(DROPPED) == reason
        assert await found.bookings() == {}


async def test_body_that_never_ends_is_rejected_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_BODY_S", 0.2)
    async with picker() as found:
        exchange = found.exchange()
        await exchange.send(request_headers=ext_proc.HttpHeaders())
        answered = await exchange.answer()
        assert answered.status == 408
        await found.empty()


async def test_missing_model_is_rejected_unless_one_is_served() -> None:
    async with picker() as found:
        assert (await found.pick({"prompt": "x"}, path="/v1/completions")).endpoints
        other = FakeWorker("other", model="other")
        await other.attach(found.router)
        assert (await found.pick({"prompt": "x"}, path="/v1/completions")).status == 400
        await other.detach()


@pytest.mark.parametrize(
    ("subset", "endpoints"),
    [
        (f"{http(1)},{http(2)}", {http(1), http(2)}),
        (f"{http(3)}", {http(3)}),
        ([http(1), http(3)], {http(1), http(3)}),
        ([f"{http(1)}, {http(2)}", "192.168.1.3"], {http(1), http(2), http(3)}),
        (["192.168.1.2"], {http(2)}),
        ([http(2), "192.168.1.99:8000"], {http(2)}),
    ],
)
async def test_subset_is_obeyed_as_string_list_or_both(subset: Any, endpoints: set[str]) -> None:
    async with picker() as found:
        assert set((await found.pick(CHAT, subset=subset)).endpoints) == endpoints


@pytest.mark.parametrize("subset", ["", [], "192.168.1.99:8000", ["10.0.0.1"]])
async def test_subset_without_a_match_is_rejected(subset: Any) -> None:
    async with picker() as found:
        answered = await found.pick(CHAT, subset=subset)
        assert (answered.status, answered.headers[DROPPED]) == (503, "rejected-no-endpoints")
        assert "retry-after" in answered.headers


async def test_without_workers_requests_are_rejected_or_wait_for_the_first() -> None:
    async with picker(names=(), models=[MODEL]) as found:
        answered = await found.pick(CHAT)
        assert (answered.status, answered.headers[DROPPED]) == (503, "rejected-no-endpoints")
        assert (await found.pick(b"", method="GET", path="/v1/models")).status == 503
    async with picker(names=(), models=[MODEL], wait_for_workers_ms=20_000) as found:
        waiting = asyncio.ensure_future(found.pick(CHAT))

        async def waits() -> bool:
            answer = await found.router.stub.GetQueues(router_pb2.GetQueuesRequest())
            return len(answer.queues) == 1

        await until(waits)
        worker = FakeWorker("a")
        worker.registration.http_address = http(1)
        await worker.attach(found.router)
        assert (await waiting).endpoints == [http(1)]
        await worker.detach()


async def test_saturated_workers_shed_by_priority_with_the_reason() -> None:
    async with picker(names=("a",), busy_requests=1, picker_objectives=["chat=10"]) as found:
        running = found.exchange()
        assert (await running.request(CHAT)).endpoints == [http(1)]
        answered = await found.pick(CHAT)
        assert (answered.status, answered.headers[DROPPED]) == (429, "rejected-saturated")
        assert int(answered.headers["retry-after"]) >= 1
        running.cut()
        await found.empty()


async def test_objective_and_deadline_order_the_queue() -> None:
    settings: dict[str, Any] = {
        "names": ("a",),
        "busy_requests": 1,
        "wait_ms": 20_000,
        "picker_objectives": ["chat=10", "batch=-5"],
    }
    async with picker(**settings) as found:
        exchanges = [found.exchange()]
        assert (await exchanges[0].request(CHAT)).endpoints == [http(1)]
        served: list[str] = []

        async def ask(name: str, headers: dict[str, str]) -> Exchange:
            exchange = found.exchange()
            assert (await exchange.request(CHAT, headers)).endpoints == [http(1)]
            served.append(name)
            return exchange

        async def queued(number: int) -> bool:
            answer = await found.router.stub.GetQueues(router_pb2.GetQueuesRequest())
            return sum(each.requests for each in answer.queues) == number

        def is_served(name: str) -> bool:
            return served[-1:] == [name]

        waiting = []
        for name, headers in (
            ("batch", {"x-gateway-inference-objective": "batch"}),
            ("plain", {}),
            ("due", {"x-llm-d-slo-ttft-ms": "60000"}),
            ("chat", {"x-llm-d-inference-objective": "chat"}),
        ):
            waiting.append(asyncio.ensure_future(ask(name, headers)))
            await until(lambda: queued(len(waiting)))
        exchanges[0].cut()
        for expected in ("chat", "due", "plain", "batch"):
            await until(partial(is_served, expected))
            finished = next(each for each in waiting if each.done() and each.result() not in exchanges)
            exchanges.append(finished.result())
            exchanges[-1].cut()
        await found.empty()


async def test_rewritten_model_is_routed_and_sent() -> None:
    async with picker() as found:
        answered = await found.pick({"model": "alias", "prompt": "x"}, {"x-llm-d-model-name-rewrite": MODEL})
        assert answered.endpoints
        assert json.loads(answered.body)["model"] == MODEL
        assert answered.headers["content-length"] == str(len(answered.body))
        large = {"model": "alias", "prompt": "\U0001f600", "seed": (1 << 64) - 1}
        answered = await found.pick(large, {"x-llm-d-model-name-rewrite": MODEL})
        assert json.loads(answered.body) == {**large, "model": MODEL}
        assert (await found.pick({"model": MODEL, "prompt": "\ud800"})).status == 400  # as at the gateway


async def test_adapter_is_routed_to_a_worker_that_has_it() -> None:
    async with picker() as found:
        special = FakeWorker("special", adapters=["sql-lora"])
        special.registration.http_address = "192.168.1.9:8000"
        await special.attach(found.router)
        answered = await found.pick({"model": "sql-lora", "prompt": "x"}, path="/v1/completions")
        assert answered.endpoints == ["192.168.1.9:8000"]
        await special.detach()


async def test_get_without_a_body_takes_turns_and_books_nothing() -> None:
    async with picker(picker_fallbacks=0) as found:
        seen = {(await found.pick(b"", method="GET", path="/v1/models")).endpoints[0] for _ in range(6)}
        assert seen == {http(1), http(2), http(3)}
        assert await found.bookings() == {}


async def test_other_apis_go_to_any_endpoint_unread() -> None:
    async with picker() as found:
        answered = await found.pick(b"passthrough-parser", path="/v1/audio/transcriptions")
        assert answered.endpoints
        assert answered.body == b"passthrough-parser"


@pytest.mark.parametrize("how", ["served", "upstream"])
async def test_booking_follows_the_endpoint_that_served(how: str) -> None:
    async with tokenizing_picker() as found:
        exchange = found.exchange()
        first, second, *_ = (await exchange.request(CHAT)).endpoints
        assert set(await found.bookings()) == {NAMES[int(first.split(".")[3][0]) - 1]}
        served, upstream = (second, "") if how == "served" else ("", second)
        await exchange.respond([b"{"], served=served, upstream=upstream, open_end=True)

        async def moved() -> bool:
            return set(await found.bookings()) == {NAMES[int(second.split(".")[3][0]) - 1]}

        await until(moved)
        assert await exchange.response_chunk(b"}", end=True) == b"}"
        await exchange.end()
        await found.empty()


async def test_late_tokenizer_routes_by_load_with_a_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "PickerConfig", partial(PickerConfig, tokenize_ms=50))
    async with picker(preprocess=["127.0.0.1:9"]) as found:
        exchange = found.exchange()
        assert (await exchange.request(CHAT)).endpoints
        headers, _ = await exchange.respond([b"{}"])
        assert headers["x-sluice-degraded"] in ("tokenizing_late", "tokenizing_failed")
        await exchange.end()
        await found.empty()


async def test_cheap_mode_ends_the_stream_after_the_choice() -> None:
    async with picker(picker_close_after_choice=True, reservation_ttl_s=0.5) as found:
        exchange = found.exchange()
        assert (await exchange.request(CHAT)).endpoints
        assert await exchange.read() is grpc.aio.EOF
        assert len(await found.bookings()) == 1
        await found.empty()


@pytest.mark.parametrize("when", ["body", "answer", "response"])
async def test_stream_that_breaks_off_leaves_no_booking(when: str) -> None:
    async with picker() as found:
        exchanges = []
        for _ in range(20):
            exchange = found.exchange()
            exchanges.append(exchange)
            if when == "body":
                await exchange.send(request_headers=ext_proc.HttpHeaders())
                await exchange.send(request_body=ext_proc.HttpBody(body=json.dumps(CHAT).encode(), end_of_stream=True))
            else:
                await exchange.request(CHAT)
                if when == "response":
                    await exchange.respond([b"data: {}\n\n"], open_end=True)
        for exchange in exchanges:
            exchange.cut()
        await found.empty()


async def test_response_without_a_request_passes_through() -> None:
    async with picker() as found:
        exchange = found.exchange()
        chunks = [b'{"max_tokens":100,"model":"sql-lo', b'ra"}', b""]
        _, body = await exchange.respond(chunks, content_type="application/json")
        assert body == b"".join(chunks)


async def test_wrong_body_mode_is_named() -> None:
    async with picker() as found:
        answered = await found.pick(CHAT, mode=2)
        assert answered.status == 400
        assert "FULL_DUPLEX_STREAMED" in json.loads(answered.error)["error"]["message"]


async def test_health_has_the_names_that_gateways_ask_for() -> None:
    async with picker(picker_health_listen="127.0.0.1:0") as found:
        serving = health_pb2.HealthCheckResponse.SERVING
        for channel in (found.channel, open_channel(found.health)):
            stub = health_pb2_grpc.HealthStub(channel)
            for name in ("", "liveness", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor"):

                async def serves(stub: Any = stub, name: str = name) -> bool:
                    answer = await stub.Check(health_pb2.HealthCheckRequest(service=name))
                    return bool(answer.status == serving)

                await until(serves)


async def test_stopping_picker_serves_until_its_health_has_been_seen(tmp_path: Path) -> None:
    listen = f"127.0.0.1:{free_port()}"
    child = RouterChild(tmp_path, "--models", MODEL, "--picker-listen", listen, "--picker-notice-s", "3")
    await child.start()
    worker = FakeWorker("a")
    worker.registration.http_address = http(1)
    await worker.attach(child)
    worker.keep_beating()
    channel = open_channel(listen)
    health = health_pb2_grpc.HealthStub(channel)

    async def reports(status: Any) -> bool:
        return bool((await health.Check(health_pb2.HealthCheckRequest())).status == status)

    await until(lambda: reports(health_pb2.HealthCheckResponse.SERVING))
    os.kill(child.pid, signal.SIGTERM)
    await until(lambda: reports(health_pb2.HealthCheckResponse.NOT_SERVING))
    exchange = Exchange(channel)
    assert (await exchange.request(CHAT)).endpoints == [http(1)]
    await exchange.respond([b"{}"])
    await exchange.end()
    await child.stop()
    await channel.close()


async def test_pairs_are_booked_and_sent_in_the_headers() -> None:
    async with picker(names=()) as found:
        roles = {"p": common_pb2.WORKER_ROLE_PREFILL, "d": common_pb2.WORKER_ROLE_DECODE}
        workers = []
        for number, (name, role) in enumerate(roles.items(), 1):
            worker = FakeWorker(name)
            worker.registration.role = role
            worker.registration.http_address = http(number)
            await worker.attach(found.router)
            workers.append(worker)
        exchange = found.exchange()
        answered = await exchange.request(CHAT)
        assert answered.endpoints == [http(2)]
        assert answered.headers["x-prefiller-host-port"] == http(1)
        assert answered.headers["x-dynamo-prefill-instance-id"] == "p"
        assert set(await found.bookings()) == {"p", "d"}
        await exchange.respond([b"{}"])
        await exchange.end()
        await found.empty()
        for worker in workers:
            await worker.detach()


async def test_two_pickers_on_one_redis_never_overbook(redis: RedisServer) -> None:
    most = 3
    shared: dict[str, Any] = {"redis_url": redis.url, "busy_requests": most}
    async with picker(**shared) as one, picker(names=(), **shared) as two:

        async def listed() -> bool:
            return len((await two.router.stub.ListWorkers(router_pb2.ListWorkersRequest())).workers) == 3

        await until(listed)
        exchanges = [(one, two)[number % 2].exchange() for number in range(30)]
        answers = await asyncio.gather(*(each.request(CHAT) for each in exchanges))
        placed = [each.endpoints[0] for each in answers if not each.status]
        assert {endpoint: placed.count(endpoint) for endpoint in placed} == {http(n): most for n in (1, 2, 3)}
        assert {each.headers[DROPPED] for each in answers if each.status} == {"rejected-saturated"}
        for exchange in exchanges:
            exchange.cut()
        await one.empty()
        await two.empty()


async def test_bookings_of_a_killed_picker_are_released_with_its_lease(redis: RedisServer, tmp_path: Path) -> None:
    listen = f"127.0.0.1:{free_port()}"
    flags = ["--redis-url", redis.url, "--owner-lease-ms", "900"]
    async with routers(redis_url=redis.url, owner_lease_ms=900) as [survivor]:
        await survivor.ready()
        worker = FakeWorker("a")
        await worker.attach(survivor)
        worker.keep_beating()
        child = RouterChild(tmp_path, *flags, "--picker-listen", listen)
        await child.start()
        channel = open_channel(listen)

        async def picked() -> bool:
            return not (await Exchange(channel).request(CHAT)).status

        async def booked() -> bool:
            loads = (await survivor.stub.GetLoads(router_pb2.GetLoadsRequest())).loads
            return any(load.requests for load in loads)

        async def released() -> bool:
            return not await booked()

        await until(picked)
        assert await booked()
        await child.kill()
        await until(released)
        await channel.close()
        await worker.detach()


async def test_pickers_without_a_shared_store_overbook() -> None:
    """What the test of two pickers on one Redis would show if bookings were not shared."""
    most = 3
    async with picker(busy_requests=most) as one, picker(busy_requests=most) as two:
        exchanges = [(one, two)[number % 2].exchange() for number in range(30)]
        answers = await asyncio.gather(*(each.request(CHAT) for each in exchanges))
        placed = [each.endpoints[0] for each in answers if not each.status]
        assert {placed.count(http(number)) for number in (1, 2, 3)} == {2 * most}
        for exchange in exchanges:
            exchange.cut()

"""The endpoint picker and peers that break the rules: routing decisions of clients, odd orders, ends at every step."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from typing import Any

import grpc
import pytest

from services.common.base.budgets import BudgetPool
from services.router.picker import bootstrap
from services.router.picker.server import PickerLimits
from services.router.router import Router
from services.router.scheduling.queries import Query
from services.router.state.workers.worker import WorkerRank
from sluice.v1 import ext_proc_pb2 as ext_proc
from sluice.v1 import router_pb2
from tests.support.clients.ext_proc import FULL_DUPLEX, Exchange, header_map, subset_metadata
from tests.support.servers.picker import CHAT, Picker, http, picker, tokenizing_picker
from tests.support.servers.router_cluster import MODEL, FakeWorker
from tests.support.waiting import until

POST = {":method": "POST", ":path": "/v1/chat/completions"}
TEXT = json.dumps(CHAT).encode()


async def waiting(found: Picker, number: int) -> bool:
    answer = await found.router.stub.GetQueues(router_pb2.GetQueuesRequest())
    return sum(each.requests for each in answer.queues) == number


async def head(exchange: Exchange, end: bool = False, **headers: str) -> None:
    await exchange.send(
        request_headers=ext_proc.HttpHeaders(headers=header_map({**POST, **headers}), end_of_stream=end)
    )


async def chunk(exchange: Exchange, body: bytes, end: bool = False) -> None:
    await exchange.send(request_body=ext_proc.HttpBody(body=body, end_of_stream=end))


async def kinds(exchange: Exchange, number: int) -> list[str]:
    """Reads a number of answers; returns their kinds, with an exclamation mark at the end of the body."""
    found = []
    for _ in range(number):
        message = await exchange.read()
        kind = message.WhichOneof("response")
        ends = kind == "request_body" and message.request_body.response.body_mutation.streamed_response.end_of_stream
        found.append(f"{kind}!" if ends else kind)
    return found


async def test_gateway_outside_the_subset_leaves_no_booking() -> None:
    async with picker(picker_gateways=["127.0.0.1:9"]) as found:
        answered = await found.pick(CHAT, subset="192.0.2.1:1")
        assert answered.status == 503
        await found.empty()
        assert (await found.pick(CHAT, subset="127.0.0.1:9")).endpoints == ["127.0.0.1:9"]


@pytest.mark.parametrize("subset", ["", []])
async def test_empty_subset_is_rejected_although_the_model_has_no_worker_yet(subset: Any) -> None:
    async with picker(names=(), models=[MODEL], wait_for_workers_ms=20_000) as found:
        assert (await found.pick(CHAT, subset=subset)).status == 503


async def test_first_worker_outside_the_subset_gets_no_waiting_request() -> None:
    async with picker(names=(), models=[MODEL], wait_for_workers_ms=20_000) as found:
        inside = asyncio.ensure_future(found.pick(CHAT, subset=http(1)))
        outside = asyncio.ensure_future(found.pick(CHAT, subset=http(2)))
        await until(lambda: waiting(found, 2))
        worker = FakeWorker("a")
        worker.registration.http_address = http(1)
        await worker.attach(found.router)
        assert (await inside).endpoints == [http(1)]
        assert (await outside).status == 503
        await found.empty()
        await worker.detach()


async def test_routing_decision_in_the_body_is_removed() -> None:
    route = {"decode_worker_id": "b", "prefill_worker_id": "c", "token_data": [1, 2, 3]}
    async with picker() as found:
        answered = await found.pick({**CHAT, "nvext": {**route, "annotations": ["query_instance_id:"]}})
        assert json.loads(answered.body) == {**CHAT, "nvext": {"annotations": ["query_instance_id:"]}}
        assert answered.headers["content-length"] == str(len(answered.body))
        assert json.loads((await found.pick({**CHAT, "nvext": route})).body) == CHAT
        ranks = {
            "data_parallel_rank": 3,
            "vllm_xargs": {"routed_dp_rank": 3, "x": 1},
            "custom_params": {"kv_hints": "y"},
        }
        assert json.loads((await found.pick({**CHAT, **ranks})).body) == {**CHAT, "vllm_xargs": {"x": 1}}
        escaped = json.dumps({**CHAT, "nvext": route}).replace("nvext", "n\\u0076ext").encode()
        assert json.loads((await found.pick(escaped)).body) == CHAT


async def test_token_ids_of_the_client_are_replaced_by_those_that_were_routed() -> None:
    async with tokenizing_picker(picker_gateways=["127.0.0.1:9"]) as found:
        honest = json.loads((await found.pick(CHAT)).body)["nvext"]["token_data"]
        lying = await found.pick({**CHAT, "nvext": {"token_data": [5] * 5_000}})
        assert json.loads(lying.body)["nvext"] == {"token_data": honest}


async def test_several_prompts_are_booked_together_and_sent_without_token_ids() -> None:
    async with tokenizing_picker(picker_gateways=["127.0.0.1:9"]) as found:
        blocks = []
        for prompt in (["river " * 100], ["river " * 100] * 4):
            exchange = found.exchange()
            answered = await exchange.request({"model": MODEL, "prompt": prompt}, path="/v1/completions")
            ((_, prefill),) = (await found.bookings()).values()
            blocks.append(prefill)
            assert (b"token_data" in answered.body) == (len(prompt) == 1)
            exchange.cut()
            await found.empty()
        assert blocks[1] > 2 * blocks[0]


async def test_routing_headers_of_clients_are_removed_or_replaced() -> None:
    sent = dict.fromkeys(("x-dynamo-routing-mode", "x-sluice-worker", "x-prefiller-host-port", "x-dp-rank"), "other")
    async with picker() as found:
        answered = await found.pick(CHAT, sent)
        assert answered.headers["x-dynamo-routing-mode"] == "aggregated"
        assert {*sent} <= {*answered.headers, *answered.removed}
        assert "other" not in answered.headers.values()
        wide = FakeWorker("wide", data_parallel_size=4)
        wide.registration.http_address = http(9)
        await wide.attach(found.router)
        answered = await found.pick(CHAT, subset=http(9))
        assert answered.headers["x-data-parallel-rank"] == answered.headers["x-sluice-dp-rank"]
        await wide.detach()


@pytest.mark.parametrize("end", ["body", "trailers"])
async def test_empty_body_is_ended(end: str) -> None:
    async with picker() as found:
        exchange = found.exchange()
        await head(exchange)
        if end == "body":
            await chunk(exchange, b"", True)
            assert await kinds(exchange, 2) == ["request_headers", "request_body!"]
        else:
            await exchange.send(request_trailers=ext_proc.HttpTrailers())
            assert await kinds(exchange, 2) == ["request_headers", "request_trailers"]
        exchange.cut()


async def test_trailers_after_the_body_end_the_request() -> None:
    async with picker() as found:
        exchange = found.exchange()
        await head(exchange)
        await chunk(exchange, TEXT)
        await exchange.send(request_trailers=ext_proc.HttpTrailers())
        assert await kinds(exchange, 3) == ["request_headers", "request_body", "request_trailers"]
        exchange.cut()
        await found.empty()


STEPS = ["nothing", "headers", "body", "choice", "answer-headers", "answer-body", "end"]


@pytest.mark.parametrize("how", ["cut", "half_close"])
@pytest.mark.parametrize("step", STEPS)
async def test_envoy_that_ends_the_stream_at_any_step_leaves_nothing(step: str, how: str) -> None:
    async with picker() as found:
        exchange = found.exchange()
        at = STEPS.index(step)
        if at >= 1:
            await head(exchange)
        if at >= 2:
            await chunk(exchange, TEXT[:20], False)
        if at >= 3:
            await chunk(exchange, TEXT[20:], True)
            await exchange.answer()
        if at >= 4:
            await exchange.respond([], trailers=False) if step == "end" else await exchange.respond(
                [b"data: {}\n\n"] if at >= 5 else [], open_end=True, trailers=False
            )
        if how == "cut":
            exchange.cut()
        else:
            await exchange.end()
        await found.empty()
        assert (await found.pick(CHAT)).endpoints


async def test_stream_that_ends_while_its_booking_moves_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    add, moved, queries = Router.add, asyncio.Event(), []

    async def slow(router: Router, slot: WorkerRank, query: Query) -> Any:
        booked = await add(router, slot, query)
        queries.append(query)
        moved.set()
        await asyncio.sleep(60)
        return booked

    monkeypatch.setattr(Router, "add", slow)
    async with tokenizing_picker() as found:
        exchange = found.exchange()
        long = {**CHAT, "messages": [{"role": "user", "content": "river " * 99}]}
        _, second, *_ = (await exchange.request(long)).endpoints
        await exchange.respond([], open_end=True, served=second)
        await asyncio.wait_for(moved.wait(), 20)
        assert sum(requests for requests, _ in (await found.bookings()).values()) == 2
        exchange.cut()
        await found.empty()
    (query,) = queries
    assert (query.prompt.body, len(query.prompt.block_hashes) > 0) == (None, True)


async def test_stream_that_ends_while_its_request_waits_leaves_the_queue() -> None:
    async with picker(names=("a",), busy_requests=1, wait_ms=60_000) as found:
        running = found.exchange()
        await running.request(CHAT)
        exchange = found.exchange()
        await head(exchange)
        await chunk(exchange, TEXT, True)
        await until(lambda: waiting(found, 1))
        exchange.cut()
        await until(lambda: waiting(found, 0))
        running.cut()
        await found.empty()


async def test_messages_out_of_order_do_not_stop_the_picker() -> None:
    orders: list[list[dict[str, Any]]] = [
        [{"request_body": ext_proc.HttpBody(body=TEXT, end_of_stream=True)}],
        [{"request_trailers": ext_proc.HttpTrailers()}],
        [{"response_body": ext_proc.HttpBody(body=b"x")}],
        [{"response_trailers": ext_proc.HttpTrailers()}],
        [{"response_headers": ext_proc.HttpHeaders()}, {"request_headers": ext_proc.HttpHeaders()}],
        [{}],
        [{"request_headers": ext_proc.HttpHeaders(headers=header_map(POST))}] * 50,
    ]
    async with picker() as found:
        for order in orders:
            exchange = found.exchange()
            for message in order:
                await exchange.send(**message)
            await exchange.call.done_writing()
            async with asyncio.timeout(20):
                while await exchange.call.read() is not grpc.aio.EOF:
                    continue
        assert (await found.pick(CHAT)).endpoints
        await found.empty()


async def test_observed_requests_are_neither_answered_nor_booked() -> None:
    async with picker() as found:
        exchange = found.exchange()
        watched = {"observability_mode": True}
        await exchange.send(request_headers=ext_proc.HttpHeaders(headers=header_map(POST)), **watched)
        await exchange.send(request_body=ext_proc.HttpBody(body=TEXT, end_of_stream=True), **watched)
        await exchange.call.done_writing()
        assert await exchange.read() is grpc.aio.EOF
        assert await found.bookings() == {}


async def test_headers_that_are_not_utf8_are_passed_over() -> None:
    async with picker() as found:
        exchange = found.exchange()
        odd = ext_proc.HeaderMap(
            headers=[
                ext_proc.HeaderValue(key=key, raw_value=b"\xff\xfe\r\n") for key in ("x-request-id", "x-session-id")
            ]
        )
        odd.headers.extend(header_map(POST).headers)
        await exchange.send(request_headers=ext_proc.HttpHeaders(headers=odd))
        await chunk(exchange, TEXT, True)
        assert (await exchange.answer()).endpoints
        exchange.cut()
        exchange = found.exchange()
        await head(exchange, False, **{f"x-{number}": "v" * 4_000 for number in range(300)})
        await chunk(exchange, TEXT, True)
        assert (await exchange.answer()).endpoints
        exchange.cut()
        await found.empty()


async def test_message_that_is_no_message_ends_only_its_stream() -> None:
    async with picker() as found:
        process: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = found.channel.stream_stream(
            "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
        )
        call = process()
        await call.write(b"\xff" * 100)
        with pytest.raises(grpc.aio.AioRpcError):
            await asyncio.wait_for(call.read(), 20)
        assert (await found.pick(CHAT)).endpoints


async def test_streams_beyond_the_limit_fail_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "PickerLimits", partial(PickerLimits, streams=50))
    async with picker() as found:
        held = [found.exchange() for _ in range(50)]
        for exchange in held:
            await head(exchange)

        async def full() -> bool:
            try:
                return not (await found.pick(CHAT)).endpoints
            except grpc.aio.AioRpcError as error:
                return error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED

        await until(full)
        for exchange in held:
            exchange.cut()

        async def served() -> bool:
            return not await full()

        await until(served)


async def test_bodies_beyond_the_memory_are_rejected_as_saturated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "BudgetPool", lambda name, limit, setting: BudgetPool(name, 1 << 20, setting))
    async with picker(picker_body_mb=1) as found:
        holding = found.exchange()
        await head(holding)
        await chunk(holding, b"x" * 1_000_000)

        async def full() -> bool:
            answered = await found.pick(b"y" * 100_000)
            reason = answered.headers.get("x-llm-d-request-dropped-reason")
            return (answered.status, reason) == (429, "rejected-saturated")

        await until(full)
        holding.cut()
        await until(lambda: served(found))


async def served(found: Picker) -> bool:
    return bool((await found.pick(CHAT)).endpoints)


async def test_response_body_mode_that_buffers_is_named() -> None:
    async with picker() as found:
        exchange = found.exchange()
        buffered = ext_proc.ProtocolConfiguration.BUFFERED
        modes = ext_proc.ProtocolConfiguration(request_body_mode=FULL_DUPLEX, response_body_mode=buffered)
        await exchange.send(request_headers=ext_proc.HttpHeaders(headers=header_map(POST)), protocol_config=modes)
        answered = await exchange.answer()
        assert answered.status == 400
        assert b"response_body_mode" in answered.error


async def test_subset_of_another_message_than_the_headers_is_obeyed() -> None:
    async with picker() as found:
        exchange = found.exchange()
        await head(exchange)
        await exchange.send(
            request_body=ext_proc.HttpBody(body=TEXT, end_of_stream=True), metadata_context=subset_metadata([http(2)])
        )
        assert (await exchange.answer()).endpoints == [http(2)]
        exchange.cut()


@pytest.mark.parametrize("own", ["", '[{"worker": "x", "delivered_cached_tokens": 7}]', "no list", "5"])
async def test_receipt_on_request_shows_what_was_predicted_and_why(own: str) -> None:
    asked = {"x-sluice-receipt": "true"}
    async with tokenizing_picker(names=("a",), picker_receipts=True) as found:
        exchange = found.exchange()
        await exchange.request(CHAT, asked)
        headers, _ = await exchange.respond([b"{}"], extra={"x-sluice-route-receipt": own} if own else {})
        (receipt,) = json.loads(headers["x-sluice-route-receipt"])
        assert receipt.pop("delivered_cached_tokens", None) == (7 if "delivered" in own else None)
        assert receipt.pop("prompt_tokens") > 5
        assert receipt == {
            "worker": "a",
            "rank": 0,
            "predicted_cached_tokens": 0,
            "available_cached_tokens": 0,
            "waited_ms": 0,
            "reason": "least_load",
        }
        exchange.cut()
        plain = found.exchange()
        await plain.request(CHAT)
        assert await plain.respond([b"{}"]) == ({}, b"{}")
        plain.cut()
    async with picker(names=("a",)) as found:
        exchange = found.exchange()
        await exchange.request(CHAT, asked)
        headers, _ = await exchange.respond([b"{}"])
        assert "x-sluice-route-receipt" not in headers
        exchange.cut()


async def test_chunk_without_bytes_is_not_the_first_byte() -> None:
    async with tokenizing_picker() as found:
        exchange = found.exchange()
        await exchange.request({**CHAT, "messages": [{"role": "user", "content": "river " * 99}]})
        await exchange.respond([], open_end=True)
        await exchange.response_chunk(b"")
        await asyncio.sleep(0.3)  # longer than reports are collected
        ((_, prefill),) = (await found.bookings()).values()
        assert prefill > 0
        await exchange.response_chunk(b"data: {}")

        async def computed() -> bool:
            return [each[1] for each in (await found.bookings()).values()] == [0.0]

        await until(computed)
        exchange.cut()
        await found.empty()


async def test_error_about_a_body_names_the_body_that_the_client_sent() -> None:
    async with picker() as found:
        error = json.loads((await found.pick(b"{")).error)["error"]
        assert error["message"].startswith("The request body is not valid JSON: ")
        assert error["param"] is None


async def test_priority_in_the_body_does_not_overrule_objectives() -> None:
    settings: dict[str, Any] = {
        "names": ("a",),
        "busy_requests": 1,
        "wait_ms": 60_000,
        "picker_objectives": ["chat=10"],
    }
    async with picker(**settings) as found:
        running, served = found.exchange(), []
        await running.request(CHAT)

        async def ask(name: str, body: Any, headers: dict[str, str]) -> None:
            exchange = found.exchange()
            await exchange.request(body, headers)
            served.append(name)
            exchange.cut()

        pushing = asyncio.ensure_future(ask("pushing", {**CHAT, "priority": -1_000}, {}))
        await until(lambda: waiting(found, 1))
        chat = asyncio.ensure_future(ask("chat", CHAT, {"x-llm-d-inference-objective": "chat"}))
        await until(lambda: waiting(found, 2))
        running.cut()
        await asyncio.gather(pushing, chat)
        assert served == ["chat", "pushing"]
        await found.empty()

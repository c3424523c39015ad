"""What an operator does to workers that serve: adapters, sleep, caches. The suite is then as it was."""

from __future__ import annotations

import time
from collections.abc import Iterator

import grpc
import httpx
import pytest

from services.gateway.backends.workers.fleet_control import CHECK_EVERY_S
from sluice.v1 import worker_pb2, worker_pb2_grpc
from tests.support.servers.redis_server import RedisServer
from tests.support.servers.suite import Suite
from tests.support.waiting import wait_until

ADAPTER = "poet"
WAIT_S = 30
Action = worker_pb2.ControlRequest


def control(address: str, action: Action.Action.ValueType, **arguments: str) -> dict[str, str]:
    with grpc.insecure_channel(address) as channel:
        request = worker_pb2.ControlRequest(action=action, arguments=arguments)
        return dict(worker_pb2_grpc.WorkerStub(channel).Control(request, timeout=60).results)


def info_of(address: str) -> worker_pb2.GetInfoResponse:
    with grpc.insecure_channel(address) as channel:
        return worker_pb2_grpc.WorkerStub(channel).GetInfo(worker_pb2.GetInfoRequest(), timeout=20)


def complete(url: str, model: str, prompt: str = "Say something.", **fields: object) -> httpx.Response:
    body = {"model": model, "prompt": prompt, "max_tokens": 8, **fields}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=60)


def chosen(url: str, model: str, prompt: str, **fields: object) -> str:
    """The worker that would run it."""
    answer = complete(url, model, prompt, nvext={"annotations": ["query_instance_id:"]}, **fields)
    assert answer.status_code == 200, answer.text
    name: str = answer.json()["placements"][0]["decode_worker_id"]
    return name


def cached(url: str, model: str, prompt: str) -> int:
    usage = complete(url, model, prompt).json()["usage"]
    found: int = usage["prompt_tokens_details"]["cached_tokens"]
    return found


def test_an_adapter_is_a_model_on_the_worker_that_holds_it(suite: Suite) -> None:
    url, holder = suite.url, suite.address("worker", 1)
    assert complete(url, ADAPTER).status_code == 404
    control(holder, Action.ACTION_LOAD_LORA, name=ADAPTER)
    try:
        wait_until(lambda: complete(url, ADAPTER).status_code == 200)
        assert complete(url, ADAPTER).json()["model"] == ADAPTER
        name = info_of(holder).worker_id
        for number in range(12):  # by chance alone one in 4,096
            answer = complete(url, ADAPTER, f"Poem number {number}.", logprobs=1)
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["logprobs"]["tokens"]
            assert chosen(url, ADAPTER, f"Poem number {number}.") == name
        chat = {"model": ADAPTER, "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 4}
        for path, body in (
            ("/v1/chat/completions", chat),
            ("/v1/messages", chat),
            ("/v1/responses", {"model": ADAPTER, "input": "Hello.", "max_output_tokens": 16}),
            ("/v1/embeddings", {"model": ADAPTER, "input": "Hello."}),
            ("/tokenize", {"model": ADAPTER, "prompt": "Hello."}),
            ("/v1/chat/completions/render", chat),
            ("/v1/messages/count_tokens", {"model": ADAPTER, "messages": chat["messages"]}),
            ("/v1/responses/input_tokens", {"model": ADAPTER, "input": "Hello."}),
            ("/v1/chat/completions", {**chat, "bad_words": ["no"], "truncate_prompt_tokens": 50}),
        ):
            answer = httpx.post(f"{url}{path}", json=body, timeout=60)
            assert answer.status_code == 200, (path, answer.text)
        listed = {model["id"]: model for model in httpx.get(f"{url}/v1/models").json()["data"]}
        assert set(listed) == {"tekken", ADAPTER}
        assert listed[ADAPTER]["parent"] == "tekken"
        assert httpx.get(f"{url}/v1/models/{ADAPTER}").json()["id"] == ADAPTER
        plain = complete(url, "tekken", lora_path=ADAPTER, prompt="Poem number 1.")
        assert (
            plain.json()["choices"][0]["text"] == complete(url, ADAPTER, "Poem number 1.").json()["choices"][0]["text"]
        )
    finally:
        control(holder, Action.ACTION_UNLOAD_LORA, name=ADAPTER)
    wait_until(lambda: complete(url, ADAPTER).status_code == 404)


def test_an_adapter_that_nobody_holds_is_named(suite: Suite) -> None:
    answer = complete(suite.url, "tekken", lora_path="unknown")
    assert answer.status_code == 404
    assert answer.json()["error"]["param"] == "lora_path"
    assert answer.json()["error"]["code"] == "adapter_not_found"


def test_with_and_without_an_adapter_caches_are_apart(suite: Suite) -> None:
    holders = suite.addresses("worker")
    for holder in holders:
        control(holder, Action.ACTION_LOAD_LORA, name=ADAPTER)
    try:
        wait_until(lambda: complete(suite.url, ADAPTER).status_code == 200)
        prompt = " ".join(f"Line {number} of a song." for number in range(60))
        assert cached(suite.url, "tekken", prompt) == 0
        assert cached(suite.url, ADAPTER, prompt) == 0
        wait_until(lambda: cached(suite.url, ADAPTER, prompt))
    finally:
        for holder in holders:
            control(holder, Action.ACTION_UNLOAD_LORA, name=ADAPTER)


def test_a_sleeping_worker_gets_nothing_and_comes_back(suite: Suite) -> None:
    asleep, awake = suite.addresses("worker")
    name = info_of(asleep).worker_id
    control(asleep, Action.ACTION_SLEEP, level="1")
    try:
        wait_until(lambda: chosen(suite.url, "tekken", "Awake?") == info_of(awake).worker_id)
        for number in range(12):
            answer = complete(suite.url, "tekken", f"Awake {number}?")
            assert answer.status_code == 200, answer.text
            assert chosen(suite.url, "tekken", f"Awake {number}?") == info_of(awake).worker_id
    finally:
        control(asleep, Action.ACTION_WAKE)
    # Of two that cost the same, the emptier one.
    wait_until(lambda: chosen(suite.url, "tekken", "Who is there?") == name)


def test_a_cleared_cache_is_cold(suite: Suite) -> None:
    prompt = " ".join(f"Verse {number} of a hymn." for number in range(60))

    wait_until(lambda: cached(suite.url, "tekken", prompt))
    for address in suite.addresses("worker"):
        control(address, Action.ACTION_CLEAR_CACHE)
    assert cached(suite.url, "tekken", prompt) == 0


def test_profile_of_an_engine_without_a_profiler_is_refused_while_it_serves(suite: Suite) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        control(suite.address("worker"), Action.ACTION_START_PROFILE)
    assert refused.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert "profile" in (refused.value.details() or "")
    assert complete(suite.url, "tekken").status_code == 200


def post(suite: Suite, path: str, **body: object) -> httpx.Response:
    return httpx.post(f"{suite.url}{path}", json=body, timeout=60)


def test_adapter_loaded_over_http_is_on_every_worker_and_on_one_that_lost_it(suite: Suite) -> None:
    loaded = post(suite, "/v1/load_lora_adapter", lora_name=ADAPTER)
    assert (loaded.status_code, len(loaded.json()["workers"])) == (200, 2), loaded.text
    try:
        assert complete(suite.url, ADAPTER).status_code == 200
        (gateway,) = suite.processes("gateway")
        workers = suite.addresses("worker")
        gateway.suspend()  # its loop would load the adapter again at once
        try:
            for address in workers:  # as a restart does
                control(address, Action.ACTION_UNLOAD_LORA, name=ADAPTER)
                assert ADAPTER not in info_of(address).card.adapters
        finally:
            gateway.resume()
        wait_until(lambda: all(ADAPTER in info_of(address).card.adapters for address in workers))
        wait_until(lambda: complete(suite.url, ADAPTER).status_code == 200)
    finally:
        wait_until(lambda: post(suite, "/v1/unload_lora_adapter", lora_name=ADAPTER).status_code == 200)
    wait_until(lambda: complete(suite.url, ADAPTER).status_code == 404)
    gone = post(suite, "/v1/unload_lora_adapter", lora_name=ADAPTER)
    assert (gone.status_code, gone.json()["error"]["param"]) == (404, "lora_name")


def test_adapter_is_usable_when_its_load_has_answered_and_gone_when_its_unload_has(suite: Suite) -> None:
    prompt = "The same beginning of a prompt, longer than a block of tokens. " * 20
    for _ in range(3):
        assert len(post(suite, "/v1/load_lora_adapter", lora_name=ADAPTER).json()["workers"]) == 2
        assert len(post(suite, "/v1/unload_lora_adapter", lora_name=ADAPTER).json()["workers"]) == 2
        assert complete(suite.url, ADAPTER).status_code == 404
        assert len(post(suite, "/v1/load_lora_adapter", lora_name=ADAPTER).json()["workers"]) == 2
        assert cached(suite.url, ADAPTER, prompt) == 0, "blocks of an earlier load are not used"
        assert post(suite, "/v1/unload_lora_adapter", lora_name=ADAPTER).status_code == 200


@pytest.mark.parametrize("name", ["../etc", "/etc/passwd", "a/b", "", "x" * 129, "a b"])
def test_adapter_name_that_is_a_path_is_refused(suite: Suite, name: str) -> None:
    answer = post(suite, "/v1/load_lora_adapter", lora_name=name)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "lora_name")


def test_workers_sleep_and_wake_over_http(suite: Suite) -> None:
    assert len(httpx.post(f"{suite.url}/sleep?level=1", timeout=60).json()["workers"]) == 2
    wait_until(lambda: complete(suite.url, "tekken").status_code == 503)
    assert len(httpx.post(f"{suite.url}/wake_up", timeout=60).json()["workers"]) == 2
    wait_until(lambda: complete(suite.url, "tekken").status_code == 200)
    again = httpx.post(f"{suite.url}/wake_up", timeout=60)
    assert again.status_code == 400
    assert "has put a worker to sleep" in again.json()["error"]["message"]


def test_prefix_cache_reset_over_http_empties_it(suite: Suite) -> None:
    prompt = "The same beginning of a prompt, longer than a block of tokens. " * 20
    complete(suite.url, "tekken", prompt)
    wait_until(lambda: cached(suite.url, "tekken", prompt) > 0)
    assert httpx.post(f"{suite.url}/reset_prefix_cache", timeout=60).status_code == 200
    assert cached(suite.url, "tekken", prompt) == 0


@pytest.fixture(scope="module")
def shared(shared_redis: RedisServer) -> Iterator[Suite]:
    """Two gateways on one port, which share a Redis."""
    with Suite("--gateways", "2", "--redis", shared_redis.url, "--speedup", "20") as running:
        yield running


def test_workers_that_one_gateway_put_to_sleep_are_woken_by_any(shared: Suite) -> None:
    for _ in range(4):  # each connection ends at either gateway
        assert len(httpx.post(f"{shared.url}/sleep", timeout=60).json()["workers"]) == 2
        wait_until(lambda: complete(shared.url, "tekken").status_code == 503)
        assert len(httpx.post(f"{shared.url}/wake_up", timeout=60).json()["workers"]) == 2
        wait_until(lambda: all(complete(shared.url, "tekken").status_code == 200 for _ in range(8)))


def test_adapter_that_one_gateway_loaded_is_unloaded_by_any_and_stays_so(shared: Suite) -> None:
    for _ in range(4):
        wait_until(lambda: post(shared, "/v1/load_lora_adapter", lora_name=ADAPTER).status_code == 200)
        wait_until(lambda: all(complete(shared.url, ADAPTER).status_code == 200 for _ in range(8)))
        wait_until(lambda: post(shared, "/v1/unload_lora_adapter", lora_name=ADAPTER).status_code == 200)
        wait_until(lambda: all(complete(shared.url, ADAPTER).status_code == 404 for _ in range(8)))
    time.sleep(2 * CHECK_EVERY_S)  # the gateways' loops would load it again
    assert complete(shared.url, ADAPTER).status_code == 404

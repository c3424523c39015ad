"""What one tenant makes the suite store is charged to it and bounded, and its batches delay no other tenant's."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import psutil
import pytest

from services.common.net.intake.json_intake import SLICED_FROM
from services.common.net.intake.json_slices import SLICE_BYTES
from services.gateway.admission.keys import create, write
from services.gateway.apis.responses.background import BackgroundResponses
from services.gateway.apis.responses.conversations import Conversations
from services.gateway.apis.responses.history import StoredItems
from services.gateway.apis.responses.store import MemoryStore, ResponseStore, StoredResponse, StoreLimits
from services.gateway.settings import MEMORY_FILES_MB, GatewaySettings
from tests.support.servers.lone_gateway import LoneGateway
from tests.support.servers.suite import Suite
from tests.support.waiting import wait_until

WAIT_S = 120
MIB = 1 << 20
MAX_GROWTH_MIB = 150


def upload(client: httpx.Client, data: bytes) -> httpx.Response:
    return client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("x.jsonl", data)})


def started(client: httpx.Client, data: bytes, path: str) -> str:
    uploaded = upload(client, data)
    assert uploaded.status_code == 200, uploaded.text
    body = {"input_file_id": uploaded.json()["id"], "endpoint": path, "completion_window": "24h"}
    made = client.post("/v1/batches", json=body)
    assert made.status_code == 200, made.text
    return str(made.json()["id"])


def ended(client: httpx.Client, batch_id: str, wait_s: float = WAIT_S) -> dict[str, Any]:
    def found() -> dict[str, Any] | None:
        batch: dict[str, Any] = client.get(f"/v1/batches/{batch_id}").json()
        return batch if batch["status"] in ("completed", "failed", "expired", "cancelled") else None

    result = wait_until(found, wait_s)
    assert result is not None
    return result


def lines(path: str, bodies: list[dict[str, Any]]) -> bytes:
    entries = [{"custom_id": str(at), "method": "POST", "url": path, "body": body} for at, body in enumerate(bodies)]
    return "\n".join(map(json.dumps, entries)).encode()


OWNER, DONE_ID, RUNNING_ID = "tenant", "resp_done", "resp_running"
LARGE = [{"id": f"msg_{number}", "type": "message", "content": "x" * 50} for number in range(6_000)]
STATE = {"id": DONE_ID, "status": "completed", "background": True, "output": LARGE}
DONE = StoredResponse(orjson.dumps(STATE), orjson.dumps(LARGE))
RUNNING = StoredResponse(orjson.dumps({**STATE, "status": "in_progress"}), orjson.dumps(LARGE))
READERS: dict[str, Callable[[ResponseStore], Awaitable[object]]] = {
    "find": lambda store: Conversations(store).find(OWNER, "conv_1"),
    "update": lambda store: Conversations(store).update(OWNER, "conv_1", {"a": "b"}),
    "add": lambda store: Conversations(store).add(OWNER, "conv_1", [{"id": "msg_a"}]),
    "remove": lambda store: Conversations(store).remove(OWNER, "conv_1", "msg_1"),
    "continue": lambda store: StoredItems(store, OWNER).of_response(DONE_ID),
    "expire": lambda store: BackgroundResponses(store, GatewaySettings()).find(OWNER, RUNNING_ID),
    "cancel": lambda store: BackgroundResponses(store, GatewaySettings()).cancel(OWNER, DONE_ID),
}


@pytest.mark.parametrize("reader", READERS)
async def test_large_stored_values_are_read_back_in_slices(reader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore(StoreLimits.of(100, 64 * MIB), 3600)
    store.put(OWNER, "conv_1", DONE)
    store.put(OWNER, DONE_ID, DONE)
    store.put(OWNER, RUNNING_ID, RUNNING)
    lengths, loads = list[int](), orjson.loads

    def recorded(text: bytes) -> Any:
        lengths.append(len(text))
        return loads(text)

    monkeypatch.setattr(orjson, "loads", recorded)
    assert await READERS[reader](store) is not None or reader == "add"
    assert sum(lengths) > SLICED_FROM
    assert max(lengths) <= 3 * SLICE_BYTES


@pytest.fixture(scope="module")
def lone() -> Iterator[tuple[LoneGateway, httpx.Client]]:
    with LoneGateway() as gateway, httpx.Client(base_url=gateway.url, timeout=60) as client:
        yield gateway, client


def test_batches_of_broken_lines_take_bounded_memory(lone: tuple[LoneGateway, httpx.Client]) -> None:
    gateway, client = lone
    before = gateway.rss_mib()
    batches = [started(client, b"1\n" * (97 << 9), "/v1/completions") for _ in range(6)]
    for batch_id in batches:
        batch = ended(client, batch_id)
        assert (batch["status"], batch["errors"]["data"][0]["code"]) == ("failed", "too_many_broken_lines")
        assert client.delete(f"/v1/batches/{batch_id}").status_code == 200
    assert gateway.rss_mib() - before < 100


def test_file_of_too_many_lines_is_refused_at_the_upload(lone: tuple[LoneGateway, httpx.Client]) -> None:
    gateway, client = lone
    before, stored = gateway.rss_mib(), client.get("/v1/files").json()["data"]
    for unit in (b"1\n", b"\n", b" \n", b"{}\n"):
        refused = upload(client, unit * (int(15.5 * MIB) // len(unit)))
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert (error["code"], error["param"]) == ("too_many_lines", "file")
        assert client.get("/v1/files").json()["data"] == stored
    assert gateway.rss_mib() - before < 100


def test_results_beyond_what_a_tenant_may_store_fail_the_batch_and_are_given_back() -> None:
    path, limit = "/v1/embeddings", 2 * MIB
    data = lines(path, [{"model": "tekken", "input": [f"{at} {index}" for index in range(200)]} for at in range(40)])
    with (
        Suite("--workers", "1", "--speedup", "20", env={"SLUICE_GATEWAY_FILES_KEPT_MB": "3"}) as suite,
        httpx.Client(base_url=suite.url, timeout=60) as client,
    ):
        gateway = suite.processes("gateway")[0]
        before = gateway.memory_info().rss
        batch_id = started(client, data, path)
        batch = ended(client, batch_id)
        assert (batch["status"], batch["errors"]["data"][0]["code"]) == ("failed", "storage_limit_exceeded")
        files = client.get("/v1/files").json()["data"]
        assert len(data) < sum(file["bytes"] for file in files) <= limit
        output = client.get(f"/v1/files/{batch['output_file_id']}/content").text.splitlines()
        assert len(output) == batch["request_counts"]["completed"] > 0
        assert upload(client, b"1" * (limit - len(data))).status_code == 413
        assert client.delete(f"/v1/batches/{batch_id}").status_code == 200
        assert [file["purpose"] for file in client.get("/v1/files").json()["data"]] == ["batch"]
        assert upload(client, b"1" * (limit - len(data) - 4_096)).status_code == 200
        assert psutil.Process(gateway.pid).memory_info().rss - before < 150 * MIB


def test_batch_of_one_tenant_delays_no_line_of_another(tmp_path: Path) -> None:
    path = "/v1/completions"
    one, one_record = create("one", models=("tekken",))
    two, two_record = create("two", models=("tekken",))
    write(tmp_path / "keys.json", [one_record, two_record])
    long = {"model": "tekken", "prompt": "hi", "max_tokens": 4_000, "ignore_eos": True}
    with Suite("--speedup", "0.2", env={"SLUICE_GATEWAY_API_KEYS_FILE": str(tmp_path / "keys.json")}) as suite:
        first, second = (
            httpx.Client(base_url=suite.url, timeout=60, headers={"authorization": f"Bearer {key}"})
            for key in (one, two)
        )
        with first, second:
            batch_id = started(first, lines(path, [long] * 100), path)
            wait_until(lambda: first.get(f"/v1/batches/{batch_id}").json()["status"] == "in_progress")
            other = started(second, lines(path, [{**long, "max_tokens": 1}]), path)
            assert ended(second, other, 30)["status"] == "completed"
            assert first.get(f"/v1/batches/{batch_id}").json()["status"] == "in_progress"


def test_key_that_may_use_none_of_the_models_stores_no_files(tmp_path: Path) -> None:
    key, record = create("one", models=("other",))
    write(tmp_path / "keys.json", [record])
    with (
        LoneGateway("--api-keys-file", str(tmp_path / "keys.json")) as gateway,
        httpx.Client(base_url=gateway.url, timeout=60, headers={"authorization": f"Bearer {key}"}) as client,
    ):
        refused = upload(client, b"{}")
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "model_not_allowed")


def test_files_of_all_tenants_together_are_bounded(tmp_path: Path) -> None:
    keys = [create(name) for name in "abc"]
    write(tmp_path / "keys.json", [record for _, record in keys])
    with LoneGateway("--api-keys-file", str(tmp_path / "keys.json"), "--files-kept-mb", "4") as gateway:
        statuses = []
        for key, _ in keys:
            with httpx.Client(base_url=gateway.url, timeout=60, headers={"authorization": f"Bearer {key}"}) as client:
                answers = [upload(client, b"1" * MIB) for _ in range(2)]
                statuses += [answer.status_code for answer in answers]
        assert statuses == [200, 200, 200, 503, 503, 503]
        assert answers[-1].json()["error"]["code"] == "storage_full"


def test_gateway_that_stores_all_files_it_accepts_grows_by_a_bounded_amount(tmp_path: Path) -> None:
    keys = [create(name) for name in "ab"]
    write(tmp_path / "keys.json", [record for _, record in keys])
    codes = []
    with LoneGateway("--api-keys-file", str(tmp_path / "keys.json")) as gateway:
        peak = before = gateway.rss_mib()
        for key, _ in keys:
            with httpx.Client(base_url=gateway.url, timeout=60, headers={"authorization": f"Bearer {key}"}) as client:
                while (answer := upload(client, b"1" * (9 * MIB))).status_code == 200:
                    peak = max(peak, gateway.rss_mib())
                codes.append(answer.json()["error"]["code"])
    assert codes == ["storage_limit_exceeded", "storage_full"]
    assert MEMORY_FILES_MB / 2 < peak - before < MAX_GROWTH_MIB


def test_background_responses_of_one_tenant_leave_room_to_others(tmp_path: Path) -> None:
    one, one_record = create("one", models=("tekken",))
    two, two_record = create("two", models=("tekken",))
    write(tmp_path / "keys.json", [one_record, two_record])
    body = {"model": "tekken", "input": "hi", "background": True, "max_output_tokens": 4_000}
    env = {"SLUICE_GATEWAY_API_KEYS_FILE": str(tmp_path / "keys.json")}
    with Suite("--speedup", "0.1", env=env) as suite:
        statuses = []
        for key, number in ((one, 66), (two, 2)):
            with httpx.Client(base_url=suite.url, timeout=60, headers={"authorization": f"Bearer {key}"}) as client:
                answers = [client.post("/v1/responses", json=body) for _ in range(number)]
                statuses.append([answer.status_code for answer in answers])
        assert statuses == [[200] * 64 + [503] * 2, [200] * 2]

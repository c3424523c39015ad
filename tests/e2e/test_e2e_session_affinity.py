"""Sessions over HTTP: their turns stay on one worker although their prompts share nothing, and tenants share none."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from services.gateway.admission.keys import create, write
from sluice.v1 import router_pb2, router_pb2_grpc
from tests.support.servers.suite import Suite

TURNS = 8
WORKERS = 4
ONE, ONE_RECORD = create("one")
TWO, TWO_RECORD = create("two")
SHOP, SHOP_RECORD = create("of a shop", tenant="shop")
SHOP_TOO, SHOP_TOO_RECORD = create("of the same shop", tenant="shop")
SOURCES = "x-session-id,prompt_cache_key,user"


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Suite]:
    file = tmp_path_factory.mktemp("keys") / "keys.json"
    write(file, [ONE_RECORD, TWO_RECORD, SHOP_RECORD, SHOP_TOO_RECORD])
    env = {"SLUICE_GATEWAY_API_KEYS_FILE": str(Path(file)), "SLUICE_GATEWAY_SESSION_SOURCES": SOURCES}
    with Suite("--speedup", "1000", "--workers", str(WORKERS), env=env) as running:
        yield running


def run(
    suite: Suite, path: str = "/v1/chat/completions", session: str = "", key: str = ONE, **fields: Any
) -> tuple[str, bool]:
    """Runs one turn that shares nothing with any other; returns its worker, and whether the session decided."""
    text = secrets.token_hex(200)
    body: dict[str, Any] = {"model": "tekken", **fields}
    if path == "/v1/completions":
        body |= {"prompt": text, "max_tokens": 1}
    elif path == "/v1/responses":
        body |= {"input": text, "max_output_tokens": 1}
    else:
        body |= {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
    worker, hit, _ = sent(suite, path, session, key, body)
    return worker, hit


def run_messages(
    suite: Suite, messages: list[dict[str, str]], session: str = "", **fields: Any
) -> tuple[str, bool, dict[str, Any]]:
    """Runs one turn of a chat; returns its worker, whether the session decided, and its usage."""
    body = {"model": "tekken", "messages": messages, "max_tokens": 1, **fields}
    return sent(suite, "/v1/chat/completions", session, ONE, body)


def sent(suite: Suite, path: str, session: str, key: str, body: dict[str, Any]) -> tuple[str, bool, dict[str, Any]]:
    """Sends a request; returns its worker, whether the session decided, and its usage."""
    headers = {"authorization": f"Bearer {key}", **({"x-session-id": session} if session else {})}
    answer = httpx.post(suite.url + path, json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    with grpc.insecure_channel(suite.address("router")) as channel:
        asked = router_pb2.GetDecisionsRequest(limit=1)  # requests run one after the other
        (decision,) = router_pb2_grpc.RouterStub(channel).GetDecisions(asked, timeout=20).decisions
    assert decision.request_id.startswith(answer.json()["id"])
    return decision.decode.worker_id, decision.session_hit, answer.json()["usage"]


def check_stays(turns: list[tuple[str, bool]]) -> None:
    """Fails unless the first turn's worker runs all of them."""
    assert [hit for _, hit in turns] == [False] + [True] * (len(turns) - 1)
    assert len({worker for worker, _ in turns}) == 1


def test_requests_without_a_session_spread(suite: Suite) -> None:
    turns = [run(suite) for _ in range(2 * TURNS)]
    assert len({worker for worker, _ in turns}) == WORKERS
    assert not any(hit for _, hit in turns)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
def test_turns_with_a_session_header_stay_on_one_worker(suite: Suite, path: str) -> None:
    name = secrets.token_hex(8)
    turns = []
    for _ in range(TURNS):
        turns.append(run(suite, path, name))
        run(suite)  # what others do meanwhile changes nothing
    check_stays(turns)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"prompt_cache_key": "k1"}),
        ("/v1/responses", {"prompt_cache_key": "k2"}),
        ("/v1/chat/completions", {"user": "u1"}),
        ("/v1/completions", {"user": "u2"}),
        ("/v1/responses", {"user": "u3"}),
        ("/v1/messages", {"metadata": {"user_id": "u4"}}),
    ],
)
def test_turns_with_a_field_of_the_sources_stay_on_one_worker(suite: Suite, path: str, fields: dict[str, Any]) -> None:
    check_stays([run(suite, path, **fields) for _ in range(TURNS)])


@pytest.mark.parametrize("named", [{"prompt_cache_key": "rewriting"}, {"session": "rewriting-header"}])
def test_thirty_turns_with_rewritten_middles_stay_where_their_prefix_is_cached(
    suite: Suite, named: dict[str, Any]
) -> None:
    system = " ".join(secrets.token_hex(4) for _ in range(400))
    history: list[dict[str, str]] = []
    turns, cached = [], []
    for _ in range(30):
        history.append({"role": "user", "content": secrets.token_hex(100)})
        for message in history[len(history) // 2 : -1]:  # as an agent that shortens the results of its tools
            message["content"] = secrets.token_hex(40)
        messages = [{"role": "system", "content": system}, *history]
        worker, hit, usage = run_messages(suite, messages, **named)
        turns.append((worker, hit))
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
        run(suite)
    check_stays(turns)
    assert cached[0] == 0
    assert min(cached[1:]) > 400


def test_earlier_source_counts(suite: Suite) -> None:
    first = run(suite, session="first", user="the same", prompt_cache_key="the same")
    other = run(suite, session="other", user="the same", prompt_cache_key="the same")
    assert (first[1], other[1]) == (False, False)
    by_key = run(suite, user="the same", prompt_cache_key="the same")
    assert by_key[1] is False, "the header came first, so the field has named nothing yet"
    assert run(suite, session="first") == (first[0], True)
    assert run(suite, user="another", prompt_cache_key="the same") == (by_key[0], True)


@pytest.mark.parametrize("other", [TWO, SHOP], ids=["key", "shop"])
def test_session_of_another_tenant_is_another_session(suite: Suite, other: str) -> None:
    name = secrets.token_hex(8)
    mine = run(suite, session=name)
    theirs = run(suite, session=name, key=other)
    assert theirs[1] is False, "a tenant learns nothing of the sessions of another"
    assert run(suite, session=name) == (mine[0], True)
    assert run(suite, session=name, key=other) == (theirs[0], True)

"""What a key may do, and what one tenant learns of another: findings C1 to C4 and the part of A8 about keys."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from services.common.base.errors import ErrorKind, SluiceError
from services.common.base.tasks import TaskOwner
from services.common.security import file_watcher
from services.gateway.admission import tenants
from services.gateway.admission.fair_queue import FairQueue
from services.gateway.admission.gate import Gate
from services.gateway.admission.keys import ANONYMOUS, KeyFile, create, write
from services.gateway.admission.local_limiter import LocalLimiter
from services.gateway.admission.permit import Permit
from services.gateway.admission.tenants import SHARED, TenantSalt
from services.gateway.backends.workers.capabilities import able
from services.gateway.backends.workers.registry import WorkerEntry
from services.gateway.core import context
from services.gateway.core.context import RequestContext
from services.gateway.http.middleware.routing_hints import ENDPOINT, HEADERS
from services.gateway.pipeline import tenant_cache
from sluice.cli.commands import app
from sluice.cli.errors import BadFlag
from tests.support.servers.suite import Suite
from tests.support.servers.survival import asking, staged

WAIT_S = 60
CHAT, COMPLETIONS, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
ALICE, ALICE_RECORD = create("alice", tenant="acme")
ANNA, ANNA_RECORD = create("anna", tenant="acme")
BOB, BOB_RECORD = create("bob")
NARROW, NARROW_RECORD = create("narrow", models=["its-own"])
OPERATOR, OPERATOR_RECORD = create("operator", scopes=["infer", "operate"])
SCHEDULER, SCHEDULER_RECORD = create("scheduler", tenant="acme", scopes=["infer", "priority", "pin-worker", "template"])
RECORDS = (ALICE_RECORD, ANNA_RECORD, BOB_RECORD, NARROW_RECORD, OPERATOR_RECORD, SCHEDULER_RECORD)


@pytest.fixture(scope="module")
def suite(folder: Path) -> Iterator[Suite]:
    """One worker, a model with a chat template, and a key of each kind."""
    file = folder.parent / "keys.json"
    write(file, RECORDS)
    env = {"SLUICE_GATEWAY_API_KEYS_FILE": str(file)}
    with Suite("--workers", "1", "--speedup", "20", "--model", str(folder), "--model-name", "tiny", env=env) as running:
        yield running


def body_of(path: str, text: str = "Hello.", **more: Any) -> dict[str, Any]:
    """A small request of an API."""
    messages = [{"role": "user", "content": text}]
    prompt: dict[str, dict[str, Any]] = {
        CHAT: {"messages": messages, "max_tokens": 2},
        COMPLETIONS: {"prompt": text, "max_tokens": 2},
        MESSAGES: {"messages": messages, "max_tokens": 2},
        RESPONSES: {"input": text, "max_output_tokens": 2},
        "/tokenize": {"messages": messages},
    }
    return {"model": "tiny", **prompt[path], **more}


def post(
    suite: Suite, key: str | None, path: str, body: dict[str, Any], headers: dict[str, str] | None = None
) -> httpx.Response:
    shown = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.post(suite.url + path, json=body, headers={**shown, **(headers or {})}, timeout=WAIT_S)


def get(suite: Suite, key: str | None, path: str) -> httpx.Response:
    shown = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.get(suite.url + path, headers=shown, timeout=WAIT_S)


def lacks(answer: httpx.Response, scope: str, field: str | None) -> None:
    """Checks that an answer is the refusal of a key without a scope, in the form of its API."""
    assert answer.status_code == 403, answer.text
    error = answer.json()["error"]
    assert f"needs the scope '{scope}'" in error["message"]
    assert "\n" not in error["message"]
    if answer.url.path.startswith(MESSAGES):
        assert error["type"] == "permission_error"
        assert error["message"].startswith(f"{field} ")
    else:
        assert (error["type"], error["code"], error["param"]) == ("permission_denied_error", "scope_missing", field)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, MESSAGES, RESPONSES])
def test_a_priority_without_its_scope_is_refused_in_every_api(suite: Suite, path: str) -> None:
    for priority in (-1, 5, -(2**31)):
        lacks(post(suite, ALICE, path, body_of(path, priority=priority)), "priority", "priority")
    for neutral in ({"priority": 0}, {"priority": None}, {}):
        assert post(suite, ALICE, path, body_of(path, **neutral)).status_code == 200
    assert post(suite, SCHEDULER, path, body_of(path, priority=-7)).status_code == 200


def test_a_priority_that_would_pass_the_probes_of_workers_is_refused_with_its_scope_too(suite: Suite) -> None:
    for priority in (-(2**31), -1001, 1001):
        answer = post(suite, SCHEDULER, CHAT, body_of(CHAT, priority=priority))
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "priority")


def test_a_service_tier_has_no_effect_and_needs_no_scope(suite: Suite) -> None:
    assert post(suite, ALICE, CHAT, body_of(CHAT, service_tier="priority")).status_code == 200


@pytest.mark.parametrize("header", HEADERS.values())
def test_a_header_that_chooses_a_worker_needs_its_scope(suite: Suite, header: str) -> None:
    value = "0" if header.endswith("rank") else "worker-0"
    if header == ENDPOINT:  # a scheduler in front of gateways names the gateway in it, with the client's key
        assert post(suite, ALICE, CHAT, body_of(CHAT), {header: value}).status_code == 200
        return
    lacks(post(suite, ALICE, CHAT, body_of(CHAT), {header: value}), "pin-worker", header)
    allowed = post(suite, SCHEDULER, CHAT, body_of(CHAT), {header: value})
    assert allowed.status_code != 403, allowed.text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"nvext": {"backend_instance_id": "worker-0"}}, "nvext"),
        ({"nvext": {"token_data": [1, 2, 3]}}, "nvext"),
        ({"nvext": {"annotations": ["query_instance_id:"]}}, "nvext"),
        ({"data_parallel_rank": 0}, "data_parallel_rank"),
        ({"vllm_xargs": {"kv_hints": {}}}, "vllm_xargs.kv_hints"),
        ({"custom_params": {"disagg_prefill_dp_rank": 0}}, "custom_params.disagg_prefill_dp_rank"),
    ],
)
def test_a_field_that_chooses_a_worker_or_asks_for_one_needs_its_scope(
    suite: Suite, fields: dict[str, Any], param: str
) -> None:
    for path in (CHAT, COMPLETIONS):
        lacks(post(suite, ALICE, path, body_of(path, **fields)), "pin-worker", param)
        assert post(suite, SCHEDULER, path, body_of(path, **fields)).status_code != 403


def test_neutral_fields_of_schedulers_need_no_scope(suite: Suite) -> None:
    neutrals: tuple[dict[str, Any], ...] = (
        {"nvext": None},
        {"nvext": {}},
        {"nvext": {"backend_instance_id": None}},
        {"data_parallel_rank": None},
    )
    for neutral in neutrals:
        assert post(suite, ALICE, CHAT, body_of(CHAT, **neutral)).status_code == 200


@pytest.mark.parametrize("path", [CHAT, "/v1/chat/completions/render", "/tokenize"])
@pytest.mark.parametrize("source", ["{{ messages }}", "{% for m in messages %}x{% endfor %}", "{# nothing #}x"])
def test_the_source_of_a_template_needs_its_scope(suite: Suite, path: str, source: str) -> None:
    body = body_of("/tokenize" if path == "/tokenize" else CHAT, chat_template=source)
    lacks(post(suite, ALICE, path, body), "template", "chat_template")
    assert post(suite, SCHEDULER, path, body).status_code == 200


def test_the_name_of_a_template_and_its_variables_need_no_scope(suite: Suite) -> None:
    named = body_of("/tokenize", chat_template="default", chat_template_kwargs={"thinking": "{{ x }}"})
    answer = post(suite, ALICE, "/tokenize", named)
    assert answer.status_code == 200, answer.text
    assert answer.json()["tokens"] == post(suite, ALICE, "/tokenize", body_of("/tokenize")).json()["tokens"]


def test_an_adapter_that_is_not_the_keys_is_refused_wherever_it_is_named(suite: Suite) -> None:
    for fields in ({"model": "secret"}, {"model": "its-own", "lora_path": "secret"}):
        answer = post(suite, NARROW, CHAT, body_of(CHAT, **fields))
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "model_not_allowed")
    long = post(suite, NARROW, CHAT, body_of(CHAT, model="m" * 100_000))
    assert len(long.text) < 1000


def test_a_stored_response_belongs_to_its_tenant_however_the_key_is_written(suite: Suite) -> None:
    made = post(suite, ALICE, RESPONSES, body_of(RESPONSES)).json()["id"]
    ways: list[dict[str, str]] = [
        {"authorization": f"Bearer {ALICE}"},
        {"authorization": f"bearer {ALICE}"},
        {"authorization": f"BEARER     {ALICE}"},
        {"x-api-key": ALICE},
        {"authorization": f"Bearer {ANNA}"},
    ]
    for headers in ways:
        found = httpx.get(f"{suite.url}{RESPONSES}/{made}", headers=headers, timeout=WAIT_S)
        assert found.status_code == 200, headers
    for way in ways[:4]:
        other = {name: value.replace(ALICE, BOB) for name, value in way.items()}
        assert httpx.get(f"{suite.url}{RESPONSES}/{made}", headers=other, timeout=WAIT_S).status_code == 404
        continued = body_of(RESPONSES, previous_response_id=made)
        answer = httpx.post(suite.url + RESPONSES, json=continued, headers=other, timeout=WAIT_S)
        assert answer.json()["error"]["code"] == "previous_response_not_found"
        assert httpx.delete(f"{suite.url}{RESPONSES}/{made}", headers=other, timeout=WAIT_S).status_code == 404


def cached(suite: Suite, key: str, text: str, **more: Any) -> int:
    """Prompt tokens that the engine found in its cache, as the usage reports them."""
    answer = post(suite, key, CHAT, body_of(CHAT, text, **more))
    assert answer.status_code == 200, answer.text
    assert "x-sluice-degraded" not in answer.headers
    found: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


def test_a_tenant_does_not_find_out_what_another_one_has_sent(suite: Suite) -> None:
    text = "the ship that carries our secret sails on thursday " * 20
    assert cached(suite, ALICE, text) == 0
    assert cached(suite, ALICE, text) > 0
    assert cached(suite, ANNA, text) > 0, "keys of one tenant share"
    assert cached(suite, BOB, text) == 0
    assert cached(suite, OPERATOR, text) == 0


def test_no_salt_that_a_client_chooses_reaches_another_tenant(suite: Suite) -> None:
    text = "a river with a name that no other client sends " * 20
    for salt in ({}, {"cache_salt": "mine"}):
        assert cached(suite, ALICE, text, **salt) == 0
        assert cached(suite, ALICE, text, **salt) > 0
    chosen = [("cache_salt", salt) for salt in ("mine", "acme", "acmemine", "\x00\x00\x00\x04acme", ALICE_RECORD.id)]
    for name, salt_text in (*chosen, ("extra_key", "mine2"), ("extra_key", "acme2")):
        assert cached(suite, BOB, text, **{name: salt_text}) == 0
    for forged in (tenants.salted("acme", ""), tenants.salted("acme", "mine")):
        for name in ("cache_salt", "extra_key"):
            answer = post(suite, BOB, CHAT, body_of(CHAT, text, **{name: forged}))
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
    for option in ("vllm_xargs", "custom_params"):
        answer = post(suite, BOB, CHAT, body_of(CHAT, text, **{option: {"extra_key": tenants.salted("acme", "")}}))
        assert answer.status_code == 400


def test_the_router_finds_the_blocks_of_a_salted_prompt(suite: Suite) -> None:
    text = "the lighthouse keeper counts every wave that he can see " * 20
    asked = body_of(CHAT, text, nvext={"annotations": ["query_instance_id:"]})

    def to_compute() -> int:
        found: int = post(suite, SCHEDULER, CHAT, asked).json()["placements"][0]["tokens_to_compute"]
        return found

    before = to_compute()
    assert cached(suite, ALICE, text) == 0
    deadline = time.monotonic() + WAIT_S
    while to_compute() > before / 2:
        assert time.monotonic() < deadline, "the router never heard of the salted blocks"
        time.sleep(0.05)


def test_the_live_view_needs_the_scope_of_operators(suite: Suite) -> None:
    answer_id = post(suite, BOB, CHAT, body_of(CHAT)).json()["id"]
    for path in ("/ui/data/state", "/ui/data/stream", f"/ui/data/requests/{answer_id}", "/ui/data/anything"):
        assert get(suite, None, path).status_code == 401
        refused = get(suite, ALICE, path)
        lacks(refused, "operate", None)
        assert refused.json()["error"]["message"].startswith(path)
    assert get(suite, OPERATOR, "/ui/data/state").json()["version"]
    assert get(suite, None, "/ui/").status_code == 200


@pytest.mark.parametrize("command", [["top", "--once"], ["workers"], ["route", "Hello.", "--model", "tiny"]])
def test_a_command_whose_key_lacks_the_scope_ends_with_one_sentence(suite: Suite, command: list[str]) -> None:
    refused = CliRunner().invoke(app, [*command, "--gateway", suite.url, "--api-key", ALICE])
    assert isinstance(refused.exception, BadFlag)
    sentence = str(refused.exception)
    assert "needs the scope 'operate', which this API key lacks" in sentence
    assert "\n" not in sentence
    assert "Give --api-key" not in sentence


def test_without_a_key_ready_has_no_names_and_metrics_are_closed(suite: Suite) -> None:
    for key in (None, "sluice-wrong"):
        public = get(suite, key, "/ready")
        assert public.status_code == 200
        assert public.json().keys() == {"ready", "workers", "pid", "missing_extensions"}
        assert "tiny" not in public.text
    assert get(suite, ALICE, "/ready").json()["models"] == ["tiny"]
    assert get(suite, NARROW, "/ready").json()["models"] == []
    assert get(suite, None, "/metrics").status_code == 401
    lacks(get(suite, ALICE, "/metrics"), "operate", None)
    assert "sluice_gateway" in get(suite, OPERATOR, "/metrics").text


def test_an_unknown_model_lists_only_the_models_of_the_key(suite: Suite) -> None:
    for path in (CHAT, MESSAGES):
        known = post(suite, ALICE, path, body_of(path, model="other"))
        assert known.status_code == 404
        assert "tiny" in known.text
        own = post(suite, NARROW, path, body_of(path, model="its-own"))
        assert own.status_code == 404
        assert "tiny" not in own.text
        assert "there is" not in own.text


def test_ready_says_whether_a_model_has_workers_to_keys_that_may_use_it(suite: Suite) -> None:
    there = get(suite, ALICE, "/ready?model=tiny")
    assert (there.status_code, there.json()) == (200, {"ready": True, "workers": 1})
    away = get(suite, ALICE, "/ready?model=other")
    assert (away.status_code, away.json()) == (503, {"ready": False, "workers": 0})
    answers = [get(suite, None, "/ready?model=tiny"), get(suite, NARROW, "/ready?model=tiny")]
    answers += [get(suite, None, "/ready?model=other"), get(suite, NARROW, "/ready?model=other")]
    assert {(answer.status_code, answer.text) for answer in answers} == {(404, answers[0].text)}
    assert "tiny" not in answers[0].text
    assert get(suite, NARROW, "/ready?model=its-own").status_code == 503


def test_the_command_that_the_suite_prints_has_the_key(suite: Suite) -> None:
    printed = next(line for line in suite.output if line.startswith("curl "))
    assert '-H "Authorization: Bearer $SLUICE_API_KEY"' in printed


def gate_of(path: Path | None, tenant_salt: TenantSalt = "auto") -> Gate:
    file = None if path is None else KeyFile(path)
    return Gate(file, LocalLimiter(), FairQueue(10, 10, 1), TaskOwner(), tenant_salt=tenant_salt)


def test_salts_are_on_as_soon_as_the_file_has_two_tenants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_watcher, "CHECK_EVERY_S", 0.0)
    path = tmp_path / "keys.json"
    write(path, [ALICE_RECORD, ANNA_RECORD])
    gates = {mode: gate_of(path, mode) for mode in ("auto", "on", "off")}

    def salts() -> list[str]:
        return [gate.uncounted(ALICE_RECORD).salts for gate in gates.values()]

    assert salts() == ["off", "on", "off"]
    write(path, [ALICE_RECORD, ANNA_RECORD, BOB_RECORD])
    assert salts() == ["auto", "on", "off"]
    write(path, [ALICE_RECORD, ANNA_RECORD, replace(BOB_RECORD, revoked=True)])
    assert salts() == ["auto", "on", "off"], "what a former tenant left without a salt stays out of reach"
    assert gate_of(None).uncounted(ANONYMOUS).salts == "off"


@pytest.mark.parametrize("tenant", ["auto", "on"])
async def test_an_engine_that_cannot_keep_tenants_apart_is_refused_or_marked(folder: Path, tenant: TenantSalt) -> None:
    async with staged(folder, workers=2) as stage:
        workers = stage.pipeline.registry.workers
        context.enter(RequestContext(Permit(ALICE_RECORD, "", None, None, salts=tenant)))
        workers["w0"] = replace(workers["w0"], capabilities=workers["w0"].capabilities - {"cache_salt"})
        heard = await stage.ask(asking("r0", "Tell me of rivers."))
        assert heard.finish is not None
        assert not heard.finish.degraded
        assert stage.reservations.last[1] == "w1", "of a mixed fleet, only workers that keep tenants apart"
        workers["w1"] = replace(workers["w1"], capabilities=workers["w1"].capabilities - {"cache_salt"})
        if tenant == "on":
            with pytest.raises(SluiceError, match="--tenant-salt on") as refused:
                await stage.ask(asking("r1", "Tell me of rivers."))
            assert (refused.value.kind, refused.value.code) == (ErrorKind.UNAVAILABLE, "engine_cannot")
        else:
            heard = await stage.ask(asking("r1", "Tell me of rivers."))
            assert heard.finish is not None
            assert heard.finish.degraded == (SHARED,)
        await stage.quiet()


def test_workers_that_are_left_and_share_their_caches_are_no_fault_of_the_client() -> None:
    entry = WorkerEntry("w", "h:1", 1, "tiny", 16, 4096, 0, frozenset(), 0)
    request, able_workers = tenant_cache.with_tenant_salt(
        asking("r", "Tell me of rivers."),
        [replace(entry, capabilities=frozenset({"cache_salt"})), entry],
        Permit(ALICE_RECORD, "", None, None, salts="auto"),
    )
    assert [worker.capabilities for worker in able_workers] == [{"cache_salt"}]
    assert not tenant_cache.is_shared(request, Permit(ALICE_RECORD, "", None, None, salts="auto"))
    with pytest.raises(SluiceError) as refused:
        able([entry], request.needs)
    assert (refused.value.kind, refused.value.code) == (ErrorKind.UNAVAILABLE, "no_workers")


def test_salts_of_tenants_never_meet() -> None:
    pairs = [("a", ""), ("a", "b"), ("ab", ""), ("ab", "b"), ("a", "bb"), ("a.b", ""), ("a", ".b")]
    made = {tenants.salted(*pair) for pair in pairs}
    assert len(made) == len(pairs)
    assert all(re.fullmatch(r"sluice-tenant-[0-9a-f]{32}", salt) for salt in made)

"""API keys, their file and their scopes."""

from __future__ import annotations

import json
import logging
import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.common.base.errors import SluiceError
from services.common.base.tasks import TaskOwner
from services.common.security import file_watcher
from services.gateway.admission.builder import build_gate
from services.gateway.admission.keys import ApiKey, KeyFile, KeyRing, changed, create, read, write
from services.gateway.admission.permit import OPEN, Permit
from services.gateway.admission.scopes import ALL, DEFAULT, Scope, ordered, parse
from services.gateway.apis.openai.fields import MAX_PRIORITY
from services.gateway.http.middleware import scopes as scoped
from services.gateway.pipeline.config import PipelineConfig
from services.gateway.settings import GatewaySettings
from services.worker.serving import canary
from tests.support.oracles.errors import raises_error


def test_a_key_gets_in_and_others_do_not() -> None:
    shown, record = create("one")
    ring = KeyRing([record])
    assert ring.find(shown) == record
    for wrong in ("", "sluice", "sluice-", shown[:-1], shown + "x", shown.replace("sluice", "slurp"), "ü", "\udcff"):
        assert ring.find(wrong) is None, wrong


def test_the_file_holds_no_secret_and_is_its_owners(tmp_path: Path) -> None:
    shown, record = create("one", models=["a"], tokens_per_minute=7)
    path = tmp_path / "keys" / "keys.json"
    write(path, [record])
    assert shown.split("-", 2)[2] not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read(path) == [record]
    assert list(path.parent.iterdir()) == [path]


def test_a_revoked_key_stays_known_and_does_not_get_in() -> None:
    shown, record = create("one")
    assert KeyRing([replace(record, revoked=True)]).find(shown) is None


def test_the_file_is_read_again_when_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_watcher, "CHECK_EVERY_S", 0.0)
    path = tmp_path / "keys.json"
    (first, one), (second, two) = create("one"), create("two")
    write(path, [one])
    file = KeyFile(path)
    assert file.ring.find(first)
    assert not file.ring.find(second)
    write(path, [two])
    assert not file.ring.find(first)
    assert file.ring.find(second)


@pytest.mark.parametrize("broken", ["", "[]", '{"keys": 1}', '{"keys": [{"id": "x"}]}', None])
def test_a_file_that_breaks_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str | None
) -> None:
    monkeypatch.setattr(file_watcher, "CHECK_EVERY_S", 0.0)
    path = tmp_path / "keys.json"
    shown, one = create("one")
    write(path, [one])
    file = KeyFile(path)
    if broken is None:
        os.unlink(path)
    else:
        path.write_text(broken)
    assert file.ring.find(shown)
    with pytest.raises(SluiceError, match=r"keys\.json"):
        KeyFile(path)


GOOD = {"id": "0" * 12, "name": "n", "hash": "0" * 64}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("id", "short"),
        ("id", 5),
        ("hash", "secret"),
        ("name", ""),
        ("name", "a\nb"),
        ("requests_per_minute", -1),
        ("tokens_per_minute", 1.5),
        ("concurrency", True),
        ("priority", 10),
        ("weight", 0),
        ("models", "all"),
        ("models", [""]),
        ("revoked", "no"),
        ("scopes", "infer"),
        ("scopes", ["infer", "admin"]),
        ("scopes", [5]),
        ("scopes", None),
        ("tenant", "a b"),
        ("tenant", "a}b"),
        ("tenant", "x" * 65),
        ("tenant", "anonymous"),
        ("tenant", None),
        ("tenant", 0),
        ("quota", 1),
    ],
)
def test_every_field_is_checked(tmp_path: Path, field: str, value: Any) -> None:
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"keys": [GOOD]}))
    assert read(path)[0].weight == 1
    path.write_text(json.dumps({"keys": [{**GOOD, field: value}]}))
    with pytest.raises(SluiceError, match=field):
        read(path)


def test_two_keys_of_one_id_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"keys": [GOOD, GOOD]}))
    with pytest.raises(SluiceError, match="same id"):
        read(path)


def test_models_of_a_key() -> None:
    assert ApiKey("a", "a", "").may_use("anything")
    assert not ApiKey("a", "a", "", models=("x",)).may_use("y")


LOOPBACK = ("127.0.0.1:8000", "127.9.9.9:1", "localhost:8000", "[::1]:8000")
OPEN_TO_OTHERS = ("0.0.0.0:8000", "[::]:8000", "10.0.0.5:8000", "gateway:8000", "[fe80::1]:8000")


def anonymous(listen: str, *flags: str) -> frozenset[Scope]:
    settings = GatewaySettings.load(["--listen", listen, *flags])
    return build_gate(settings, settings.listen, TaskOwner()).authenticate(None).scopes


def test_without_keys_everything_is_allowed_on_a_loopback_address_only(caplog: pytest.LogCaptureFixture) -> None:
    assert {anonymous(listen) for listen in LOOPBACK} == {ALL}
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        assert {anonymous(listen) for listen in OPEN_TO_OTHERS} == {DEFAULT}
    assert len(caplog.records) == len(OPEN_TO_OTHERS)
    assert "--api-keys-file" in caplog.text


def test_a_container_is_as_open_as_the_host_that_publishes_its_port() -> None:
    assert anonymous("0.0.0.0:8000", "--published-host", "127.0.0.1") == ALL
    assert anonymous("0.0.0.0:8000", "--published-host", "0.0.0.0") == DEFAULT
    assert anonymous("127.0.0.1:8000", "--published-host", "10.0.0.5") == DEFAULT


def test_scopes_without_keys_can_be_set() -> None:
    assert anonymous("0.0.0.0:8000", "--anonymous-scopes", "infer,operate") == {Scope.INFER, Scope.OPERATE}
    assert anonymous("127.0.0.1:8000", "--anonymous-scopes", "infer") == DEFAULT


def test_a_scope_that_does_not_exist_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        GatewaySettings.load(["--anonymous-scopes", "infer,everything"])
    printed = capsys.readouterr().err
    assert "--anonymous-scopes" in printed
    assert "'everything' does not exist" in printed
    assert printed.count("\n") == 1


def test_a_key_without_the_field_has_the_scope_infer_only(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"keys": [{"id": "0" * 12, "name": "old", "hash": "0" * 64}]}))
    (old,) = read(path)
    assert (old.scopes, old.tenant, old.owner) == (DEFAULT, "", old.id)


def test_scopes_and_tenant_survive_the_file_and_can_be_changed(tmp_path: Path) -> None:
    _, key = create("one", scopes=["operate", "infer"], tenant="acme")
    write(tmp_path / "keys.json", [key])
    assert read(tmp_path / "keys.json") == [key]
    assert (ordered(key.scopes), key.owner) == (["infer", "operate"], "acme")
    less = changed(key, scopes=["infer"], tenant="", concurrency=3)
    assert (less.scopes, less.owner, less.concurrency, less.hash) == (DEFAULT, key.id, 3, key.hash)
    with pytest.raises(SluiceError, match="concurrency"):
        changed(key, concurrency=-1)


def test_every_scope_is_needed_by_something() -> None:
    fields = {"priority": 1, "nvext": {"a": 1}, "chat_template": "{{x}}"}
    needed = {scope for scope, _ in scoped.of_fields(fields)}
    needed |= {scope for path in ("/metrics", "/v1/models") if (scope := scoped.of_path(path)) is not None}
    assert needed == ALL == parse(ordered(ALL))


@pytest.mark.parametrize("path", ["/", "/health", "/ready", "/docs", "/openapi.json", "/ui", "/ui/", "/ui/main.js"])
def test_paths_without_data_need_no_key(path: str) -> None:
    assert scoped.of_path(path) is None


@pytest.mark.parametrize(
    "path",
    ["/metrics", "/metrics/", "/ui/data/state", "/ui/data/stream", "/ui/data/", "/ui/x/y", "/ui/data/requests/a\nb"],
)
def test_paths_that_show_every_tenant_need_the_scope_operate(path: str) -> None:
    assert scoped.of_path(path) is Scope.OPERATE


@pytest.mark.parametrize(
    "path", ["/v1/models", "/v1/chat/completions", "/tokenize", "//", "/uix", "/metricsx", "/nothing"]
)
def test_all_other_paths_need_the_scope_infer(path: str) -> None:
    assert scoped.of_path(path) is Scope.INFER


@pytest.mark.parametrize(
    ("body", "needed"),
    [
        ({"priority": 0}, []),
        ({"priority": None, "nvext": None, "data_parallel_rank": None, "chat_template": None}, []),
        ({"priority": False, "nvext": {}, "chat_template": "", "vllm_xargs": {}, "custom_params": None}, []),
        ({"priority": "0"}, ["priority"]),
        ({"priority": []}, ["priority"]),
        ({"nvext": []}, ["pin-worker"]),
        ({"nvext": {"annotations": []}}, ["pin-worker"]),
        ({"data_parallel_rank": 0}, ["pin-worker"]),
        ({"data_parallel_rank": False}, ["pin-worker"]),
        ({"chat_template": "tool_use"}, []),
        ({"chat_template": "a { b } % c"}, []),
        ({"chat_template": "x{#- y -#}"}, ["template"]),
        ({"chat_template": 5, "chat_template_kwargs": {"a": "{{ b }}"}}, []),
        ({"vllm_xargs": "text", "custom_params": {"extra_key": "x"}}, []),
        ({"priority": 1, "nvext": {"a": 1}, "chat_template": "{%"}, ["priority", "pin-worker", "template"]),
    ],
)
def test_fields_need_scopes_unless_they_are_neutral(body: dict[str, Any], needed: list[str]) -> None:
    assert [str(scope) for scope, _ in scoped.of_fields(body)] == needed


def test_the_header_of_endpoint_pickers_needs_a_scope_only_where_it_is_read() -> None:
    headers = [(b"x-gateway-destination-endpoint", b"10.0.0.1:8000")]
    permit = Permit(ApiKey("0" * 12, "k", ""), "", None, None)
    for unread in (PipelineConfig(), PipelineConfig(routing="query-only")):
        scoped.check_headers(permit, headers, scoped.without_effect(unread))
    for read_here in (PipelineConfig(routing="direct"), PipelineConfig(stages={"place": "a.b:C"})):
        with pytest.raises(SluiceError, match="pin-worker"):
            scoped.check_headers(permit, headers, scoped.without_effect(read_here))


def test_a_refusal_names_scope_field_and_key_and_is_counted() -> None:
    counted: list[str] = []
    permit = Permit(ApiKey("0" * 12, "k", ""), "", None, None, counted.append)
    with raises_error(http_status=403, code="scope_missing", param="priority") as refused:
        scoped.check_body(permit, {"model": "m", "priority": 3})
    assert "'priority'" in refused.value.message
    assert f"sluice keys set {'0' * 12} --scope" in refused.value.message
    with pytest.raises(SluiceError) as refused:
        permit.require(Scope.OPERATE, subject="/" + "x" * 10_000)
    assert len(refused.value.message) < 500
    assert counted == ["scope", "scope"]
    scoped.check_body(OPEN, {"model": "m", "priority": 3, "nvext": {"a": 1}, "chat_template": "{{"})


def test_canary_priority_is_outside_the_range_of_clients() -> None:
    assert canary.HIGHEST_PRIORITY < -MAX_PRIORITY

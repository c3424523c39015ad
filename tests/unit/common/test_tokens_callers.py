"""Which service may call what, and how tokens and certificates say who calls."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import SecretStr

from services.common.errors import SluiceError
from services.common.rpc.channels import open_channel
from services.common.security import file_watcher as watched
from services.common.security.bearer_tokens import AcceptedToken, accepted_tokens, digest_of
from services.common.security.identity import CALLERS, Caller, both, of_certificate
from services.common.security.rpc_policy import may_call
from services.common.security.tls import PeerCredentials, channel_credentials
from services.common.settings import ServiceSettings
from services.worker.settings import WorkerSettings
from sluice.v1 import postprocess_pb2, preprocess_pb2, router_pb2, worker_pb2
from tests.support.data.tokens import accept

EVERY_RPC = {
    f"{service.name}/{method.name}": f"/{service.full_name}/{method.name}"
    for module in (preprocess_pb2, router_pb2, postprocess_pb2, worker_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
NONE = SecretStr("")


def allowed(caller: str) -> set[str]:
    return {name for name, path in EVERY_RPC.items() if may_call(caller, path)}


def accepted(path: Path) -> list[AcceptedToken]:
    tokens = accepted_tokens(NONE, path)
    assert tokens is not None
    return list(tokens())


def test_each_service_may_call_what_the_design_has_it_call() -> None:
    assert allowed("operator") == set(EVERY_RPC)
    assert allowed("worker") == {"Router/Attach"}
    assert allowed("router") == {"Preprocess/Tokenize"}
    learning = {"Router/ListWorkers", "Router/WatchWorkers", "Worker/GetInfo", "Worker/GetTokenizer"}
    assert allowed("preprocess") == allowed("postprocess") == learning
    assert set(EVERY_RPC) - allowed("gateway") == {"Router/Attach", "Router/DumpIndex", "Worker/Control"}
    assert allowed("scheduler") == allowed("gateway")
    assert allowed("somebody") == set()


def test_what_is_no_service_of_the_suite_is_open_to_every_caller() -> None:
    for caller in CALLERS:
        assert may_call(caller, "/grpc.health.v1.Health/Check")


def test_a_file_holds_digests_and_whose_they_are(tmp_path: Path) -> None:
    path = accept(tmp_path / "tokens", "one gateway", "two worker", "three worker/w1")
    found = accepted(path)
    assert [token.caller.name for token in found] == ["gateway", "worker", "worker/w1"]
    assert f"sha256:{found[0].digest.hex()}" == digest_of("one")


def test_a_worker_may_register_its_own_id_and_none_that_is_anothers(tmp_path: Path) -> None:
    shared, own = (token.caller for token in accepted(accept(tmp_path / "t", "a worker", "b worker/w1")))
    assert [own.may_register(name) for name in ("w1", "w2")] == [True, False]
    assert [shared.may_register(name) for name in ("w1", "w2")] == [False, True]


@pytest.mark.parametrize(
    "line",
    [
        "hush gateway",
        f"{digest_of('hush')}",
        f"{digest_of('hush')} stranger",
        f"{digest_of('hush')} gateway worker",
        f"{digest_of('hush')[:-1]} gateway",
        f"{digest_of('hush')} worker/",
        f"{digest_of('hush')} gateway/g1",
        f"{digest_of('fine')} worker",
    ],
)
def test_a_line_that_is_none_is_named_without_its_secret(tmp_path: Path, line: str) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"{digest_of('fine')} gateway\n{line}\n")
    with pytest.raises(SluiceError, match="Line 2 of the tokens file") as refused:
        accepted(path)
    assert "hush" not in refused.value.message
    assert digest_of("hush")[7:] not in refused.value.message


def test_a_bad_line_that_comes_later_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched, "CHECK_EVERY_S", 0.0)
    path = accept(tmp_path / "tokens", "good gateway")
    tokens = accepted_tokens(NONE, path)
    path.write_text(f"{digest_of('better')} gateway\nworse nobody\n")
    assert tokens is not None
    assert [f"sha256:{token.digest.hex()}" for token in tokens()] == [digest_of("good")]


def test_no_representation_shows_a_secret(tmp_path: Path) -> None:
    (token,) = accepted(accept(tmp_path / "tokens", "hush gateway"))
    assert token.digest.hex() not in repr(token)
    settings = ServiceSettings(peer_token=SecretStr("hush worker"))
    assert "hush" not in repr(settings)


@pytest.mark.parametrize(
    ("uris", "caller"),
    [
        (["spiffe://sluice/gateway"], "gateway"),
        (["spiffe://sluice/worker/w-1.x"], "worker/w-1.x"),
        (["spiffe://sluice/worker", "https://example.org", "spiffe://other/gateway"], "worker"),
        ([], None),
        (["spiffe://other/gateway"], None),
        (["spiffe://sluice/gateway", "spiffe://sluice/worker"], None),
        (["spiffe://sluice/stranger"], None),
        (["spiffe://sluice/gateway/g1"], None),
        (["spiffe://sluice/worker/"], None),
        (["spiffe://sluice/"], None),
        (["spiffe://sluicegateway"], None),
        (["SPIFFE://sluice/gateway"], None),
    ],
)
def test_a_certificate_names_its_caller_by_one_uri(uris: list[str], caller: str | None) -> None:
    found = of_certificate(uris, "sluice")
    assert (found and found.name) == caller


def test_of_a_token_and_a_certificate_the_narrower_names_the_caller() -> None:
    shared, own, other = Caller("worker"), Caller("worker", "w1"), Caller("worker", "w2")
    operator, gateway = Caller("operator"), Caller("gateway")
    named = {(left, right): both(left, right) for left in (shared, own, operator) for right in (shared, own, operator)}
    assert {(a.name, b.name): found and found.name for (a, b), found in named.items()} == {
        ("worker", "worker"): "worker",
        ("worker", "worker/w1"): "worker/w1",
        ("worker/w1", "worker"): "worker/w1",
        ("worker/w1", "worker/w1"): "worker/w1",
        ("worker", "operator"): "worker",
        ("worker/w1", "operator"): "worker/w1",
        ("operator", "worker"): "worker",
        ("operator", "worker/w1"): "worker/w1",
        ("operator", "operator"): "operator",
    }
    assert both(own, other) is None
    barred = both(Caller("worker", reserved=frozenset({"w1"})), own)
    assert barred is not None
    assert not barred.may_register("w1"), "the token is not the one that the file has for this worker"
    found = both(gateway, operator)
    assert found is not None
    assert found.scope == "gateway"


async def test_each_service_is_shown_its_own_token(tmp_path: Path) -> None:
    path = tmp_path / "shown"
    path.write_text("to-router router\nto-worker worker\nto-w1 worker/w1\n")
    credentials = channel_credentials(WorkerSettings(peer_token_file=path))
    assert isinstance(credentials, PeerCredentials)
    assert credentials.tls is None
    shown = []
    for callee in ("router", "worker/w1", "worker/w2", "postprocess"):
        async with open_channel("127.0.0.1:1", credentials, callee=callee) as channel:
            shown.append(channel._token())  # type: ignore[attr-defined]
    assert shown == ["to-router", "to-w1", "to-worker", ""]
    async with open_channel("127.0.0.1:1", credentials) as channel:
        assert not hasattr(channel, "_token")
    special = channel_credentials(WorkerSettings(peer_token_file=path, router_token=SecretStr("special")))
    assert special is not None
    async with open_channel("127.0.0.1:1", special, callee="router") as channel:
        assert channel._token() == "special"  # type: ignore[attr-defined]

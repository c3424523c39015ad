"""Bearer tokens, and which caller may call what."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from services.common.base.errors import ErrorKind, SluiceError
from services.common.rpc.auth_interceptor import AccessInterceptor
from services.common.rpc.bearer_channel import BearerChannel
from services.common.rpc.channels import open_channel
from services.common.security import file_watcher as watched
from services.common.security.bearer_tokens import (
    AcceptedToken,
    AcceptedTokens,
    ShownTokens,
    accepted_tokens,
    digest_of,
    shown_tokens,
)
from services.common.security.identity import CALLERS, Caller, both, of_certificate
from services.common.security.rpc_policy import may_call
from services.common.security.tls import PeerCredentials, channel_credentials
from services.common.settings.service import ServiceSettings
from services.worker.settings import WorkerSettings
from sluice.v1 import postprocess_pb2, preprocess_pb2, router_pb2, worker_pb2
from tests.support.data.tokens import accept, replace
from tests.support.oracles.errors import raises_error

NONE = SecretStr("")
METHOD = "/sluice.v1.Router/ListWorkers"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched, "CHECK_EVERY_S", 0.0)


def caller_of(tokens: AcceptedTokens | None, shown: str | bytes) -> str:
    """The name of the caller that shows a header; empty where it is refused."""
    assert tokens is not None
    try:
        return AccessInterceptor(tokens, "", open_health=True).admit(METHOD, [shown], None).name  # type: ignore[arg-type]
    except SluiceError:
        return ""


def shown(peer_token: str = "", peer_file: Path | None = None) -> ShownTokens:
    tokens = shown_tokens(SecretStr(peer_token), peer_file)
    assert tokens is not None
    return tokens


def test_without_settings_nothing_is_checked_and_nothing_shown() -> None:
    assert accepted_tokens(NONE, None) is None
    assert shown_tokens(NONE, None) is None


def test_accepted_tokens_rotate_by_file(tmp_path: Path, impatient: None) -> None:
    path = accept(tmp_path / "tokens", "old gateway")
    tokens = accepted_tokens(NONE, path)
    assert [caller_of(tokens, f"Bearer {token}") for token in ("old", "new")] == ["gateway", ""]
    accept(path, "old gateway", "new gateway")
    assert [caller_of(tokens, f"Bearer {token}") for token in ("old", "new")] == ["gateway", "gateway"]
    accept(path, "new gateway")
    assert [caller_of(tokens, f"Bearer {token}") for token in ("old", "new")] == ["", "gateway"]


def test_a_file_that_vanishes_or_is_emptied_neither_opens_the_door_nor_locks_it(
    tmp_path: Path, impatient: None
) -> None:
    path = accept(tmp_path / "tokens", "old gateway")
    tokens = accepted_tokens(NONE, path)
    replace(path, "\n")
    assert caller_of(tokens, "Bearer old") == "gateway"
    path.unlink()
    assert caller_of(tokens, "Bearer old") == "gateway"
    accept(path, "new gateway")
    assert (caller_of(tokens, "Bearer old"), caller_of(tokens, "Bearer new")) == ("", "gateway")


@pytest.mark.parametrize("content", [None, "", "\n \n", "# only a comment\n"])
def test_empty_token_file_prevents_the_start(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "tokens"
    if content is not None:
        path.write_text(content)
    for read in (lambda: accepted_tokens(NONE, path), lambda: shown(peer_file=path)):
        with raises_error(kind=ErrorKind.FAILED_PRECONDITION) as caught:
            read()
        assert str(path) in caught.value.message


def test_a_service_is_shown_the_first_token_that_is_for_it(tmp_path: Path, impatient: None) -> None:
    path = tmp_path / "shown"
    replace(path, "# made by sluice tokens\nfor-all worker\nfor-one worker/w1\nfor-router router\nlater router\n")
    tokens = shown(peer_file=path)
    assert [tokens(callee) for callee in ("worker", "worker/w1", "worker/w2", "router", "preprocess")] == [
        "for-all",
        "for-one",
        "for-all",
        "for-router",
        "",
    ]
    replace(path, "other worker\n")
    assert (tokens("worker/w1"), tokens("router")) == ("other", "")


def test_token_of_the_setting_precedes_those_of_the_file(tmp_path: Path) -> None:
    peers = tmp_path / "peers"
    replace(peers, "a router\nb worker")
    tokens = shown("c worker", peers)
    assert (tokens("router"), tokens("worker")) == ("a", "c")


@pytest.mark.parametrize("line", ["hush", "hush everything", "hush worker/", "hush router worker", "hush scheduler"])
def test_a_token_that_is_not_for_one_service_is_refused_without_being_repeated(tmp_path: Path, line: str) -> None:
    path = tmp_path / "shown"
    path.write_text(f"fine router\n{line}\n")
    ways: tuple[Callable[[], ShownTokens], ...] = (
        lambda: shown(peer_file=path),
        lambda: shown(f"fine router\n{line}"),
    )
    for read in ways:
        with raises_error(match="Line 2 of the peer token", kind=ErrorKind.FAILED_PRECONDITION) as refused:
            read()
        assert "hush" not in refused.value.message


@pytest.mark.parametrize("token", ["gööd", "a\x07b", "\u200bzero"])
def test_a_token_that_no_header_can_carry_is_refused(token: str) -> None:
    with pytest.raises(SluiceError, match="characters that cannot be sent"):
        shown(f"{token} router")


@pytest.mark.parametrize(
    ("value", "valid"),
    [
        ("Bearer good", True),
        ("bearer other", True),
        ("Bearer goo", False),
        ("Bearer good ", False),
        ("Bearer ", False),
        ("good", False),
        ("Basic good", False),
        (b"Bearer good", True),
        ("Bearer gööd", False),
        (f"Bearer {digest_of('good')}", False),
    ],
)
def test_only_whole_tokens_are_valid(tmp_path: Path, value: str | bytes, valid: bool) -> None:
    tokens = accepted_tokens(NONE, accept(tmp_path / "tokens", "good gateway", "other router"))
    assert bool(caller_of(tokens, value)) is valid or value == "bearer other"  # a router may not list workers
    assert caller_of(tokens, "Bearer good") == "gateway"


def test_a_token_of_the_command_line_is_good_for_every_call(tmp_path: Path) -> None:
    tokens = accepted_tokens(SecretStr("right"), accept(tmp_path / "tokens", "w worker"))
    assert tokens is not None
    assert caller_of(tokens, "Bearer right") == "operator"
    interceptor = AccessInterceptor(tokens, "", open_health=True)
    attach = interceptor.admit("/sluice.v1.Router/Attach", ["Bearer w"], None)  # type: ignore[arg-type]
    assert attach == Caller("worker", proof=f"token {digest_of('w')[7:19]}")


async def test_a_channel_shows_its_token_beside_other_metadata() -> None:
    seen: list[Any] = []

    class FakeChannel:
        def unary_unary(self, method: str) -> Any:
            return lambda request, *, timeout, metadata: seen.append((method, request, timeout, metadata))

    tokens = iter(["first", "second", ""])
    call = BearerChannel(FakeChannel(), lambda: next(tokens)).unary_unary("/m")  # type: ignore[arg-type]
    call(1, timeout=2, metadata=None)
    call(1, timeout=2, metadata=(("k", "v"),))
    call(1, timeout=2, metadata=(("k", "v"),))
    assert seen == [
        ("/m", 1, 2, (("authorization", "Bearer first"),)),
        ("/m", 1, 2, (("k", "v"), ("authorization", "Bearer second"))),
        ("/m", 1, 2, (("k", "v"),)),
    ]


EVERY_RPC = {
    f"{service.name}/{method.name}": f"/{service.full_name}/{method.name}"
    for module in (preprocess_pb2, router_pb2, postprocess_pb2, worker_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}


def allowed(caller: str) -> set[str]:
    return {name for name, path in EVERY_RPC.items() if may_call(caller, path)}


def accepted(path: Path) -> list[AcceptedToken]:
    tokens = accepted_tokens(NONE, path)
    assert tokens is not None
    return list(tokens())


def test_each_service_may_call_what_the_design_has_it_call() -> None:
    assert allowed("operator") == set(EVERY_RPC)
    assert allowed("worker") == {"Router/Attach"}
    assert allowed("router") == {"Preprocess/Tokenize", "Preprocess/Session"}
    learning = {"Router/ListWorkers", "Router/WatchWorkers", "Worker/GetInfo", "Worker/GetTokenizer"}
    assert allowed("preprocess") == allowed("postprocess") == learning
    assert set(EVERY_RPC) - allowed("gateway") == {"Router/Attach", "Router/DumpIndex", "Worker/Control"}
    assert allowed("scheduler") == allowed("gateway")
    assert allowed("unlisted") == set()


def test_what_is_no_service_of_the_suite_is_open_to_every_caller() -> None:
    for caller in CALLERS:
        assert may_call(caller, "/grpc.health.v1.Health/Check")


def test_a_file_holds_digests_and_whose_they_are(tmp_path: Path) -> None:
    path = accept(tmp_path / "tokens", "one gateway", "two worker", "three worker/w1")
    found = accepted(path)
    assert [token.caller.name for token in found] == ["gateway", "worker", "worker/w1"]
    assert f"sha256:{found[0].digest.hex()}" == digest_of("one")


def test_worker_may_register_only_its_id(tmp_path: Path) -> None:
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
    path.write_text(f"{digest_of('better')} gateway\nworse unknown\n")
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


async def test_each_service_receives_its_token(tmp_path: Path) -> None:
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
    special = channel_credentials(WorkerSettings(peer_token_file=path, peer_token=SecretStr("special router")))
    assert special is not None
    async with open_channel("127.0.0.1:1", special, callee="router") as channel:
        assert channel._token() == "special"  # type: ignore[attr-defined]

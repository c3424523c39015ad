"""Tokens: where they come from, how they rotate, which one a service shows to which other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from services.common.errors import ErrorKind, SluiceError
from services.common.rpc.auth_interceptor import AccessInterceptor
from services.common.rpc.bearer_channel import BearerChannel
from services.common.security import file_watcher as watched
from services.common.security.bearer_tokens import AcceptedTokens, ShownTokens, accepted_tokens, digest_of, shown_tokens
from services.common.security.identity import Caller
from tests.support.data.tokens import accept, replace

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


def shown(peer_token: str = "", peer_file: Path | None = None, router_file: Path | None = None) -> ShownTokens:
    tokens = shown_tokens(SecretStr(peer_token), peer_file, NONE, router_file)
    assert tokens is not None
    return tokens


def test_without_settings_nothing_is_checked_and_nothing_shown() -> None:
    assert accepted_tokens(NONE, None) is None
    assert shown_tokens(NONE, None, NONE, None) is None


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
def test_a_service_does_not_start_with_no_token_where_it_was_told_of_a_file(
    tmp_path: Path, content: str | None
) -> None:
    path = tmp_path / "tokens"
    if content is not None:
        path.write_text(content)
    for read in (lambda: accepted_tokens(NONE, path), lambda: shown(peer_file=path), lambda: shown(router_file=path)):
        with pytest.raises(SluiceError) as caught:
            read()
        assert caught.value.kind is ErrorKind.FAILED_PRECONDITION
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


def test_the_routers_own_token_counts_before_that_of_the_file_for_all(tmp_path: Path, impatient: None) -> None:
    router, peers = tmp_path / "router", tmp_path / "peers"
    replace(router, "one\ntwo")
    replace(peers, "a router\nb worker")
    tokens = shown(peer_file=peers, router_file=router)
    assert (tokens("router"), tokens("worker")) == ("one", "b")
    replace(router, "three")
    assert tokens("router") == "three"
    fixed = shown_tokens(SecretStr("c worker"), peers, SecretStr("mine"), router)
    assert fixed is not None
    assert (fixed("router"), fixed("worker")) == ("mine", "c")


@pytest.mark.parametrize("line", ["hush", "hush everything", "hush worker/", "hush router worker", "hush scheduler"])
def test_a_token_that_is_not_for_one_service_is_refused_without_being_repeated(tmp_path: Path, line: str) -> None:
    path = tmp_path / "shown"
    path.write_text(f"fine router\n{line}\n")
    for read in (lambda: shown(peer_file=path), lambda: shown(f"fine router\n{line}")):
        with pytest.raises(SluiceError, match="Line 2 of the peer token") as refused:
            read()
        assert refused.value.kind is ErrorKind.FAILED_PRECONDITION
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

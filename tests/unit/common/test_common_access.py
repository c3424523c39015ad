"""Tokens: where they come from, how they rotate, what is shown."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from services.common import watched
from services.common.access import RouterTokenSettings, TokenInterceptor, shown_token
from services.common.bearer import BearerChannel
from services.common.errors import ErrorKind, SluiceError
from services.common.tokens import Token, TokenFile, tokens_of

NONE = SecretStr("")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched, "LOOK_EVERY_S", 0.0)


def write(path: Path, text: str) -> None:
    """As secrets are replaced: another file under the same name."""
    fresh = path.with_suffix(".new")
    fresh.write_text(text, "utf-8")
    os.replace(fresh, path)


def secrets(file: TokenFile) -> tuple[str, ...]:
    return tuple(token.secret for token in file.tokens)


def test_no_settings_no_check() -> None:
    assert tokens_of(NONE, None) is None
    assert shown_token(RouterTokenSettings()) is None


def test_tokens_rotate_by_file(tmp_path: Path, impatient: None) -> None:
    path = tmp_path / "tokens"
    write(path, "old\n\n  spaced  \n")
    file = TokenFile(path)
    assert secrets(file) == ("old", "spaced")
    write(path, "old\nnew\n")
    assert secrets(file) == ("old", "new")
    write(path, "new\n")
    assert secrets(file) == ("new",)


def test_a_file_that_vanishes_or_is_emptied_neither_opens_the_door_nor_locks_it(
    tmp_path: Path, impatient: None
) -> None:
    path = tmp_path / "tokens"
    write(path, "old")
    file = TokenFile(path)
    write(path, "\n")
    assert secrets(file) == ("old",)
    path.unlink()
    assert secrets(file) == ("old",)
    write(path, "new")
    assert secrets(file) == ("new",)


@pytest.mark.parametrize("content", [None, "", "\n \n"])
def test_a_service_does_not_start_with_no_token_where_it_was_told_of_a_file(
    tmp_path: Path, content: str | None
) -> None:
    path = tmp_path / "tokens"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SluiceError) as caught:
        tokens_of(NONE, path)
    assert caught.value.kind is ErrorKind.FAILED_PRECONDITION
    assert str(path) in caught.value.message


def test_a_client_shows_the_first_token(tmp_path: Path, impatient: None) -> None:
    path = tmp_path / "token"
    write(path, "one\ntwo")
    shown = shown_token(RouterTokenSettings(router_token_file=path))
    assert shown is not None
    assert shown() == "one"
    write(path, "three")
    assert shown() == "three"
    fixed = shown_token(RouterTokenSettings(router_token=SecretStr("mine"), router_token_file=path))
    assert fixed is not None
    assert fixed() == "mine"


@pytest.mark.parametrize(
    ("shown", "valid"),
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
    ],
)
def test_only_whole_tokens_are_valid(shown: str | bytes, valid: bool) -> None:
    interceptor = TokenInterceptor(lambda: (Token("good"), Token("other")), open_health=True)
    assert (interceptor._find(shown) is not None) is valid


async def test_a_channel_shows_its_token_beside_other_metadata() -> None:
    seen: list[Any] = []

    class FakeChannel:
        def unary_unary(self, method: str) -> Any:
            return lambda request, *, timeout, metadata: seen.append((method, request, timeout, metadata))

    tokens = iter(["first", "second"])
    call = BearerChannel(FakeChannel(), lambda: next(tokens)).unary_unary("/m")  # type: ignore[arg-type]
    call(1, timeout=2, metadata=None)
    call(1, timeout=2, metadata=(("k", "v"),))
    assert seen == [
        ("/m", 1, 2, (("authorization", "Bearer first"),)),
        ("/m", 1, 2, (("k", "v"), ("authorization", "Bearer second"))),
    ]

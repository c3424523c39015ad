"""Which service may call what, and token files that say whose a token is."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
from pydantic import SecretStr

from services.common import watched
from services.common.access import TokenInterceptor
from services.common.callers import may_call
from services.common.channels import open_channel
from services.common.errors import SluiceError
from services.common.peers import PeerCredentials
from services.common.settings import ServiceSettings
from services.common.tls import channel_credentials
from services.common.tokens import CALLERS, Token, TokenFile, first_token
from sluice.v1 import postprocess_pb2, preprocess_pb2, router_pb2, worker_pb2

EVERY_RPC = {
    f"{service.name}/{method.name}": f"/{service.full_name}/{method.name}"
    for module in (preprocess_pb2, router_pb2, postprocess_pb2, worker_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}


def allowed(caller: str) -> set[str]:
    return {name for name, path in EVERY_RPC.items() if may_call(caller, path)}


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


def test_a_file_says_whose_a_token_is(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text("one gateway\ntwo\n\n three\tworker \n")
    found = TokenFile(path).tokens
    assert [(token.secret, token.caller) for token in found] == [("one", "gateway"), ("two", ""), ("three", "worker")]


@pytest.mark.parametrize("line", ["hush stranger", "hush gateway worker", "hush gate way"])
def test_a_line_that_is_none_is_named_without_its_secret(tmp_path: Path, line: str) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"fine gateway\n{line}\n")
    with pytest.raises(SluiceError, match="Line 2 of the token file") as refused:
        TokenFile(path)
    assert "hush" not in refused.value.message


def test_a_bad_line_that_comes_later_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched, "LOOK_EVERY_S", 0.0)
    path = tmp_path / "tokens"
    path.write_text("good gateway")
    file = TokenFile(path)
    path.write_text("better gateway\nworse nobody\n")
    assert [token.secret for token in file.tokens] == ["good"]


def test_no_representation_shows_a_secret() -> None:
    token = Token("hush", "gateway")
    assert "hush" not in repr(token)
    assert token.digest.hex() not in repr(token)
    settings = ServiceSettings(peer_token=SecretStr("hush"))
    assert "hush" not in repr(settings)


async def test_the_interceptor_refuses_by_caller() -> None:
    interceptor = TokenInterceptor(lambda: (Token("w", "worker"), Token("any")), open_health=True)
    handler = grpc.unary_unary_rpc_method_handler(lambda request, context: None)

    async def served(token: str, method: str) -> bool:
        class Details:
            invocation_metadata = (("authorization", f"Bearer {token}"),)

        async def continuation(details: object) -> object:
            return handler

        details = Details()
        details.method = method  # type: ignore[attr-defined]
        return await interceptor.intercept_service(continuation, details) is handler  # type: ignore[arg-type]

    assert await served("w", EVERY_RPC["Router/Attach"])
    assert not await served("w", EVERY_RPC["Router/RouteQuery"])
    assert await served("any", EVERY_RPC["Router/RouteQuery"])
    assert not await served("wrong", EVERY_RPC["Router/Attach"])


async def test_a_service_shows_one_token_to_all_unless_it_has_one_for_the_router(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("mine")
    credentials = channel_credentials(ServiceSettings(peer_token_file=path))
    assert isinstance(credentials, PeerCredentials)
    assert credentials.tls is None
    assert credentials.token is not None
    assert credentials.token() == "mine"
    async with open_channel("127.0.0.1:1", credentials) as channel:
        assert channel._token() == "mine"  # type: ignore[attr-defined]
    special = first_token(SecretStr("special"), None)
    async with open_channel("127.0.0.1:1", credentials, token=special) as channel:
        assert channel._token() == "special"  # type: ignore[attr-defined]

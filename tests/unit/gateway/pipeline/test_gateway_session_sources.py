"""How requests get their sessions: which source counts, whose they are, and what the setting takes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from services.gateway.admission.keys import create
from services.gateway.admission.permit import Permit
from services.gateway.core import context
from services.gateway.core.context import NO_CONTEXT, RequestContext
from services.gateway.pipeline import session_affinity as sessions
from services.gateway.settings import GatewaySettings
from services.router.state.store.session_affinity import MAX_ID_LENGTH
from tests.support.oracles.errors import raises_error


@pytest.fixture(autouse=True)
def reset_context() -> Iterator[None]:
    yield
    context.enter(NO_CONTEXT)


def session(sources: tuple[str, ...] = sessions.SOURCES, header: str = "", **fields: str | None) -> str:
    sessions.enter_session(sources, {"x-session-id": header} if header else {}, fields)
    return context.current().session_id


def test_session_is_a_short_digest_of_the_first_source_that_is_sent() -> None:
    by_header = session(header="a", user="b")
    assert by_header == session(header="a", user="c") == session(header="a")
    assert session(prompt_cache_key="", user="b") == session(prompt_cache_key=None, user="b")
    assert len({by_header, session(prompt_cache_key="a"), session(user="a"), session(header="b")}) == 4
    assert len(by_header) == 32 < MAX_ID_LENGTH
    assert session(("user", "x-session-id"), header="a", user="b") == session(user="b")


def test_request_without_a_source_has_no_session() -> None:
    assert session(header="a")
    assert session() == ""
    assert session((), header="a", user="b", prompt_cache_key="c") == ""
    assert session(("x-session-id",), user="b") == ""


def test_sessions_of_two_tenants_differ_and_no_join_of_parts_makes_them_equal() -> None:
    found = set()
    for tenant in ("", "", "x", "xa"):  # a key without a tenant is a tenant of its own
        _, key = create("key", tenant=tenant)
        context.enter(RequestContext(Permit(key, "", None, None)))
        found |= {session(header="a"), session(header=f"{key.owner}a"), session(user=f"a{key.owner}")}
    assert len(found) == 12


def test_keys_of_one_tenant_share_its_sessions() -> None:
    found = set()
    for name in ("one", "two"):
        _, key = create(name, tenant="shop")
        context.enter(RequestContext(Permit(key, "", None, None)))
        found.add(session(header="a"))
    assert len(found) == 1


def test_any_text_can_name_a_session_up_to_its_limit() -> None:
    assert session(header="ÿ" * 512)
    assert session(user="\ud800")
    with raises_error(param="user") as refused:
        session(user="x" * 513)
    assert "512" in refused.value.message


def test_setting_takes_known_sources_in_an_order_or_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert GatewaySettings.load(["--session-sources", "user,x-session-id"]).session_sources == ["user", "x-session-id"]
    assert GatewaySettings.load(["--session-sources", ""]).session_sources == []
    with pytest.raises(SystemExit):
        GatewaySettings.load(["--session-sources", "cookie"])
    assert "prompt_cache_key" in capsys.readouterr().err

"""What the doctor makes of what servers say of themselves."""

from __future__ import annotations

from typing import cast

import pytest

from sluice import __version__
from sluice.cli.doctor import servers as server_checks
from sluice.cli.doctor.checks import _services
from sluice.cli.doctor.finding import Finding, State
from sluice.cli.doctor.servers import Server
from sluice.cli.live.client import Running, Seen
from sluice.cli.live.endpoint import Endpoint

WELL = Seen("SERVING", __version__, 0.01)


class Asked:
    """Stands for a running suite: every server says what is given."""

    def __init__(self, said: dict[str, Seen]) -> None:
        self.endpoint = Endpoint()
        self._said = said

    async def status_of(self, address: str) -> Seen:
        return self._said[address]


async def examined(said: dict[str, Seen], draining: bool = False) -> list[Finding]:
    servers = [Server(f"s{number}", address, draining) for number, address in enumerate(said)]
    return await server_checks.examine(cast(Running, Asked(said)), servers)


async def test_servers_that_are_well_are_one_finding_each_and_one_for_their_clocks() -> None:
    found = await examined({"h:1": WELL, "h:2": WELL})
    assert [one.check for one in found] == ["s0 h:1", "s1 h:2", "clocks"]
    assert {one.state for one in found} == {State.OK}
    assert "2 services" in found[-1].found


@pytest.mark.parametrize(
    ("seen", "state", "said"),
    [
        (Seen("UNREACHABLE"), State.WARN, "cannot be reached"),
        (Seen("NOT_SERVING", __version__, 0), State.FAIL, "NOT_SERVING"),
        (Seen("UNAUTHENTICATED"), State.FAIL, "UNAUTHENTICATED"),
        (Seen("SERVING", "9.9", 0), State.WARN, "version 9.9"),
        (Seen("SERVING"), State.WARN, "version unknown"),
    ],
)
async def test_a_server_that_is_not_well(seen: Seen, state: State, said: str) -> None:
    found = (await examined({"h:1": seen}))[0]
    assert found.state is state
    assert said in found.found
    assert found.advice


async def test_a_clock_that_is_wrong_is_named() -> None:
    found = await examined({"h:1": WELL, "h:2": Seen("SERVING", __version__, -90.0)})
    assert [(one.check, one.state) for one in found[2:]] == [("clock of s1 h:2", State.FAIL)]
    assert "90.0 s behind" in found[2].found
    assert "NTP" in found[2].advice


async def test_a_worker_that_drains_is_no_fault() -> None:
    (found, _) = await examined({"h:1": Seen("NOT_SERVING", __version__, 0.0)}, draining=True)
    assert (found.state, found.found) == (State.WARN, "is draining")


def test_addresses_that_nobody_serves_are_named() -> None:
    node = {"serving": ["h:1"], "away": ["h:2", "typo:50051"], "troubled": 0}
    state = {"version": __version__, "unix_ms": 0, "answered_unix_ms": 0, "nodes": {"router": node}, "degraded": {}}
    found, servers = _services(state)
    assert servers == [Server("router", "h:1")]
    wrong = [one for one in found if one.advice]
    assert [one.check for one in wrong] == ["router h:2", "router typo:50051"]
    assert {one.state for one in wrong} == {State.WARN}

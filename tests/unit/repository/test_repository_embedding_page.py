"""docs/embedding-the-router.md shows the example as it is, and names RPCs, fields and methods that exist."""

from __future__ import annotations

import re

from sluice_client import Reservation, RouterClient

from sluice.v1 import router_pb2
from tests.support.repository import ROOT

PAGE = (ROOT / "docs/embedding-the-router.md").read_text()


def test_page_shows_the_code_of_the_example() -> None:
    (shown,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert shown in (ROOT / "examples/scheduler/scheduler.py").read_text()
    for call in ("query_prefill", "query_decode", "add_request", "mark_prefill_complete", "free_request"):
        assert f"async def {call}(" in shown


def test_page_maps_every_call_to_something_that_exists() -> None:
    table = PAGE.partition("| call | RPC |")[2].partition("\n\n")[0]
    calls = re.findall(r"^\| `(\w+)`", table, re.MULTILINE)
    assert calls == [
        "create", "query_prefill", "query_decode", "is_disaggregated",
        "add_request", "mark_prefill_complete", "free_request",
    ]  # fmt: skip
    rpcs = router_pb2.DESCRIPTOR.services_by_name["Router"].methods_by_name
    for name in ("RouteQuery", "AddRequest", "MarkPrefillComplete", "FreeRequest"):
        assert f"`{name}`" in table
        assert name in rpcs
    for method in re.findall(r"`router\.(\w+)\(", table):
        assert hasattr(RouterClient, method)
    for method in re.findall(r"`reservation\.(\w+)\(", table):
        assert hasattr(Reservation, method)
    answer = router_pb2.RouteQueryResponse.DESCRIPTOR.fields_by_name
    assert {"prefill", "decode", "token_ids", "block_hashes", "hash_scheme", "block_size"} <= set(answer)

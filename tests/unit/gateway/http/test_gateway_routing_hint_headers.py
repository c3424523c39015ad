"""Where requests run, in the headers of several schedulers and in nvext."""

from __future__ import annotations

import pytest

from services.common.errors import SluiceError
from services.common.packing import pack_u32
from services.gateway.apis.openai.schemas import CompletionRequest
from services.gateway.apis.openai.validation import check
from services.gateway.core import routing_hints as hints
from services.gateway.core.routing_hints import RoutingHints
from services.gateway.http.middleware.routing_hints import of_headers
from tests.support.data.bodies import BUDGETS


@pytest.mark.parametrize(
    ("headers", "workers", "prefill"),
    [
        ({"x-sluice-worker": "a, b"}, ("a", "b"), ()),
        ({"x-dynamo-worker-instance-id": "7", "x-dynamo-prefill-instance-id": "8"}, ("7",), ("8",)),
        ({"x-worker-instance-id": "7", "x-prefill-instance-id": "8"}, ("7",), ("8",)),
        ({"x-gateway-destination-endpoint": "1.2.3.4:5,1.2.3.5:5"}, ("1.2.3.4:5", "1.2.3.5:5"), ()),
        ({"x-data-parallel-host-port": "a:5", "x-prefiller-host-port": "b:5"}, ("a:5",), ("b:5",)),
        ({"x-sluice-worker": "a", "x-dynamo-worker-instance-id": "b"}, ("a",), ()),
        ({"x-sluice-worker": "a", "x-gateway-destination-endpoint": "c:1"}, ("a",), ()),
    ],
)  # fmt: skip
def test_every_schedulers_headers(headers: dict[str, str], workers: tuple[str, ...], prefill: tuple[str, ...]) -> None:
    said = of_headers(headers)
    assert (said.answering, said.prefill) == (workers, prefill)


def test_ranks_and_subsets() -> None:
    said = of_headers({"x-dynamo-dp-rank": "3", "x-prefill-dp-rank": "1"})
    assert (said.rank, said.prefill_rank, said.subset) == (3, 1, None)
    assert of_headers({"x-gateway-destination-endpoint-subset": ""}).subset == ()
    assert of_headers({"x-gateway-destination-endpoint-subset": "a:1,b:2"}).subset == ("a:1", "b:2")
    for wrong in ("-1", "x", "99999999", "²"):
        with pytest.raises(SluiceError, match="x-dp-rank"):
            of_headers({"x-dp-rank": wrong})


def test_a_rank_in_the_body_is_that_of_whichever_worker_is_named() -> None:
    for headers, rank in (({"x-sluice-worker": "a"}, 3), ({"x-sluice-worker": "a", "x-data-parallel-rank": "1"}, 1)):
        hints.begin(of_headers(headers))
        hints.at_rank(3)
        assert (hints.current().workers, hints.current().rank) == (("a",), rank)
    hints.begin(hints.NO_HINTS)


def test_who_is_allowed() -> None:
    subset = RoutingHints(subset=("a:1",))
    assert subset.allows("w", "a:1", False)
    assert not subset.allows("w", "b:1", False)
    assert not RoutingHints(subset=()).allows("w", "a:1", False)
    named = RoutingHints(workers=("w",), prefill=("p",))
    assert named.allows("w", "a:1", False)
    assert not named.allows("w", "a:1", True)
    assert named.allows("p", "a:2", True)
    assert RoutingHints(workers=("w",)).allows("any", "a:3", True)
    # A scheduler in front of gateways names the gateway there.
    assert RoutingHints(endpoints=("gateway:8000",)).allows("w", "a:1", False)


def nvext(**fields: object) -> RoutingHints:
    found = check(CompletionRequest, {"model": "m", "prompt": "x", "nvext": fields}, BUDGETS).nvext
    assert found is not None
    return found.hints()


def test_headers_come_before_nvext() -> None:
    body = nvext(backend_instance_id=7, prefill_worker_id="p", token_data=[1, 2], annotations=["query_instance_id:"])
    assert body == RoutingHints(("7",), (), ("p",), token_ids=pack_u32([1, 2]), query_only=True)
    both = of_headers({"x-sluice-worker": "h"}).over(body)
    assert (both.workers, both.prefill, both.token_ids, both.query_only) == (("h",), ("p",), pack_u32([1, 2]), True)
    assert of_headers({"x-gateway-destination-endpoint": "e:1"}).over(body).answering == ("e:1",)
    assert nvext(decode_worker_id="d", backend_instance_id="b").workers == ("d",)


@pytest.mark.parametrize(
    "fields",
    [{"unknown": 1}, {"annotations": ["other"]}, {"token_data": []}, {"token_data": [-1]}, {"decode_worker_id": ""},
     {"backend_instance_id": -1}, {"prefill_worker_id": 1.5}],
)  # fmt: skip
def test_nvext_is_checked(fields: dict[str, object]) -> None:
    with pytest.raises(SluiceError) as refused:
        nvext(**fields)
    assert refused.value.param.startswith("nvext")

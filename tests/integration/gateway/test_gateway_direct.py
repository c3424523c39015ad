"""Requests that say which worker runs them, and requests that only ask."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from services.common.base.errors import ErrorKind, SluiceError
from services.common.base.packing import pack_u32, unpack_u32
from services.gateway.backends.placement.direct import NEXT_NAMED_WORKER
from services.gateway.core import context
from services.gateway.core.context import NO_CONTEXT, RequestContext
from services.gateway.core.routing_hints import RoutingHints
from services.gateway.pipeline.config import PipelineConfig
from services.worker.engines.mock.vocabulary import load_vocabulary
from tests.support.servers.survival import asking, staged

DIRECT = PipelineConfig(routing="direct", migration=False)
REQUEST = asking("r", "Tell me of rivers.")


@pytest.fixture(autouse=True)
def undirected() -> None:
    context.enter(NO_CONTEXT)


async def test_the_worker_that_is_named_runs_it_by_id_or_address(folder: Path) -> None:
    async with staged(folder, workers=3, config=DIRECT) as stage:
        address = stage.pipeline.registry.workers["w2"].address
        for number, name in ((0, "w0"), (1, "w1"), (2, address)):
            context.enter(RequestContext(hints=RoutingHints(workers=("gone", name))))
            stage.knives[number].set(3)  # the worker that runs it is cut
            heard = await stage.ask(REQUEST)
            assert heard.error is not None
            assert heard.error.kind is ErrorKind.DISCONNECTED
            assert stage.knives[number].cuts == 1
        assert stage.reservations.made == 0
        await stage.quiet()


async def test_direct_request_whose_first_worker_is_unknown_runs_on_the_next_named_one(folder: Path) -> None:
    async with staged(folder, workers=2, config=DIRECT) as stage:
        for names, degraded in ((("gone", "w1"), (NEXT_NAMED_WORKER,)), (("w1", "gone"), ())):
            # Rank 5 is one of the worker named first; w1 has a single rank.
            context.enter(RequestContext(hints=RoutingHints(workers=names, rank=0 if names[0] == "w1" else 5)))
            heard = await stage.ask(REQUEST)
            assert heard.error is None
            assert heard.finish is not None
            assert heard.finish.degraded == degraded
        await stage.quiet()


async def test_pairs_are_named_too(folder: Path) -> None:
    async with staged(folder, roles=("prefill", "prefill", "decode"), config=DIRECT) as stage:
        context.enter(RequestContext(hints=RoutingHints(workers=("w2",))))
        told = await stage.ask(REQUEST)
        context.enter(RequestContext(hints=RoutingHints(workers=("w2",), prefill=("w1",))))
        heard = await stage.ask(REQUEST)
        assert heard.text == told.text
        assert heard.finish is not None
        assert not heard.finish.degraded
        stage.knives[1].set(0)
        heard = await stage.ask(REQUEST)
        assert stage.knives[1].cuts == 1
        assert heard.text == told.text
        await stage.quiet()


@pytest.mark.parametrize(
    ("said", "kind", "code"),
    [
        (RoutingHints(), ErrorKind.INVALID_ARGUMENT, "no_worker_named"),
        (RoutingHints(workers=("w9",)), ErrorKind.UNAVAILABLE, "worker_not_found"),
        (RoutingHints(workers=("w0",)), ErrorKind.INVALID_ARGUMENT, "wrong_role"),
        (RoutingHints(workers=("w1",), prefill=("w1",)), ErrorKind.INVALID_ARGUMENT, "wrong_role"),
        (RoutingHints(workers=("w2",), prefill=("w0",)), ErrorKind.INVALID_ARGUMENT, "wrong_role"),
        (RoutingHints(workers=("w1",), prefill=("w9",)), ErrorKind.UNAVAILABLE, "worker_not_found"),
    ],
)
async def test_what_cannot_be_is_refused(folder: Path, said: RoutingHints, kind: ErrorKind, code: str) -> None:
    async with staged(folder, roles=("prefill", "decode", "aggregated"), config=DIRECT) as stage:
        context.enter(RequestContext(hints=said))
        with pytest.raises(SluiceError) as refused:
            await stage.ask(REQUEST)
        assert (refused.value.kind, refused.value.code) == (kind, code)
        await stage.quiet()


async def test_named_pair_of_two_versions_is_refused(folder: Path) -> None:
    async with staged(folder, roles=("prefill", "decode"), config=DIRECT) as stage:
        workers = stage.pipeline.registry.workers
        for name, version in (("w0", "1"), ("w1", "2")):
            workers[name] = replace(workers[name], engine="vllm", engine_version=version)
        context.enter(RequestContext(hints=RoutingHints(workers=("w1",), prefill=("w0",))))
        with pytest.raises(SluiceError, match="runs vllm 1 and cannot hand over to w1, which runs vllm 2") as refused:
            await stage.ask(REQUEST)
        assert (refused.value.http_status, refused.value.code) == (400, "wrong_role")
        await stage.quiet()


async def test_prefill_worker_where_no_pair_can_run_is_rejected_by_its_header(folder: Path) -> None:
    config = PipelineConfig(routing="direct", migration=False, disaggregation="off")
    async with staged(folder, roles=("prefill", "decode"), config=config) as stage:
        context.enter(RequestContext(hints=RoutingHints(workers=("w1",), prefill=("w0",))))
        with pytest.raises(SluiceError) as refused:
            await stage.ask(REQUEST)
        error = refused.value
        assert (error.http_status, error.code, error.param) == (400, "not_disaggregated", "x-sluice-prefill-worker")
        await stage.quiet()


async def test_with_a_router_names_and_subsets_limit_its_choice(folder: Path) -> None:
    async with staged(folder, workers=3) as stage:
        context.enter(RequestContext(hints=RoutingHints(workers=("w1",))))
        _, route = await stage.pipeline.query(REQUEST)
        assert route.worker_id == "w1"
        context.enter(RequestContext(hints=RoutingHints(subset=(stage.pipeline.registry.workers["w2"].address,))))
        await stage.ask(REQUEST)
        assert stage.reservations.last == ("", "w2")
        for said, code in (
            (RoutingHints(subset=()), "no_workers"),
            (RoutingHints(subset=("other:1",)), "no_workers"),
            (RoutingHints(workers=("w9",)), "worker_not_found"),
        ):
            context.enter(RequestContext(hints=said))
            with pytest.raises(SluiceError) as refused:
                await stage.ask(REQUEST)
            assert refused.value.code == code
        await stage.quiet()


async def test_ids_in_place_of_the_prompt(folder: Path) -> None:
    ids = load_vocabulary(folder, "hf").encode("Tell me of gates.")
    async with staged(folder, workers=1) as stage:
        told = await stage.ask(asking("g", "Tell me of gates."))
        context.enter(RequestContext(hints=RoutingHints(token_ids=pack_u32(ids))))
        prompt, _ = await stage.pipeline.query(REQUEST)
        assert unpack_u32(prompt.token_ids).tolist() == list(ids)
        heard = await stage.ask(REQUEST)
        assert heard.text == told.text
        await stage.quiet()

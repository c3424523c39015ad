"""Loads of callers beside the gateways: an external scheduler that reserves, and Envoy with the endpoint picker."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import grpc

from services.common.base.packing import pack_u32
from sluice.v1 import router_pb2, router_pb2_grpc
from tests.support.clients.ext_proc import Exchange as PickerExchange
from tests.support.faults.entrances import RequestFailedError
from tests.support.faults.load import MODEL, Exchange, Load
from tests.support.faults.outcome import Answer

HELD_S = 1.0
WORK_S = 0.3
"""How long the endpoint works that was picked."""
CALL_S = 20.0
OWN = "matrix"
"""Beginning of the ids of requests that an external scheduler reserves for."""
RESERVE = router_pb2.RouteQueryRequest.MODE_SELECT_AND_RESERVE


class Reservations(Load):
    """Reserves a worker for a second and frees it, as an external scheduler does."""

    name = "route"
    about = "RouteQuery with a reservation, by an external scheduler"
    _numbers = itertools.count()

    async def ask(self, number: int, exchange: Exchange) -> Answer:
        at_one = self.entrances.at_one
        request_id = f"{OWN}-{next(self._numbers)}"
        prompt = router_pb2.PromptRef(token_ids=pack_u32(range(100 * number, 100 * number + 160)))
        asked = router_pb2.RouteQueryRequest(mode=RESERVE, request_id=request_id, model=MODEL, prompt=prompt)

        async def reserve(channel: grpc.aio.Channel) -> Any:
            return await router_pb2_grpc.RouterStub(channel).RouteQuery(asked, timeout=CALL_S)

        async def free(channel: grpc.aio.Channel) -> Any:
            ended = router_pb2.FreeRequestRequest(reservation_ids=[reserved.reservation_id])
            return await router_pb2_grpc.RouterStub(channel).FreeRequest(ended, timeout=CALL_S)

        reserved = await at_one("routers", reserve, exchange)
        exchange.heard()
        if not (reserved.decode.worker_id and reserved.reservation_id):
            raise RequestFailedError(f"reserved nothing: {reserved}")
        await asyncio.sleep(HELD_S)
        exchange.rested()
        before = exchange.retried
        freed = await at_one("routers", free, exchange)
        if freed.unknown and exchange.retried == before:  # a repeated call may meet what the first one did
            raise RequestFailedError(f"the reservation was lost: {request_id} on {reserved.decode.worker_id}")
        return Answer(("reserved and freed",))


class Picks(Load):
    """Requests that Envoy shows to the endpoint picker, and their responses."""

    name = "picker"
    about = "requests through the endpoint picker, as Envoy sends them"

    async def ask(self, number: int, exchange: Exchange) -> Answer:
        body = {"model": MODEL, "messages": [{"role": "user", "content": f"Which way is {number}?"}]}

        async def pick(channel: grpc.aio.Channel) -> Answer:
            picking = PickerExchange(channel)
            try:
                answered = await picking.request(body)
                exchange.heard()
                if answered.status or not answered.endpoints:
                    raise RequestFailedError(f"picked nothing: {answered.status} {answered.error!r}")
                await asyncio.sleep(WORK_S)
                exchange.rested()
                await picking.respond([b"data: {}\n\n"], served=answered.endpoints[0])
                await picking.end()
                return Answer(("picked",))
            except asyncio.InvalidStateError:  # sent on a stream that has ended
                raise ConnectionError("the picker's stream has ended") from None
            finally:
                picking.cut()

        return await self.entrances.at_one("pickers", pick, exchange)

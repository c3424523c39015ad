"""Measures the client: python measure.py [ROUTER MODEL] prints microseconds of CPU, best of several runs."""

from __future__ import annotations

import asyncio
import sys
import time
import timeit
from array import array
from collections.abc import Callable

from sluice_client import RouterClient, block_hashes, hashed_here, pack_u32
from sluice_client.wire import (
    Overlap,
    PromptRef,
    RouteQueryRequest,
    RouteQueryRequestMode,
    RouteQueryResponse,
    WorkerTarget,
)

TOKENS = 4_096
CALLS = 1_000


def best_us(work: Callable[[], object], number: int = 200) -> float:
    return min(timeit.repeat(work, number=number, repeat=25, timer=time.process_time)) / number * 1e6


def measure_encoding() -> None:
    ids = list(range(TOKENS))
    as_array = array("I", ids)
    packed = pack_u32(ids)

    def request() -> bytes:
        prompt = PromptRef(token_ids=packed)
        mode = RouteQueryRequestMode.SELECT_AND_RESERVE
        return bytes(RouteQueryRequest(mode=mode, request_id="req-0123456789", model="tekken", prompt=prompt))

    answer = bytes(
        RouteQueryResponse(
            decode=WorkerTarget(worker_id="worker-1", address="10.0.0.1:50051"),
            overlap=Overlap(device_blocks=12),
            tokens_to_compute=3_904,
            reservation_id="tekken:req-0123456789",
            expires_unix_ms=1_790_000_000_000,
            best_overlap_blocks=12,
        )
    )
    encoded = request()
    print(f"pack {TOKENS} ids of a list          {best_us(lambda: pack_u32(ids)):8.1f}")
    print(f"pack {TOKENS} ids of an array        {best_us(lambda: pack_u32(as_array)):8.1f}")
    print(f"build and encode RouteQueryRequest {best_us(request):8.1f}")
    print(f"decode RouteQueryRequest           {best_us(lambda: RouteQueryRequest.parse(encoded)):8.1f}")
    print(f"decode RouteQueryResponse          {best_us(lambda: RouteQueryResponse.parse(answer)):8.1f}")
    print(f"hash {TOKENS} ids in blocks of 16    {best_us(lambda: block_hashes(packed, 16)):8.1f}")


async def measure_calls(address: str, model: str) -> None:
    packed = pack_u32(range(TOKENS))
    async with RouterClient(address) as router:
        for name, prompt in (("ids", packed), ("hashes", hashed_here(packed, 16))):
            for concurrency in (1, 32):

                async def caller(prompt: PromptRef | bytes = prompt, calls: int = CALLS // concurrency) -> None:
                    for _ in range(calls):
                        await router.query(model, prompt)

                await router.query(model, prompt)
                wall, cpu = time.perf_counter(), time.process_time()
                await asyncio.gather(*(caller() for _ in range(concurrency)))
                calls = CALLS // concurrency * concurrency
                wall, cpu = (time.perf_counter() - wall) / calls, (time.process_time() - cpu) / calls
                cost = f"{wall * 1e6:.0f} per call, {cpu * 1e6:.0f} of CPU in the client"
                print(f"RouteQuery by {name}, {concurrency} concurrent: {cost}")


if __name__ == "__main__":
    measure_encoding()
    if len(sys.argv) > 2:
        asyncio.run(measure_calls(sys.argv[1], sys.argv[2]))

"""A scheduler with the six calls of third-party router libraries, on Sluice's RPCs (docs/embedding-the-router.md).

python examples/scheduler/scheduler.py ROUTER MODEL TEXT
"""

import asyncio
import json
import sys
from uuid import uuid4

from sluice_client import Reservation, RouterClient, SluiceError, WorkerClient, by_answer, by_openai_body
from sluice_client.wire import DisaggregationParams, FinishReason, PromptRef, TokenExtra, WorkerRole, WorkerTarget

MAX_TOKENS = 16


class Scheduler:
    """Offers the calls of a third-party router for one model; `create` is just RouterClient(address)."""

    def __init__(self, router: RouterClient, model: str) -> None:
        self.router = router
        self.model = model
        self._reservations: dict[str, list[Reservation]] = {}  # by request id; prefill before decode

    async def query_prefill(self, prompt: PromptRef) -> WorkerTarget | None:
        """Returns the prefill worker of a pair (RouteQuery), or None if one worker would run the whole request."""
        return (await self.router.query(self.model, prompt)).prefill

    async def query_decode(self, prompt: PromptRef, is_disaggregated: bool) -> WorkerTarget:
        """Returns the worker that would decode (RouteQuery), by load in a pair, else by cost including cache."""
        workers = await self.router.list_workers(self.model)
        alone = [worker.worker_id for worker in workers if worker.role != WorkerRole.PREFILL]
        answer = await self.router.query(self.model, prompt, candidates=None if is_disaggregated else alone)
        assert answer.decode is not None  # otherwise `query` would have raised
        return answer.decode

    async def add_request(self, request_id: str, prompt: PromptRef, *workers: WorkerTarget) -> None:
        """Reserves each worker for the part of its role (AddRequest); a pair uses two reservation ids."""
        for number, worker in enumerate(workers):
            reservation_id, rank = f"{request_id}-{number}", worker.data_parallel_rank
            self._reservations.setdefault(request_id, []).append(
                await self.router.add_request(
                    reservation_id, self.model, worker.worker_id, prompt, data_parallel_rank=rank
                )
            )

    async def mark_prefill_complete(self, request_id: str) -> None:
        """Releases the prefill load (MarkPrefillComplete); for a pair, frees the prefill worker (FreeRequest)."""
        first, *others = self._reservations[request_id]
        if others:
            await self.router.free(first.id)
        await self.router.mark_prefill_complete(*(each.id for each in others or [first]))

    async def free_request(self, request_id: str) -> None:
        """Frees the reservations (FreeRequest); those already freed count as unknown, without an error."""
        await self.router.free(*(each.id for each in self._reservations.pop(request_id, [])))


async def generate(
    scheduler: Scheduler, worker: WorkerTarget, request_id: str, ids: bytes, part: DisaggregationParams | None = None
) -> tuple[list[int], TokenExtra]:
    """Runs a request, or its prefill or decode part; returns the output token ids and the final delta's extra."""
    output: list[int] = []
    async with WorkerClient(worker.address) as client:
        async for delta in client.generate(
            request_id, scheduler.model, ids, max_tokens=MAX_TOKENS, disaggregation=part
        ):
            if delta.token_ids and not output:
                await scheduler.mark_prefill_complete(request_id)
            output += delta.token_ids
    assert delta.extra is not None  # a generation that does not complete raises
    return output, delta.extra


async def main(address: str, model: str, text: str) -> None:
    request_id = str(uuid4())
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": text}]}).encode()
    async with RouterClient(address) as router:
        scheduler = Scheduler(router, model)
        tokenized = await router.query(model, by_openai_body(body), return_token_ids=True)
        prompt = by_answer(tokenized)  # avoids tokenizing again
        prefill = await scheduler.query_prefill(prompt)
        decode = await scheduler.query_decode(prompt, is_disaggregated=prefill is not None)
        await scheduler.add_request(request_id, prompt, *((prefill, decode) if prefill else (decode,)))
        try:
            part, output = None, list[int]()
            if prefill is not None:
                begin = DisaggregationParams(role=WorkerRole.PREFILL)
                output, end = await generate(scheduler, prefill, request_id, tokenized.token_ids, begin)
                part = DisaggregationParams(role=WorkerRole.DECODE, handoff=end.handoff)
            if part is None or end.finish_reason == FinishReason.HANDOFF:
                rest, end = await generate(scheduler, decode, request_id, tokenized.token_ids, part)
                output += rest
        finally:
            await scheduler.free_request(request_id)
    print(f"prefill {prefill.worker_id if prefill else '-'}, decode {decode.worker_id}: {' '.join(map(str, output))}")


if __name__ == "__main__":
    try:
        asyncio.run(main(*sys.argv[1:]))
    except SluiceError as error:
        sys.exit(f"{error.kind.name.lower()} ({error.code}): {error.message}")

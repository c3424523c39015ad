"""A scheduler with the six calls of third-party routers on Sluice's RPCs; docs/embedding-the-router.md explains it.

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
    """A third-party router of one model. `create` is RouterClient(address): the router needs no preparation."""

    def __init__(self, router: RouterClient, model: str) -> None:
        self.router = router
        self.model = model
        self._booked: dict[str, list[Reservation]] = {}  # by request id; of a pair, the prefill worker's comes first

    async def query_prefill(self, prompt: PromptRef) -> WorkerTarget | None:
        """RouteQuery: the worker that would compute the prompt for another one; None: one worker would do it all."""
        return (await self.router.query(self.model, prompt)).prefill

    async def query_decode(self, prompt: PromptRef, is_disaggregated: bool) -> WorkerTarget:
        """RouteQuery: the worker that would answer; of a pair it is the one with the least load, else cache counts."""
        workers = await self.router.list_workers(self.model)
        alone = [worker.worker_id for worker in workers if worker.role != WorkerRole.PREFILL]
        answer = await self.router.query(self.model, prompt, candidates=None if is_disaggregated else alone)
        assert answer.decode is not None  # an answer without it would have raised
        return answer.decode

    async def add_request(self, request_id: str, prompt: PromptRef, *workers: WorkerTarget) -> None:
        """AddRequest: books the part that each worker's role plays, on a pair under two ids."""
        for number, worker in enumerate(workers):
            booking, rank = f"{request_id}-{number}", worker.data_parallel_rank
            self._booked.setdefault(request_id, []).append(
                await self.router.add_request(booking, self.model, worker.worker_id, prompt, data_parallel_rank=rank)
            )

    async def mark_prefill_complete(self, request_id: str) -> None:
        """MarkPrefillComplete; of a pair, FreeRequest of the prefill worker, which has done its part."""
        first, *others = self._booked[request_id]
        if others:
            await self.router.free(first.id)
        await self.router.mark_prefill_complete(*(each.id for each in others or [first]))

    async def free_request(self, request_id: str) -> None:
        """FreeRequest; what is free already counts as unknown and is no error."""
        await self.router.free(*(each.id for each in self._booked.pop(request_id, [])))


async def generate(
    scheduler: Scheduler, worker: WorkerTarget, request_id: str, ids: bytes, part: DisaggregationParams | None = None
) -> tuple[list[int], TokenExtra]:
    """Runs a request, or its part, on a worker; returns its token ids and how it ended."""
    output: list[int] = []
    async with WorkerClient(worker.address) as client:
        async for delta in client.generate(
            request_id, scheduler.model, ids, max_tokens=MAX_TOKENS, disaggregation=part
        ):
            if delta.token_ids and not output:
                await scheduler.mark_prefill_complete(request_id)
            output += delta.token_ids
    assert delta.extra is not None  # a generation that does not end in order raises
    return output, delta.extra


async def main(address: str, model: str, text: str) -> None:
    request_id = str(uuid4())
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": text}]}).encode()
    async with RouterClient(address) as router:
        scheduler = Scheduler(router, model)
        tokenized = await router.query(model, by_openai_body(body), return_token_ids=True)
        prompt = by_answer(tokenized)  # nothing is tokenized again
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

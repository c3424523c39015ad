"""A complete scheduler: selects and reserves a worker, runs the prompt there, and frees the reservation.

python scheduler.py ROUTER MODEL TOKEN_ID...
"""

import asyncio
import sys
from uuid import uuid4

from sluice_client import RouterClient, SluiceError, WorkerClient


async def run(router: RouterClient, model: str, prompt: list[int], max_tokens: int) -> tuple[str, list[int]]:
    """Returns the id of the worker that ran the prompt, and the generated token ids."""
    request_id = str(uuid4())
    output: list[int] = []
    async with await router.select_and_reserve(request_id, model, prompt) as reservation:
        worker = reservation.target
        async with WorkerClient(worker.address) as client:
            async for delta in client.generate(
                request_id, model, prompt, max_tokens=max_tokens, data_parallel_rank=worker.data_parallel_rank
            ):
                output += delta.token_ids
                if output:
                    await reservation.mark_prefill_complete()  # only the first call sends an RPC
    return worker.worker_id, output


async def main(address: str, model: str, *prompt: str) -> None:
    async with RouterClient(address) as router:
        worker_id, output = await run(router, model, [int(token_id) for token_id in prompt], max_tokens=16)
    print(f"{worker_id}: {' '.join(map(str, output))}")


if __name__ == "__main__":
    try:
        asyncio.run(main(*sys.argv[1:]))
    except SluiceError as error:
        sys.exit(f"{error.kind.name.lower()} ({error.code}): {error.message}")

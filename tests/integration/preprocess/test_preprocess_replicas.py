"""Replicas of preprocess under load: one that is killed loses no request."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys

from services.common.base.packing import unpack_u32
from services.common.net.ports import free_port
from services.common.rpc.replicas import ReplicaSet
from services.preprocess.contract.tokenizer import ChatRequest
from sluice.v1 import preprocess_pb2 as pb
from sluice.v1 import preprocess_pb2_grpc
from tests.support.data.loaded_tokenizers import tiny_folder, tiny_hf

REQUESTS, CONCURRENCY, KILL_AFTER = 300, 16, 80


def free_address() -> str:
    return f"127.0.0.1:{free_port()}"


async def start(address: str) -> asyncio.subprocess.Process:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SLUICE_")}
    command = ("-m", "services.preprocess", "--listen", address, "--models", f"tiny={tiny_folder()}")
    return await asyncio.create_subprocess_exec(
        sys.executable, *command, env=environment, stderr=asyncio.subprocess.DEVNULL
    )


async def test_a_tokenizer_process_killed_under_load_loses_no_request() -> None:
    addresses = [free_address(), free_address()]
    both_serve = asyncio.Event()
    processes = [await start(address) for address in addresses]
    replicas: ReplicaSet[preprocess_pb2_grpc.PreprocessAsyncStub] = ReplicaSet(
        "preprocess", addresses, preprocess_pb2_grpc.PreprocessStub, on_change=lambda: note()
    )

    def note() -> None:
        if len(replicas.serving) == 2:
            both_serve.set()

    await replicas.start()
    done: list[int] = []

    async def one(index: int) -> None:
        # Every third is large enough to be on a thread when its process dies.
        messages = [{"role": "user", "content": f"number {index} " * (2000 if index % 3 == 0 else 3)}]
        request = pb.TokenizeRequest(model="tiny", chat=pb.ChatInput(messages_json=json.dumps(messages).encode()))
        reply = await replicas.call(lambda stub: stub.Tokenize, request, timeout_s=60)
        assert unpack_u32(reply.token_ids).tolist() == tiny_hf().encode_chat(ChatRequest(messages))
        done.append(index)
        if len(done) == KILL_AFTER:
            processes[0].send_signal(signal.SIGKILL)

    async def client(indices: range) -> None:
        for index in indices:
            await one(index)

    try:
        async with asyncio.timeout(60):
            await both_serve.wait()
        await asyncio.gather(*(client(range(start, REQUESTS, CONCURRENCY)) for start in range(CONCURRENCY)))
        assert sorted(done) == list(range(REQUESTS))
        assert await asyncio.wait_for(processes[0].wait(), 30) == -signal.SIGKILL
        assert [replica.address for replica in replicas.serving] == [addresses[1]]
        assert processes[1].returncode is None
    finally:
        await replicas.close()
        for process in processes:
            if process.returncode is None:
                process.kill()
                await process.wait()

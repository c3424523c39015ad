"""A preprocess service in this process, with the tokenizer of the tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.common.rpc.server import GrpcServer
from services.preprocess.service import PreprocessService
from services.preprocess.settings import PreprocessSettings
from services.preprocess.thread_pool import ComputePool
from services.preprocess.tokenizers.registry import ModelRegistry
from sluice.v1 import preprocess_pb2, preprocess_pb2_grpc
from tests.support.data.loaded_tokenizers import tekken
from tests.support.servers.router_cluster import MODEL


@asynccontextmanager
async def preprocess() -> AsyncIterator[str]:
    """Yields its address."""
    settings = PreprocessSettings.load(["--listen", "127.0.0.1:0", "--models", f"{MODEL}=mistral-common:tekken_240911"])
    registry = ModelRegistry(settings.served, lambda spec: tekken())
    pool = ComputePool(2, max_waiting=8, inline_bytes=8192, limit_s=30)
    server = GrpcServer(settings, preprocess_pb2.DESCRIPTOR)
    preprocess_pb2_grpc.add_PreprocessServicer_to_server(PreprocessService(registry, pool, 1 << 20), server.server)
    await server.start()
    await server.set_serving(True)
    try:
        yield f"127.0.0.1:{server.port}"
    finally:
        await server.stop(0)
        await registry.close()
        pool.close()

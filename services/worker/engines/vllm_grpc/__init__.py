"""An unmodified `vllm serve --grpc` behind the engine contract."""

from services.worker.engines.vllm_grpc.engine import VllmGrpcEngine

__all__ = ["VllmGrpcEngine"]

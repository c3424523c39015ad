"""Serves an unmodified `vllm serve --grpc` as an engine."""

from services.worker.engines.vllm_grpc.engine import VllmGrpcEngine

__all__ = ["VllmGrpcEngine"]

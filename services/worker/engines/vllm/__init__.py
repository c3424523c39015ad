"""Runs vLLM in process: its AsyncLLM, with token ids in and out."""

from services.worker.engines.vllm.engine import VllmEngine

__all__ = ["VllmEngine"]

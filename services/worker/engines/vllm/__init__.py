"""vLLM in this process: its AsyncLLM, token ids in and out."""

from services.worker.engines.vllm.engine import VllmEngine

__all__ = ["VllmEngine"]

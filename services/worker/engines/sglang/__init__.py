"""SGLang: its engine in the worker's process, its schedulers in processes of their own."""

from services.worker.engines.sglang.engine import SglangEngine

__all__ = ["SglangEngine"]

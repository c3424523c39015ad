"""Hosts SGLang: its engine in the worker's process, its schedulers in child processes."""

from services.worker.engines.sglang.engine import SglangEngine

__all__ = ["SglangEngine"]

"""Serves an unmodified HTTP server of vLLM or SGLang as an engine."""

from services.worker.engines.http.engine import HttpEngine

__all__ = ["HttpEngine"]

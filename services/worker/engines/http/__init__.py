"""Serves an unmodified HTTP server of vLLM or SGLang as an engine."""

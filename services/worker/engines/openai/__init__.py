"""The openai engine: a client of any server with an OpenAI-compatible API, with text in and text out."""

from services.worker.engines.openai.engine import OpenAiEngine

__all__ = ["OpenAiEngine"]

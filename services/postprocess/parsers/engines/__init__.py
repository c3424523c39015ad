"""Adapters to the parsers of vLLM and SGLang, which run in processes of their own."""

"""Stands in for vllm.multimodal."""

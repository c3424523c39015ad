"""The engines' own tokenizers. Each runs in processes of its own, which may belong to another interpreter.

What is imported here must not need more than the standard library: the other interpreter may have nothing else of ours.
"""

from __future__ import annotations

from services.common.engines import versions as engine_versions

TESTED_VERSIONS = {"vllm": engine_versions.VLLM, "sglang": engine_versions.SGLANG}
"""Of each engine's package, the version whose ids `make test-engines` proves."""

NOT_NEEDED = {"sglang": ("torchvision", "torchaudio", "sgl_kernel", "triton")}
"""Kernels and image libraries that an engine imports at once and that no tokenizer needs; some exist for GPUs only."""

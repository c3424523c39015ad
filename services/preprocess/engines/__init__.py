"""The engines' tokenizers. Each runs in its own processes, possibly with another interpreter.

Modules imported here may only need the standard library: the other interpreter may lack our dependencies.
"""

from __future__ import annotations

TESTED_VERSIONS = {"vllm": "0.33.0", "sglang": "0.5.23"}
"""The version of each engine's package whose ids `make test-engines` verifies."""

NOT_NEEDED = {"sglang": ("torchvision", "torchaudio", "sgl_kernel", "triton")}
"""Kernel and image libraries that engines import but tokenizers do not need; some require a GPU."""

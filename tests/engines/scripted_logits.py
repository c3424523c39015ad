"""Makes a vLLM server say what a request's `vllm_xargs` hold: one logits processor, loaded by vLLM's own flag."""

from __future__ import annotations

from typing import Any

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor


class Scripted(AdapterLogitsProcessor):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """Token n of an answer is number n of "script", token ids joined by commas."""

    def is_argmax_invariant(self) -> bool:
        """It decides which token is the most likely."""
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        """Of one request; None when it brings no script."""
        script = (params.extra_args or {}).get("script")
        if script is None:
            return None
        token_ids = [int(token_id) for token_id in script.split(",")]

        def force(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            forced = torch.full_like(logits, float("-inf"))
            forced[token_ids[min(len(output_ids), len(token_ids) - 1)]] = 0.0
            return forced

        return force

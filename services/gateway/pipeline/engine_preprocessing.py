"""Prompts that the worker's engine makes the token ids of: the gateway passes on what the client wrote.

The router has no ids to compare caches with, so it chooses by load. What the prompt holds is known with the first
delta; from then on the generation is as any other, and may move to another worker.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.common.errors import invalid, unavailable
from services.gateway.core.request import (
    ChatPrompt,
    EmbedsPrompt,
    GenerationRequest,
    TextPrompt,
    TokenizedPrompt,
    TokenPrompt,
)
from services.gateway.workers.capabilities import prompt_capabilities
from services.gateway.workers.registry import WorkerEntry


class EngineTokenizeStage:
    """Leaves prompts to the worker; ids that the client sent are passed on as they are."""

    async def tokenize(self, request: GenerationRequest, worker: WorkerEntry) -> TokenizedPrompt:
        """See TokenizeStage; SluiceError(INVALID_ARGUMENT) names what a worker cannot be told."""
        prompt = request.prompt
        if isinstance(prompt, TextPrompt) and prompt.add_special_tokens is not None:
            raise invalid(
                "add_special_tokens is not supported here: the engine makes the prompt.",
                param="add_special_tokens",
                code="unsupported_parameter",
            )
        return TokenizedPrompt(
            token_ids=prompt.token_ids if isinstance(prompt, TokenPrompt) else b"",
            block_hashes=b"",
            hash_scheme="",
            stop_token_ids=b"",
            eos_token_ids=worker.eos_token_ids,
            context_length=worker.context_length,
            prompt_tail=prompt.token_ids[-64:] if isinstance(prompt, TokenPrompt) else b"",
            embeds=prompt if isinstance(prompt, EmbedsPrompt) else None,
            raw=prompt if isinstance(prompt, ChatPrompt | TextPrompt) else None,
        )


def check_able(workers: Sequence[WorkerEntry], prompt: TokenizedPrompt, text_out: bool) -> None:
    """SluiceError(UNAVAILABLE) when no worker does what this gateway leaves to them.

    Args:
        workers: of one model, at least one.
        text_out: the workers are to make the text.
    """
    for capability in prompt_capabilities(prompt, text_out):
        if not any(capability in worker.capabilities for worker in workers):
            flag = "postprocessing" if capability == "text_out" else "preprocessing"
            raise unavailable(
                f"This gateway leaves {flag} to the engine, and no worker of model {workers[0].model!r} has the "
                f"capability {capability!r}: start workers that have it, or the gateway with --{flag} frontend.",
                code="engine_cannot",
            )

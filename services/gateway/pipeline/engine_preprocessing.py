"""Tokenization by the worker's engine: the gateway forwards prompts as the client wrote them.

Without token ids the router cannot compute overlaps, so it chooses workers by load. The worker returns the prompt's
token ids with its first delta; from then on the generation can migrate like any other.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.common.base.errors import invalid, unavailable
from services.gateway.backends.workers.capabilities import prompt_capabilities
from services.gateway.backends.workers.registry import WorkerEntry
from services.gateway.core.request import (
    ChatPrompt,
    EmbedsPrompt,
    GenerationRequest,
    TextPrompt,
    TokenizedPrompt,
    TokenPrompt,
)


class EngineTokenizeStage:
    """Leaves tokenization to the worker; token ids sent by the client are forwarded unchanged."""

    async def tokenize(self, request: GenerationRequest, worker: WorkerEntry) -> TokenizedPrompt:
        """Implements TokenizeStage; raises SluiceError(INVALID_ARGUMENT) for options that workers do not support."""
        prompt = request.prompt
        if request.text_only and not isinstance(prompt, ChatPrompt | TextPrompt):
            raise invalid(
                "The engines of this model take text only; send the prompt as text or messages.",
                param="prompt",
                code="unsupported_parameter",
            )
        if isinstance(prompt, ChatPrompt) and prompt.media:
            raise invalid(
                f"{prompt.media[0].part} is not supported by this gateway, because the engine tokenizes prompts: send "
                "text only.",
                param=prompt.media[0].part,
                code="media_not_supported",
            )
        if isinstance(prompt, TextPrompt) and prompt.add_special_tokens is not None:
            raise invalid(
                "add_special_tokens is not supported by this gateway, because the engine tokenizes prompts; omit it.",
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


def check_engine_capabilities(workers: Sequence[WorkerEntry], prompt: TokenizedPrompt, text_out: bool) -> None:
    """Checks that a worker has every capability required by preprocessing or postprocessing in the engine.

    Args:
        workers: workers of one model, at least one.
        text_out: whether the engine detokenizes.

    Raises:
        SluiceError: UNAVAILABLE when no worker has one of the capabilities.
    """
    for capability in prompt_capabilities(prompt, text_out):
        if not any(capability in worker.capabilities for worker in workers):
            flag = "postprocessing" if capability == "text_out" else "preprocessing"
            raise unavailable(
                f"This gateway runs with --{flag} engine, but no worker of model {workers[0].model!r} has the "
                f"capability {capability!r}: start workers that have it, or the gateway with --{flag} frontend.",
                code="engine_cannot",
            )

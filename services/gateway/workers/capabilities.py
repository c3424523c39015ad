"""Which workers can do what a request needs, by the capabilities on their cards."""

from __future__ import annotations

from collections.abc import Sequence

from services.common.errors import invalid, not_found, quoted, unavailable
from services.gateway.core.request import ChatPrompt, TokenizedPrompt
from services.gateway.workers.registry import WorkerEntry

LOAD_ONLY_POLICY = "least_loaded"
"""The router's policy for prompts whose token ids are not known yet."""


def able(workers: Sequence[WorkerEntry], needs: Sequence[tuple[str, str]]) -> list[WorkerEntry]:
    """The workers that have every capability needed.

    Args:
        workers: of one model, at least one.
        needs: capabilities, each with the field of the client's request that asks for it; empty where the gateway
            itself does.

    Raises:
        SluiceError: INVALID_ARGUMENT naming the first field that no worker can honour, UNAVAILABLE for what the gateway
            itself needs.
    """
    left = list(workers)
    for capability, field in needs:
        left = [worker for worker in left if capability in worker.capabilities]
        if not left and not field:
            said = f"No worker with the capability {capability!r} is left; try again soon."
            raise unavailable(said, code="no_workers")
        if not left:
            raise invalid(
                f"{field} is not supported: no engine that serves this model has the capability {capability!r}.",
                param=field,
                code="unsupported_parameter",
            )
    return left


def holding(workers: Sequence[WorkerEntry], adapter: str) -> list[WorkerEntry]:
    """The workers that hold a LoRA adapter; all of them where the name is empty.

    Raises:
        SluiceError: NOT_FOUND adapter_not_found when none does.
    """
    left = [worker for worker in workers if not adapter or adapter in worker.adapters]
    if workers and not left:
        raise not_found(
            f"No worker of model {workers[0].model!r} has the LoRA adapter {quoted(adapter)} loaded.",
            param="lora_path",
            code="adapter_not_found",
        )
    return left


def prompt_capabilities(prompt: TokenizedPrompt, text_out: bool) -> list[str]:
    """What a worker must be able to do beside generating."""
    needed = []
    if prompt.raw is not None:
        needed.append("messages" if isinstance(prompt.raw, ChatPrompt) else "text")
    if text_out:
        needed.append("text_out")
    return needed

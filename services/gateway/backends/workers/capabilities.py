"""Selects the workers that have the capabilities and adapters a request needs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from services.common.base.errors import invalid, not_found, quoted, unavailable
from services.common.types.media.spans import MediaKind
from services.gateway.backends.workers.registry import WorkerEntry
from services.gateway.core.request import ChatPrompt, TokenizedPrompt

TOKEN_IDS = "token_ids"
MEDIA = tuple(kind.capability for kind in MediaKind)
LOAD_ONLY_POLICY = "least_loaded"
"""The router's policy for prompts whose token ids are not known yet."""


def able(workers: Sequence[WorkerEntry], needs: Sequence[tuple[str, str]]) -> list[WorkerEntry]:
    """Returns the workers that have every required capability.

    Args:
        workers: workers of one model, at least one.
        needs: required capabilities, each with the request field that requires it; the field is empty where the
            gateway itself requires the capability.

    Raises:
        SluiceError: INVALID_ARGUMENT naming the first field that no worker supports; UNAVAILABLE for a capability that
            the gateway requires, and for media items if all workers make other tokens of them than preprocess.
    """
    remaining = list(workers)
    for capability, field in needs:
        having = [worker for worker in remaining if capability in worker.capabilities]
        remaining = [worker for worker in having if not _gets_no(capability, worker)]
        if having and not remaining:
            raise unavailable(
                f"{field or capability} cannot be served: every worker of this model makes other tokens of media items "
                "than preprocess does; load the same model folder on both sides (see tokenizer.media_parity of "
                "/v1/models).",
                code="media_parity",
            )
        if not remaining and not field:
            message = f"No worker with the capability {capability!r} is available; try again later."
            raise unavailable(message, code="no_workers")
        if not remaining and capability in MEDIA:
            raise invalid(
                f"{field} is not supported: no engine that serves this model takes {capability} input.",
                param=field,
                code="media_not_supported",
            )
        if not remaining:
            raise invalid(
                f"{field} is not supported: no engine that serves this model has the capability {capability!r}.",
                param=field,
                code="unsupported_parameter",
            )
    return remaining


def modalities(workers: Iterable[WorkerEntry], counted: Collection[str] | None = None) -> list[str]:
    """Returns the kinds of input that some worker of a model takes: text, and kinds of media items.

    Args:
        counted: kinds of media items that preprocess takes for the model; None if that is unknown.
    """
    every = list(workers)
    kinds = [kind for kind in MEDIA if counted is None or kind in counted]
    return ["text", *(kind for kind in kinds if any(_takes(kind, worker) for worker in every))]


def _takes(kind: str, worker: WorkerEntry) -> bool:
    return kind in worker.capabilities and not _gets_no(kind, worker)


def _gets_no(capability: str, worker: WorkerEntry) -> bool:
    """Whether a worker with the capability is excluded from it."""
    return capability in worker.media_differ


def are_text_only(workers: Sequence[WorkerEntry]) -> bool:
    """Whether none of a model's workers takes token ids: prompts and output are text, and the router sees load only."""
    return bool(workers) and not any(TOKEN_IDS in worker.capabilities for worker in workers)


def with_adapter(workers: Sequence[WorkerEntry], adapter: str) -> list[WorkerEntry]:
    """Returns the workers that have loaded a LoRA adapter, or all workers if the name is empty.

    Raises:
        SluiceError: NOT_FOUND (adapter_not_found) when no worker has it.
    """
    remaining = [worker for worker in workers if adapter in worker.adapters] if adapter else list(workers)
    if workers and not remaining:
        raise not_found(
            f"No worker of model {workers[0].model!r} has the LoRA adapter {quoted(adapter)} loaded.",
            param="lora_path",
            code="adapter_not_found",
        )
    return remaining


def prompt_capabilities(prompt: TokenizedPrompt, text_out: bool) -> list[str]:
    """Returns the capabilities a worker needs to tokenize this prompt and, with `text_out`, to detokenize."""
    required = []
    if prompt.raw is not None:
        required.append("messages" if isinstance(prompt.raw, ChatPrompt) else "text")
    if text_out:
        required.append("text_out")
    return required

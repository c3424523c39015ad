"""Decides whether a worker may join the workers of its model: they must have the same blocks and tokenizer.

Prompts are tokenized for a model, not for a worker, and a client's prompts are for the model that it named. A worker
with another tokenizer would answer them wrongly; one that merely claims the model's name would read them. While no
worker serves a model, its name still belongs to the tokenizer that it is pinned to (`name_pins`).
"""

from __future__ import annotations

from collections.abc import Iterable

from services.common.base.errors import ErrorKind, SluiceError
from services.common.discovery.tokenizer_agreement import Fingerprints, same_tokenizer
from services.router.state.workers.worker import Worker

TOKENIZER_DIFFERS = "tokenizer_differs"
UNPROVEN_NAME = "unproven_name"
NAME_PINNED = "name_pinned"
MESSAGES = {
    TOKENIZER_DIFFERS: "its tokenizer is not that of the model's other workers; register it under another model name",
    UNPROVEN_NAME: "its engine's server chose the model's name, and nothing shows that it is the model of the other "
    "workers; state the model in the list of engines, or with --model",
    NAME_PINNED: "its engine's server chose a name that belongs to the tokenizer of the model's former workers, not to "
    "its own; state the model in the list of engines, or with --model",
}
"""What to do about a worker that is set aside, by reason."""


def reason_to_set_aside(worker: Worker, others: Iterable[Worker], pinned: Fingerprints | None = None) -> str:
    """Returns the reason why a worker must not receive its model's requests; empty: it may.

    The workers that serve the model already decide, but one whose server chose the name gives way to one whose
    operator did.

    Args:
        others: the workers of the model.
        pinned: the tokenizer that the model's name belongs to; None: to none.
    """
    serving = [other for other in others if other.accepts and other.worker_id != worker.worker_id]
    if not worker.named_by_server:
        serving = [other for other in serving if not other.named_by_server]
    same = {same_tokenizer(worker, other) for other in serving}
    if False in same:
        return TOKENIZER_DIFFERS
    if worker.named_by_server and same and True not in same:
        return UNPROVEN_NAME
    if not worker.named_by_server or pinned is None or True in same or same_tokenizer(worker, pinned):
        return ""
    return NAME_PINNED


def check_block_size(worker: Worker, others: Iterable[Worker]) -> None:
    """Raises SluiceError (FAILED_PRECONDITION) for a worker whose blocks differ from those of the model's others."""
    for other in others:
        if not other.block_size or not worker.block_size or other.worker_id == worker.worker_id:
            continue
        if (other.block_size, other.hash_scheme) != (worker.block_size, worker.hash_scheme):
            raise SluiceError(
                ErrorKind.FAILED_PRECONDITION,
                f"Model {worker.model} is served with blocks of {other.block_size} tokens ({other.hash_scheme}), but "
                f"this worker has {worker.block_size} ({worker.hash_scheme}); use the same block size on all workers.",
                param="card.block_size",
                code="block_size_mismatch",
            )

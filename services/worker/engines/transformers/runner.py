"""What the engine needs of a thread that runs requests: continuous batching or single steps."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from services.worker.engines.transformers.step import Gauges

if TYPE_CHECKING:
    from services.worker.engines.transformers.batch_request import BatchRequest


class StepRunner(Protocol):
    """Runs requests in a thread and reports their tokens to a `Listener`.

    Attributes:
        gauges: Metrics of the last step; any thread may read them.
    """

    gauges: Gauges

    @property
    def alive(self) -> bool:
        """Whether the thread is running."""

    @property
    def fatal_error(self) -> BaseException | None:
        """The failure that ended the thread; None if it has not failed."""

    @property
    def shares_prefixes(self) -> bool:
        """Whether requests can share cached prefixes."""

    @property
    def cache_tokens(self) -> int:
        """Capacity of the cache in tokens, which limits the length of a sequence."""

    def start(self) -> None:
        """Starts the thread as a daemon thread."""

    def close(self, limit_s: float) -> None:
        """Ends the thread and waits for it, at most `limit_s` seconds."""

    def add(self, key: str, batch_request: BatchRequest, token_ids: list[int], limit: int) -> bool:
        """Queues a request that generates at most `limit` tokens; returns False when the thread has stopped."""

    def drop(self, key: str) -> None:
        """Cancels a request before the next step; ignores unknown ones."""

    def release(self, key: str) -> None:
        """Forgets a request whose last token was reported."""

    def pause(self) -> AbstractContextManager[Any]:
        """Returns a context manager that holds the thread between two steps."""

    def forget_prefixes(self) -> None:
        """Clears the prefix cache."""

"""What a pipeline, or a handler in its place, returns for a request that it has started."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from services.gateway.core.receipts import Receipt
from services.gateway.core.request import SamplingParams


class Generation(ABC):
    """The running choices of one prompt: their usage so far, and the way to cancel them.

    The choices themselves go to the sinks. Usage is read when a response ends and, for live counts, before that.
    """

    @property
    @abstractmethod
    def choices(self) -> int:
        """Number of choices."""

    @property
    @abstractmethod
    def prompt_tokens(self) -> int:
        """Number of prompt tokens."""

    @property
    @abstractmethod
    def completion_tokens(self) -> int:
        """Generated tokens, over all choices."""

    @abstractmethod
    def cancel(self) -> None:
        """Cancels all running choices; their sinks are not called again."""

    @property
    def generated_tokens(self) -> int:
        """Generated tokens over all choices, including aborted ones; charged to the caller."""
        return self.completion_tokens

    @property
    def cached_tokens(self) -> int:
        """Cached prompt tokens; the maximum over all choices."""
        return 0

    @property
    def reasoning_tokens(self) -> int:
        """Generated reasoning tokens, over all choices."""
        return 0

    @property
    def degraded(self) -> Collection[str]:
        """Fallbacks taken so far."""
        return ()

    @property
    def migrations(self) -> int:
        """Migrations so far, over all choices."""
        return 0

    @property
    def receipts(self) -> Sequence[Receipt]:
        """Route receipts of the choices, if the request asks for them."""
        return ()

    @property
    def defaults(self) -> SamplingParams:
        """Sampling options that the model's files set for what the request leaves unset."""
        return SamplingParams()

    @property
    def prompt_ids(self) -> array[int]:
        """Token ids of the prompt; may be appended to later."""
        return array("I")

    def tokens_of(self, choice: int) -> Sequence[int]:
        """Returns the token ids of a choice, to which later ones are appended; empty for none."""
        return array("I")


@dataclass
class AnsweredGeneration(Generation):
    """The generation of a handler that answers by itself; it may change the counts while it does.

    A handler that calls the sinks before it returns has nothing to cancel.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    choices: int = 1
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    degraded: Collection[str] = ()
    receipts: Sequence[Receipt] = ()
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True

"""What an admitted request may do, and what it has used."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Protocol

from services.gateway.admission import refusals
from services.gateway.admission.keys import ANONYMOUS, ApiKey
from services.gateway.admission.limits import Decision, Limiter


class Used(Protocol):
    """A generation, as far as it is paid for."""

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def generated_tokens(self) -> int:
        """Tokens made so far, also when it was given up."""


class Permit:
    """One admitted request.

    Attributes:
        key: whose request it is.
        decision: what the limits said last; None when nothing is counted.
    """

    def __init__(
        self,
        key: ApiKey,
        request_id: str,
        limiter: Limiter | None,
        decision: Decision | None,
        on_refused: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self.key = key
        self.request_id = request_id
        self.decision = decision
        self._limiter = limiter
        self._on_refused = on_refused
        self._charged = 0
        self._used: list[Used] = []
        self._also = 0

    def may_use(self, model: str) -> bool:
        """Whether it may ask this model."""
        return self.key.may_use(model)

    def check_model(self, model: str) -> None:
        """SluiceError(403) when it may not."""
        if not self.key.may_use(model):
            raise self._told(refusals.not_for(model))

    async def charge(self, tokens: int) -> None:
        """Takes what a prompt and its answer may need, before anything runs; what was not needed comes back at the end.

        Raises:
            SluiceError: OVERLOADED when the key has not that much left.
        """
        if self._limiter is None or not self.key.tokens_per_minute:
            return
        if tokens > self.key.tokens_per_minute:
            raise self._told(refusals.never(self.key, tokens, self.decision or Decision()))
        decision = self.decision = await self._limiter.charge(self.key, self.request_id, tokens)
        if decision.refused_by is not None:
            raise self._told(refusals.over(self.key, decision))
        self._charged += tokens

    def watch(self, generation: Used) -> None:
        """A generation that this request pays for."""
        if self.key.tokens_per_minute:
            self._used.append(generation)

    def spent(self, tokens: int) -> None:
        """Tokens used beside generations, such as those of embedded texts."""
        self._also += tokens

    def _told(self, refused: refusals.Refused) -> refusals.Refused:
        self._on_refused(refused.reason)
        return refused

    async def settle(self) -> None:
        """The request is over: gives back what it did not use."""
        if self._limiter is None:
            return
        used = sum(one.prompt_tokens + one.generated_tokens for one in self._used) + self._also
        self._used.clear()
        await self._limiter.settle(self.key, self.request_id, self._charged - used)


OPEN = Permit(ANONYMOUS, "", None, None)

_current: ContextVar[Permit] = ContextVar("permit", default=OPEN)


def current() -> Permit:
    """The permit of the request at hand; one that allows everything when nothing is asked for."""
    return _current.get()


def begin(permit: Permit) -> None:
    """From now on this task works for that request."""
    _current.set(permit)

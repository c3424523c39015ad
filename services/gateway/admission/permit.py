"""What an admitted request may do, and what it has used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from services.gateway.admission import errors as refusals
from services.gateway.admission import tenants
from services.gateway.admission.keys import ANONYMOUS, STRANGER, ApiKey
from services.gateway.admission.limits import LimitDecision, Limiter
from services.gateway.admission.scopes import Scope
from services.gateway.admission.tenants import TenantSalt


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
        salts: whether its tenant has a part of the prefix cache of its own: "off", "on", or "auto", which allows the
            request to run where no engine can do that.
    """

    def __init__(
        self,
        key: ApiKey,
        request_id: str,
        limiter: Limiter | None,
        decision: LimitDecision | None,
        on_refused: Callable[[str], None] = lambda reason: None,
        salts: TenantSalt = "off",
    ) -> None:
        self.key = key
        self.salts = salts
        self.request_id = request_id
        self.decision = decision
        self._limiter = limiter
        self._on_refused = on_refused
        self._charged = 0
        self._used: list[Used] = []
        self._also = 0

    @property
    def owner(self) -> str:
        """The tenant whose data the request reaches."""
        return self.key.owner

    @property
    def is_known(self) -> bool:
        """Whether the request showed a valid key, or the gateway needs none."""
        return self.key is not STRANGER

    def may(self, scope: Scope) -> bool:
        """Whether the key has a scope."""
        return scope in self.key.scopes

    def require(self, scope: Scope, field: str = "", subject: str = "") -> None:
        """Raises SluiceError(PERMISSION_DENIED) when the key lacks a scope.

        Args:
            field: header or field of the body that needs it.
            subject: what else needs it, such as a path.
        """
        if scope not in self.key.scopes:
            raise self._told(refusals.lacks(self.key, scope, field, subject or field))

    def may_use(self, model: str) -> bool:
        """Whether it may ask this model."""
        return self.key.may_use(model)

    def check_model(self, model: str, field: str = "model") -> None:
        """Raises SluiceError(PERMISSION_DENIED) when it may not.

        Args:
            field: of the client's request that names the model, or the adapter.
        """
        if not self.key.may_use(model):
            raise self._told(refusals.not_for(model, field))

    def cache_salt(self, chosen: str) -> str:
        """The salt that separates the request's tenant from others.

        Args:
            chosen: the client's own; empty for none.
        """
        return tenants.salted(self.owner, chosen)

    async def charge(self, tokens: int) -> None:
        """Takes what a prompt and its answer may need, before anything runs; what was not needed comes back at the end.

        Raises:
            SluiceError: OVERLOADED when the key has not that much left.
        """
        if self._limiter is None or not self.key.tokens_per_minute:
            return
        if tokens > self.key.tokens_per_minute:
            raise self._told(refusals.never(self.key, tokens, self.decision or LimitDecision()))
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

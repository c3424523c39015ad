"""Permissions and token use of an admitted request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from services.gateway.admission import errors, tenants
from services.gateway.admission.keys import ANONYMOUS, STRANGER, ApiKey
from services.gateway.admission.limits import LimitDecision, Limiter
from services.gateway.admission.scopes import Scope
from services.gateway.admission.tenants import TenantSalt


class Used(Protocol):
    """Token counts of a generation."""

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def generated_tokens(self) -> int:
        """Tokens generated so far, including those of an aborted generation."""


class Permit:
    """One admitted request.

    Attributes:
        key: API key of the request.
        decision: latest decision of the limiter; None if the key has no limits.
        salts: whether its tenant has a separate part of the prefix cache: "off", "on", or "auto", which also allows
            engines that cannot separate tenants.
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
        self._generations: list[Used] = []
        self._other_tokens = 0

    @property
    def owner(self) -> str:
        """The tenant whose data the request has access to."""
        return self.key.owner

    @property
    def is_known(self) -> bool:
        """Whether the request has a valid key, or the gateway requires none."""
        return self.key is not STRANGER

    def may(self, scope: Scope) -> bool:
        """Returns whether the key has a scope."""
        return scope in self.key.scopes

    def require(self, scope: Scope, field: str = "", subject: str = "") -> None:
        """Raises SluiceError(PERMISSION_DENIED) if the key lacks a scope.

        Args:
            field: header or body field that requires it.
            subject: what requires it if it is neither, such as a path.
        """
        if scope not in self.key.scopes:
            raise self._count(errors.missing_scope(self.key, scope, field, subject or field))

    def may_use(self, model: str) -> bool:
        """Returns whether the request may use a model."""
        return self.key.may_use(model)

    def check_model(self, model: str, field: str = "model") -> None:
        """Raises SluiceError(PERMISSION_DENIED) if the request may not use a model.

        Args:
            field: request field that names the model or adapter.
        """
        if not self.key.may_use(model):
            raise self._count(errors.model_not_allowed(model, field))

    def cache_salt(self, chosen: str) -> str:
        """Returns the salt that separates the request's tenant from others.

        Args:
            chosen: salt chosen by the client; empty for none.
        """
        return tenants.salted(self.owner, chosen)

    async def charge(self, tokens: int) -> None:
        """Charges the tokens that a prompt and its output may need; unused ones are refunded at the end.

        Raises:
            SluiceError: OVERLOADED (HTTP 429) if the key has fewer tokens left.
        """
        if self._limiter is None or not self.key.tokens_per_minute:
            return
        if tokens > self.key.tokens_per_minute:
            raise self._count(errors.exceeds_token_limit(self.key, tokens, self.decision or LimitDecision()))
        decision = self.decision = await self._limiter.charge(self.key, self.request_id, tokens)
        if decision.refused_by is not None:
            raise self._count(errors.rate_limited(self.key, decision))
        self._charged += tokens

    def watch(self, generation: Used) -> None:
        """Adds a generation whose tokens are charged to the request."""
        if self.key.tokens_per_minute:
            self._generations.append(generation)

    def spent(self, tokens: int) -> None:
        """Adds tokens used other than by generations, such as those of embedded texts."""
        self._other_tokens += tokens

    def _count(self, refused: errors.Refused) -> errors.Refused:
        self._on_refused(refused.reason)
        return refused

    async def settle(self) -> None:
        """Ends the request and refunds unused tokens."""
        if self._limiter is None:
            return
        generated = sum(each.prompt_tokens + each.generated_tokens for each in self._generations)
        self._generations.clear()
        await self._limiter.settle(self.key, self.request_id, self._charged - generated - self._other_tokens)


OPEN = Permit(ANONYMOUS, "", None, None)

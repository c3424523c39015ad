"""Identities of callers, as transports prove them: by a token or by the name in a certificate, never by a message."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field

SERVICES = ("gateway", "preprocess", "router", "worker", "postprocess")
OPERATOR = "operator"
CALLERS = (*SERVICES, "scheduler", OPERATOR)
WORKER = "worker"


@dataclass(frozen=True, slots=True)
class Caller:
    """An identity that was proven.

    Attributes:
        service: one of CALLERS; empty where neither tokens nor certificates identify callers.
        worker_id: the one worker that a caller of the service ``worker`` is; empty: any.
        proof: what proved it, for logs: the id of a token (the beginning of its digest) or the name in a certificate.
        reserved: worker ids that other callers' tokens name, which this one may not register.
    """

    service: str = ""
    worker_id: str = ""
    proof: str = ""
    reserved: frozenset[str] = field(default=frozenset(), compare=False, repr=False)

    @property
    def name(self) -> str:
        """The service, or ``worker/ID``; stays the same when tokens and certificates rotate."""
        return f"{self.service}/{self.worker_id}" if self.worker_id else self.service

    @property
    def scope(self) -> str:
        """Whose reservations the caller may touch: those booked under this name. Empty: everyone's."""
        return "" if self.service == OPERATOR else self.name

    def may_register(self, worker_id: str) -> bool:
        """Whether the caller may register a worker under this id."""
        return worker_id not in self.reserved and self.worker_id in ("", worker_id)


ANONYMOUS = Caller()

current: ContextVar[Caller] = ContextVar("sluice_caller", default=ANONYMOUS)
"""The caller of the RPC that is being served; set once an RPC, inherited by the tasks that it starts."""


def named(text: str, services: tuple[str, ...] = CALLERS) -> tuple[str, str] | None:
    """Splits ``SERVICE`` or ``worker/ID`` into service and worker id; None when it is neither."""
    service, slash, worker_id = text.partition("/")
    if service not in services or (slash and (service != WORKER or not worker_id)):
        return None
    return service, worker_id


def of_certificate(uris: list[str], trust_domain: str) -> Caller | None:
    """Returns the caller that a certificate names by exactly one URI ``spiffe://TRUST-DOMAIN/SERVICE`` or
    ``…/worker/ID`` among its subject's alternative names; None when there is none, or several."""
    prefix = f"spiffe://{trust_domain}/"
    ours = [uri for uri in uris if uri.startswith(prefix)]
    found = named(ours[0].removeprefix(prefix)) if len(ours) == 1 else None
    return None if found is None else Caller(*found, proof=ours[0])


def both(token: Caller, certificate: Caller) -> Caller | None:
    """Returns the caller that shows a token and a certificate, with what both allow; None for two different workers.

    Where they name different services, each RPC has to be allowed to both; the certificate then names the caller.
    """
    if token.worker_id and certificate.worker_id and token.worker_id != certificate.worker_id:
        return None
    narrower = token if certificate.service == OPERATOR else certificate
    return Caller(
        narrower.service,
        token.worker_id or certificate.worker_id,
        f"{certificate.proof}, {token.proof}",
        token.reserved,
    )

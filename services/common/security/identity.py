"""Identities of callers, authenticated by the transport: by token or certificate name, never by a message."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field

SERVICES = ("gateway", "preprocess", "router", "worker", "postprocess")
OPERATOR = "operator"
CALLERS = (*SERVICES, "scheduler", OPERATOR)
WORKER = "worker"


@dataclass(frozen=True, slots=True)
class Caller:
    """An authenticated identity.

    Attributes:
        service: one of CALLERS; empty when neither tokens nor certificates identify callers.
        worker_id: the worker, for callers of the service ``worker``; empty: any worker.
        proof: how it was authenticated, for logs: the id of a token (a prefix of its digest) or the certificate name.
        reserved: worker ids that other callers' tokens name, which this caller may not register.
    """

    service: str = ""
    worker_id: str = ""
    proof: str = ""
    reserved: frozenset[str] = field(default=frozenset(), compare=False, repr=False)

    @property
    def name(self) -> str:
        """The service, or ``worker/ID``; unaffected by the rotation of tokens and certificates."""
        return f"{self.service}/{self.worker_id}" if self.worker_id else self.service

    @property
    def scope(self) -> str:
        """The name whose reservations the caller may change; empty: all reservations."""
        return "" if self.service == OPERATOR else self.name

    def may_register(self, worker_id: str) -> bool:
        """Whether the caller may register a worker with this id."""
        return worker_id not in self.reserved and self.worker_id in ("", worker_id)


ANONYMOUS = Caller()

current: ContextVar[Caller] = ContextVar("sluice_caller", default=ANONYMOUS)
"""The caller of the current RPC; set once per RPC and inherited by the tasks it starts."""


def named(text: str, services: tuple[str, ...] = CALLERS) -> tuple[str, str] | None:
    """Splits ``SERVICE`` or ``worker/ID`` into service and worker id; returns None when it is neither."""
    service, slash, worker_id = text.partition("/")
    if service not in services or (slash and (service != WORKER or not worker_id)):
        return None
    return service, worker_id


def of_certificate(uris: list[str], trust_domain: str) -> Caller | None:
    """Returns the caller named by a certificate's URI alternative names; None unless exactly one matches.

    The URI is ``spiffe://TRUST-DOMAIN/SERVICE`` or ``…/worker/ID``.
    """
    prefix = f"spiffe://{trust_domain}/"
    matching = [uri for uri in uris if uri.startswith(prefix)]
    caller_name = named(matching[0].removeprefix(prefix)) if len(matching) == 1 else None
    return None if caller_name is None else Caller(*caller_name, proof=matching[0])


def both(token: Caller, certificate: Caller) -> Caller | None:
    """Returns the caller authenticated by both token and certificate; None for two different workers.

    If they name different services, each RPC must be allowed to both; the certificate's name is used.
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

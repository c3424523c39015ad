"""`sluice up --tls DIR`: the flags that make every process speak TLS, and what its probes show and trust."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from services.common.errors import SluiceError
from services.common.security.tls import PeerCredentials, channel_credentials, server_credentials
from services.common.settings import TlsSettings

if TYPE_CHECKING:
    from sluice.cli.up.plan import Process

SERVICES = ("gateway", "preprocess", "router", "postprocess", "worker")
AUTHORITY = "ca"
TRUST_DOMAIN = "sluice"
"""As TlsSettings.tls_trust_domain is by default."""


def problem(folder: Path) -> str:
    """Why the certificates in a folder cannot be used, in one sentence; empty when they can."""
    try:
        for service in SERVICES:
            server_credentials(_identity(folder, service))
    except SluiceError as error:
        return f"--tls {folder}: {error.message} `sluice certs {folder}` makes a set."
    unnamed = [service for service in SERVICES if not _names_a_caller(folder / f"{service}.pem")]
    if unnamed:
        return (
            f"--tls {folder}: {unnamed[0]}.pem does not name the service (spiffe://{TRUST_DOMAIN}/{unnamed[0]}), so "
            f"others would refuse its calls. `sluice certs {folder} --renew` replaces it."
        )
    return ""


def _names_a_caller(certificate: Path) -> bool:
    """Whether services let the holder call others; True where the package that reads certificates is missing."""
    try:
        from cryptography import x509
    except ImportError:
        return True
    found = x509.load_pem_x509_certificate(certificate.read_bytes())
    try:
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return False
    return any(uri.startswith("spiffe://") for uri in names.get_values_for_type(x509.UniformResourceIdentifier))


def secured(processes: Sequence[Process], folder: Path) -> list[Process]:
    """The same processes with TLS everywhere: mTLS between services, HTTPS for clients."""
    return [replace(one, arguments=(*one.arguments, *flags(one.kind, folder)), tls=folder) for one in processes]


def probe_credentials(folder: Path) -> PeerCredentials | None:
    """What a probe shows to a gRPC service: the gateway's certificate."""
    return channel_credentials(_identity(folder, "gateway"))


def probe_context(folder: Path) -> ssl.SSLContext:
    """For a probe of the gateway: it must have a certificate of the authority, whatever address it listens on; it is
    shown its own, because it may want one of its clients."""
    context = ssl.create_default_context(cafile=str(authority_of(folder)))
    context.check_hostname = False
    context.load_cert_chain(folder / "gateway.pem", folder / "gateway.key")
    return context


def authority_of(folder: Path) -> Path:
    """The file that clients must trust."""
    return folder / f"{AUTHORITY}.pem"


def _identity(folder: Path, service: str) -> TlsSettings:
    return TlsSettings(
        tls_cert=folder / f"{service}.pem", tls_key=folder / f"{service}.key", tls_ca=folder / f"{AUTHORITY}.pem"
    )


def flags(service: str, folder: Path) -> tuple[str, ...]:
    """The TLS flags of one service, with its files in the folder; callers must show a certificate."""
    certificate, key = str(folder / f"{service}.pem"), str(folder / f"{service}.key")
    trust = ("--tls-cert", certificate, "--tls-key", key, "--tls-ca", str(authority_of(folder)))
    https = ("--https-cert", certificate, "--https-key", key) if service == "gateway" else ()
    return (*trust, "--tls-require-client-cert", *https)

"""`sluice up --tls DIR`: the TLS flags of every process, and the credentials of probes."""

from __future__ import annotations

import ssl
from pathlib import Path

from services.common.base.errors import SluiceError
from services.common.security.tls import PeerCredentials, channel_credentials, server_credentials
from services.common.settings.service import TlsSettings

SERVICES = ("gateway", "preprocess", "router", "postprocess", "worker")
AUTHORITY = "ca"
TRUST_DOMAIN = "sluice"
"""The default of TlsSettings.tls_trust_domain."""


def problem(folder: Path) -> str:
    """Returns why the certificates in a folder cannot be used; empty if they can."""
    try:
        for service in SERVICES:
            server_credentials(_identity(folder, service))
    except SluiceError as error:
        return f"--tls {folder}: {error.message} Create the certificates with `sluice certs {folder}`."
    unnamed = [service for service in SERVICES if not _names_a_caller(folder / f"{service}.pem")]
    if unnamed:
        return (
            f"--tls {folder}: {unnamed[0]}.pem does not name the service (spiffe://{TRUST_DOMAIN}/{unnamed[0]}), so "
            f"other services would reject its calls. Replace it with `sluice certs {folder} --renew`."
        )
    return ""


def _names_a_caller(certificate: Path) -> bool:
    """Whether the certificate names a caller; True if the package that reads certificates is missing."""
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


def probe_credentials(folder: Path) -> PeerCredentials | None:
    """Returns credentials for probing gRPC services, with the gateway's certificate."""
    return channel_credentials(_identity(folder, "gateway"))


def probe_context(folder: Path) -> ssl.SSLContext:
    """Returns a context for probing the gateway.

    Its certificate must be of the authority, for any host name. The gateway's own certificate is presented, because it
    may require one of its clients.
    """
    context = ssl.create_default_context(cafile=str(authority_of(folder)))
    context.check_hostname = False
    context.load_cert_chain(folder / "gateway.pem", folder / "gateway.key")
    return context


def authority_of(folder: Path) -> Path:
    """Returns the file of the authority, which clients must trust."""
    return folder / f"{AUTHORITY}.pem"


def _identity(folder: Path, service: str) -> TlsSettings:
    return TlsSettings(
        tls_cert=folder / f"{service}.pem", tls_key=folder / f"{service}.key", tls_ca=folder / f"{AUTHORITY}.pem"
    )


def flags(service: str, folder: Path) -> tuple[str, ...]:
    """Returns the TLS flags of one service, with its files in the folder; callers must present a certificate."""
    certificate, key = str(folder / f"{service}.pem"), str(folder / f"{service}.key")
    trust = ("--tls-cert", certificate, "--tls-key", key, "--tls-ca", str(authority_of(folder)))
    https = ("--https-cert", certificate, "--https-key", key) if service == "gateway" else ()
    return (*trust, "--tls-require-client-cert", *https)
